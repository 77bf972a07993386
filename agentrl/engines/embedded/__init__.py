"""The embedded engine: the trainer's own model, in this process."""
