"""Rollout engines: token ids in, sampled token ids and log-probs out."""
