"""Rows of a run whose prompts are what live clients send: as many as a batch has, all the same."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.config import Config
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.trajectory.sample import Sample


class LiveRows:
    """Data set (`data.custom_cls`) in which each row is a place for a session."""

    def __init__(self, files: Sequence[str]) -> None:
        self._count = 1

    def configure(self, config: RolloutsConfig, max_samples: int | None) -> None:
        """Make as many rows as a batch takes."""
        self._count = config.data.train_batch_size if isinstance(config, Config) else 1

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Sample:
        """Return a place. Its prompt stands for a prompt that a client will send."""
        prompt = "(A live client's first message stands here.)"
        return Sample([{"role": "user", "content": prompt}], "agent/live", "live")
