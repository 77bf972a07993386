"""A generative reward model that scorers ask: its address, its tokenizer, and how its servers do."""

from __future__ import annotations

import asyncio
import functools
import logging

from agentrl.chat.load import load_tokenizer
from agentrl.config.sections.reward import ScoreModelConfig
from agentrl.remote.router import ModelRouter, ServerAccess
from agentrl.system.metrics import Metrics

logger = logging.getLogger(__name__)
REACHED_WITHIN = 60.0
"""Seconds in which its servers have to answer when a run begins."""


class AskedModel:
    """Values that scorers are given of it, from `start` to `close`."""

    def __init__(self, config: ScoreModelConfig, servers: ServerAccess, date: str | None) -> None:
        """`config.path` names the model of the servers. date: see `load_tokenizer`."""
        self._config, self._date = config, date
        self._router = ModelRouter(servers, logger.warning)
        self.arguments: dict[str, object] = {}
        """By the names of `agentrl.reward.scorer.MODEL_ARGUMENTS`."""

    async def start(self) -> None:
        """Reach the servers, and load the tokenizer. Raises ConfigError."""
        await asyncio.to_thread(self._router.start, REACHED_WITHIN)
        tokenizer = await asyncio.to_thread(self._tokenizer)
        self.arguments = {"reward_router_address": self._router.address, "reward_model_tokenizer": tokenizer}

    def _tokenizer(self) -> object:
        """Load it; `apply_chat_template` gives a list of ids unless it is asked for more, as before transformers 5."""
        config = self._config
        assert config.path is not None
        tokenizer = load_tokenizer(config.path, None, trust_remote_code=config.trust_remote_code, date=self._date)
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
        return tokenizer

    def take_metrics(self) -> Metrics:
        """Return and reset the router's numbers."""
        return self._router.take_metrics()

    async def close(self) -> None:
        """Close the address."""
        await asyncio.to_thread(self._router.close)
