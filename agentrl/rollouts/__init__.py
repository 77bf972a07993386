"""Sources of a step's trajectories."""
