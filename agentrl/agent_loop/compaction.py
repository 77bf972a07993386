"""Rules by which a conversation that becomes too long is compacted; `compactor.py` carries them out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.chat import Chat
from agentrl.config.sections.rollout import CompactionConfig
from agentrl.errors import ConfigError
from agentrl.system.config_files import find_file
from agentrl.trajectory import Message

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

    def asking(self) -> Message:
        """Return the message that asks for the summary."""
        return {"role": "user", "content": self.request}

    def reserved(self, chat: Chat) -> int:
        """Count the tokens that stay free in every window, for the request and the summary."""
        return len(chat.render([self.asking()], [])) + self.max_summary_tokens  # the window has its tools already

    def check_room(self, chat: Chat, window: int) -> None:
        """Raise ConfigError where the reserved tokens leave no room for a turn in a window of so many tokens."""
        if (reserved := self.reserved(chat)) >= window:
            raise ConfigError(
                f"{KEY}.max_summary_tokens={self.max_summary_tokens}: with the request for it {reserved} tokens stay "
                f"free in every window, and data.max_response_length={window} leaves none of the policy's turns any "
                "room. Lower the former, or raise the latter"
            )

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
