"""Memory of a run, from its config and the models' configs alone."""
