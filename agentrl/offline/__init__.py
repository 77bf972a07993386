"""Generating and scoring responses without training."""
