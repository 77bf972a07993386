"""Output of a run: terminal, metrics, curves."""
