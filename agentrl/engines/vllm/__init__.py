"""vLLM servers as a rollout engine."""
