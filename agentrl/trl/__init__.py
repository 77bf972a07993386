"""TRL's door: `from agentrl.trl import GRPOConfig, GRPOTrainer` in place of `from trl import ...` (docs/trl.md)."""

from agentrl.trl.config import GRPOConfig
from agentrl.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]

COMMANDS = {
    "DPO": "python -m agentrl.preferences",
    "KTO": "python -m agentrl.preferences loss=kto",
    "Reward": "python -m agentrl.preferences trains=reward_model",
    "SFT": "python -m agentrl.sft",
}
"""Commands that do the work of TRL's other trainers, by the first part of their names."""


def __getattr__(name: str) -> object:
    kind = name.removesuffix("Config").removesuffix("Trainer")
    if kind in COMMANDS and kind != name:
        raise ImportError(
            f"agentrl.trl has GRPOConfig and GRPOTrainer alone, not {name}: {COMMANDS[kind]} reads the same rows "
            "(docs/data.md, docs/algorithms.md)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
