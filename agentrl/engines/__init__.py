"""Rollout engines: the contract, the embedded engine, and SGLang servers."""
