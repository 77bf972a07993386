"""The rollout engine over SGLang servers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Iterator, Mapping

import torch

from agentrl.engines.contract import SamplingParams
from agentrl.engines.inspection import Comparison
from agentrl.engines.servers.client import ServerClient
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.sglang.sample import WeightSample


class SGLangEngine(ServerEngine):
    """A ServerEngine whose requests are seeded as SGLang needs it, and whose weights can be compared."""

    @functools.cached_property
    def _seeds(self) -> Iterator[int]:
        return itertools.count(1 << 62)

    @functools.cached_property
    def _sample(self) -> WeightSample:
        return WeightSample(self._supervisor.sender.dtype, self._supervisor.notify)

    def held_in(self, name: str) -> str | None:
        return self._sample.held_in(name)

    async def compare(self, sent: Mapping[str, torch.Tensor], names: Collection[str]) -> Comparison:
        """Compare weights [S] as `InspectableEngine.compare` says. Servers that do not serve are not asked."""
        async with self._supervisor.sending:  # a server that is being sent weights has some of them
            return await self._sample.compare(self._inspected(), sent, names)

    def _inspected(self) -> list[ServerClient]:
        """List the servers whose weights can be compared."""
        return self._supervisor.serving()

    def _server_params(self, server: Server, params: SamplingParams) -> SamplingParams:
        """Set the parameters that make a server sample the same tokens next to any other requests.

        Without a seed every request would have SGLang's default one. And a batch in which any request has a top-k (a
        greedy one has 1) draws by rank, another by token id: so all requests get one.
        """
        seed = next(self._seeds) if params.seed is None else params.seed
        top_k = self._model.vocab_size if self._deterministic and params.top_k == -1 else params.top_k
        return dataclasses.replace(params, seed=seed, top_k=top_k)
