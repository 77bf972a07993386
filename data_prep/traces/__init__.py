"""Logs of a model's calls as conversations for training: `python -m data_prep.traces`."""
