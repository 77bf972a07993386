"""agentrl: reinforcement learning for language-model agents that use tools over many turns."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.train import train as train
    from agentrl.train import training as training

    run_training = train
else:

    def __getattr__(name: str) -> object:
        """Import `run_training`, `train` and `training` on first use: code that only needs a part of the package, e.g.
        a tool, must not wait for the config's libraries."""
        if name not in ("run_training", "train", "training"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module("agentrl.train")
        if name == "run_training":
            return module.train
        return module if name == "train" else module.training  # the module is called as the function: see there


__version__ = "0.1.0"
