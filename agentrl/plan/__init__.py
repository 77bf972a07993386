"""Memory and time of a run, from its config and the models' configs alone."""
