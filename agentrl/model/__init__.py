"""Causal language models on packed sequences: loading, attention without padding, log-probs of tokens."""
