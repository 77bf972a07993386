"""Where a process computes."""

from __future__ import annotations

import torch

from agentrl.errors import ConfigError


def resolve_device(name: str) -> str:
    """`auto` takes the GPU where there is one. Raises ConfigError for cuda without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA device: use trainer.device=cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
