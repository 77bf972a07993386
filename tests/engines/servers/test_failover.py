"""What becomes of a request whose server dies, with servers that stand in for real ones: faults are injected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import aiohttp
import pytest

from agentrl.engines.contract import EngineError, FinishReason, Generation, SamplingParams
from agentrl.engines.servers.client import PartialAnswer, ServerClient, ServerFailed
from agentrl.engines.servers.engine import ServerEngine
from agentrl.engines.servers.http import AnswerStream, VersionInfo, version_spans
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.process import ServerProcess
from agentrl.engines.servers.supervisor import Server
from agentrl.engines.servers.sync.update import WeightSender
from agentrl.engines.weights import Weights
from agentrl.trajectory import PlacedImage, VersionSpan
from tests.naming import naming


@dataclass
class StandInProcess:
    exited: int | None = None
    log: str = "0.log"

    def stop(self) -> None: ...

    def start(self) -> None: ...


@dataclass
class StandInClient:
    """Answers with ones; one that `dies` does so behind three tokens."""

    url: str
    dies: StandInProcess | None = None
    version: int = 0
    makes_no_sense: bool = False
    """The tokens of the one that dies cannot be trusted."""
    aborts: int = 0
    """Answers that it ends by itself, all tokens sampled."""
    asked: list[list[int]] = field(default_factory=list)
    seeds: list[int | None] = field(default_factory=list)

    async def generate(
        self,
        rid: str,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        cache_key: str,
        partial: PartialAnswer,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        self.asked.append(list(ids))
        self.seeds.append(params.seed)
        if self.dies is not None:
            stream = AnswerStream(partial)
            stream.add([7, 8, 9], [-1.0] * 3, str(self.version))
            if self.makes_no_sense:
                stream.discard()
            await asyncio.sleep(0)
            self.dies.exited = -9
            raise ServerFailed(self.url, "connection reset")
        count = params.max_new_tokens
        AnswerStream(partial).add([1] * count, [-1.0] * count, str(self.version))
        spans = [VersionSpan(self.version, 0, count)]
        self.aborts -= 1
        return Generation([1] * count, [-1.0] * count, FinishReason("abort" if self.aborts >= 0 else "length"), spans)

    async def abort(self, rid: str | None = None) -> None: ...

    async def pause(self, mode: str) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self, wait: float = 0.0) -> bool:
        return True


class StandInSender:
    """Tells clients the version of what they are sent."""

    bytes_sent = 0

    async def send(self, clients: Sequence[StandInClient], weights: Weights, version: int) -> dict[str, Exception]:
        for client in clients:
            client.version = version
        return {}

    async def close(self) -> None: ...


def two_servers(*, makes_no_sense: bool = False) -> tuple[ServerEngine, StandInClient, StandInClient]:
    """An engine whose first server dies, and its two clients."""
    process = StandInProcess()
    first, second = StandInClient("http://a", process, makes_no_sense=makes_no_sense), StandInClient("http://b")
    servers = [
        Server(cast(ServerClient, client), cast(ServerProcess, its))
        for client, its in ((first, process), (second, StandInProcess()))
    ]
    facts = ModelFacts(100, {})
    http = aiohttp.ClientSession()
    return ServerEngine(servers, http, facts, cast(WeightSender, StandInSender()), max_model_len=100), first, second


@pytest.mark.parametrize("versions", [(), (1, 2)], ids=["weights of the start", "weights that were sent"])
async def test_what_a_dead_server_had_sent_is_gone_on_with(versions: Sequence[int]) -> None:
    engine, first, second = two_servers()
    for version in versions:
        await engine.update_in_flight(Weights.from_tensors([]), version)
    heard: list[int] = []
    made = await engine.generate([5, 6], SamplingParams(10), "g/0", listener=heard.extend)
    await engine.close()
    newest = versions[-1] if versions else 0
    assert (first.asked, second.asked) == ([[5, 6]], [[5, 6, 7, 8, 9]])
    assert made.ids == heard == [7, 8, 9, *[1] * 7]
    assert made.versions == [VersionSpan(newest, 0, 3), VersionSpan(newest, 3, 10)]


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_continues_elsewhere_has_numbers_of_its_own(deterministic: bool) -> None:
    """A server that counts numbers by place goes on with the seed; another one would draw its first numbers again."""
    engine, first, second = two_servers()
    engine._deterministic = deterministic
    await engine.generate([5, 6], SamplingParams(10, seed=1), "g/0")
    await engine.close()
    assert first.seeds == [1] and (second.seeds == [1]) is deterministic


def test_versions_that_leave_a_token_out_make_no_sense() -> None:
    told = [VersionInfo(version=version, start=start, end=end) for version, start, end in ((1, 0, 2), (2, 3, 5))]
    with naming(ValueError, "version", "5 ids"):
        version_spans(told, 5)


async def test_a_whole_answer_that_a_server_aborts_is_asked_for_no_more() -> None:
    engine, first, second = two_servers()
    first.dies, first.aborts = None, 1
    made = await engine.generate([5, 6], SamplingParams(4), "g/0")
    await engine.close()
    assert (made.ids, made.finish_reason) == ([1] * 4, FinishReason("length"))
    assert (first.asked, second.asked) == ([[5, 6]], [])


@pytest.mark.parametrize("stop", [(), ("x",)], ids=["the server's tokens cannot be trusted", "a stop string"])
async def test_an_answer_that_was_heard_and_cannot_be_kept_is_a_fault(stop: tuple[str, ...]) -> None:
    """Nobody hears other tokens than are recorded; without a listener another server samples them again."""
    for listens in (True, False):
        engine, _, second = two_servers(makes_no_sense=not stop)
        heard: list[int] = []
        listener = heard.extend if listens else None
        call = engine.generate([5, 6], SamplingParams(10, stop=stop), "g/0", listener=listener)
        if listens:
            with naming(EngineError, "3 tokens"):
                await call
            assert (heard, second.asked) == ([7, 8, 9], [])
        else:
            assert (await call).ids == [1] * 10
        await engine.close()
