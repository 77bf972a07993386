"""Optimizers and learning-rate schedules for sharded parameters."""
