"""Checks of everything that must hold of a training step, and the alarms that they raise."""
