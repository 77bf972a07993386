"""The rollout engine over servers of several softwares."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentrl.engines.contract import SamplingParams
from agentrl.engines.servers.client import ServerClient
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.buckets import Bucket
from agentrl.engines.sglang.checksums import Expectation
from agentrl.engines.sglang.engine import SGLangEngine
from agentrl.engines.vllm.checksums import Arrived
from agentrl.engines.vllm.client import VLLMClient
from agentrl.engines.vllm.engine import without_unknown_stops


class MixedEngine(SGLangEngine):
    """An engine that speaks to each server as its software needs it. SGLang's weights alone can be compared."""

    def _server_params(self, server: Server, params: SamplingParams) -> SamplingParams:
        if isinstance(server.client, VLLMClient):
            return without_unknown_stops(params, self._model.vocab_size)
        return super()._server_params(server, params)

    def _inspected(self) -> list[ServerClient]:
        return [client for client in self._supervisor.serving() if not isinstance(client, VLLMClient)]


class EitherChecksums:
    """Implements `ExpectedChecksums` for both softwares, whose parameters have other names."""

    def __init__(self) -> None:
        self._sglang, self._vllm = Expectation(), Arrived()

    def add(self, bucket: Bucket) -> None:
        self._sglang.add(bucket)
        self._vllm.add(bucket)

    def for_parameters(self, parameters: Collection[str]) -> Mapping[str, str] | None:
        found = self._vllm.for_parameters(parameters)
        return self._sglang.for_parameters(parameters) if found is None else found
