"""A local web viewer of recorded runs: `python -m agentrl.view runs/x`."""
