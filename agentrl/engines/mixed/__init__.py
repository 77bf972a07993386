"""The rollout engine over SGLang and vLLM servers together, which run already."""
