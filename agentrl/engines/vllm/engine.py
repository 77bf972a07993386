"""The rollout engine over vLLM servers."""

from __future__ import annotations

import dataclasses

from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.engine import ServerEngine


class VLLMEngine(ServerEngine):
    """A ServerEngine whose requests have no stop token outside the vocabulary, as vLLM refuses it."""

    def _server_params(self, params: SamplingParams) -> SamplingParams:
        known = tuple(token for token in params.stop_token_ids if 0 <= token < self._model.vocab_size)
        return dataclasses.replace(params, stop_token_ids=known)
