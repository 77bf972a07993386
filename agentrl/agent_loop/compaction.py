"""Rules by which a conversation that becomes too long is compacted; `compactor.py` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sections.rollout import CompactionConfig
from agentrl.errors import ConfigError
from agentrl.system.config_files import find_file

REQUEST = Path(__file__).parent / "prompts" / "compaction.txt"
KEY = "actor_rollout_ref.rollout.multi_turn.compaction"


@dataclass(frozen=True, slots=True)
class Compaction:
    """How conversations are compacted, for all trajectories of a run."""

    threshold: float
    keep_turns: int
    max_summary_tokens: int
    train_summary: bool
    request: str
    """Text that asks for the summary."""

    @staticmethod
    def from_config(config: CompactionConfig) -> Compaction | None:
        """Read the keys and the file of the request; None where nothing is compacted. Raises ConfigError."""
        if config.threshold is None:
            return None
        key = f"{KEY}.prompt_file"
        file = REQUEST if config.prompt_file is None else Path(find_file(key, config.prompt_file))
        try:
            request = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{key}={file}: cannot be read ({error})") from error
        if not request:
            raise ConfigError(f"{key}={file}: the file is empty; expected the text that asks for a summary")
        return Compaction(config.threshold, config.keep_turns, config.max_summary_tokens, config.train_summary, request)
