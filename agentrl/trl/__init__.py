"""TRL's door: `from agentrl.trl import GRPOConfig, GRPOTrainer` in place of `from trl import ...` (docs/trl.md)."""

from agentrl.trl.config import GRPOConfig
from agentrl.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
