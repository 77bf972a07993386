"""Rollouts by SGLang: server processes and their HTTP API. Nothing here imports SGLang into the trainer's process."""
