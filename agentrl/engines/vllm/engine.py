"""The rollout engine over vLLM servers."""

from __future__ import annotations

import dataclasses

from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.supervisor import Server


class VLLMEngine(ServerEngine):
    """A ServerEngine whose requests have no stop token outside the vocabulary, as vLLM refuses it."""

    def _server_params(self, server: Server, params: SamplingParams) -> SamplingParams:
        return without_unknown_stops(params, self._model.vocab_size)


def without_unknown_stops(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Leave out stop tokens that are not in the vocabulary."""
    known = tuple(token for token in params.stop_token_ids if 0 <= token < vocab_size)
    return dataclasses.replace(params, stop_token_ids=known)
