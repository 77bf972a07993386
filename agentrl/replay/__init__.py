"""Replays of recorded trajectories: `python -m agentrl.replay runs/x --uid U`."""
