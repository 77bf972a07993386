"""What a run shows and logs: terminal, metrics, curves."""
