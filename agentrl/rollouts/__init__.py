"""Where the trajectories of a step come from."""
