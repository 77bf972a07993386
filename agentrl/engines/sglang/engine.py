"""The rollout engine over SGLang servers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

import aiohttp
import torch

from agentrl.engines.contract import SamplingParams
from agentrl.engines.inspection import Difference
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.fleet import Timings
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.update import WeightSender
from agentrl.engines.sglang.sample import WeightSample


class SGLangEngine(ServerEngine):
    """A ServerEngine whose requests are seeded as SGLang needs it, and whose weights can be compared.

    `deterministic`: the servers honour seeds (SGLang's enable_deterministic_inference). For the other arguments see
    `ServerEngine`.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        http: aiohttp.ClientSession,
        model: ModelFacts,
        sender: WeightSender,
        *,
        max_model_len: int,
        deterministic: bool = False,
        free_weights: bool = False,
        notify: Callable[[str], None] = lambda _: None,
        timings: Timings | None = None,
        keep_kv_cache: bool = False,
    ) -> None:
        super().__init__(
            servers,
            http,
            model,
            sender,
            max_model_len=max_model_len,
            free_weights=free_weights,
            notify=notify,
            timings=timings,
            keep_kv_cache=keep_kv_cache,
        )
        self._vocab_size = model.vocab_size
        self._deterministic = deterministic
        self._seeds = itertools.count(1 << 62)
        self._sample = WeightSample(sender.dtype, notify)

    def held_in(self, name: str) -> str | None:
        return self._sample.held_in(name)

    async def differences(self, sent: Mapping[str, torch.Tensor], names: Collection[str]) -> list[Difference]:
        """Compare weights [S] as `InspectableEngine.differences` says. Servers that do not serve are not asked."""
        async with self._supervisor.sending:  # a server that is being sent weights has some of them
            return await self._sample.differences(self._supervisor.serving(), sent, names)

    def _server_params(self, params: SamplingParams) -> SamplingParams:
        """Set the parameters that make a server sample the same tokens next to any other requests.

        Without a seed every request would have SGLang's default one. And a batch in which any request has a top-k (a
        greedy one has 1) draws by rank, another by token id: so all requests get one.
        """
        seed = next(self._seeds) if params.seed is None else params.seed
        top_k = self._vocab_size if self._deterministic and params.top_k == -1 else params.top_k
        return dataclasses.replace(params, seed=seed, top_k=top_k)
