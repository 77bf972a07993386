"""Environments of other packages, each a process of its own (a sidecar), and the loop that plays their episodes."""
