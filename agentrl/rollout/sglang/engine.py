"""The rollout engine over a fleet of SGLang servers.

A request goes to its session's server, which has the session's prefix in its cache. When that server fails, the
request goes on elsewhere from the tokens that had arrived; what it says of its weights is checked, so that a server
with old weights cannot pass as current. `Supervisor` looks after the servers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from agentrl.rollout.engine import (
    EngineError,
    EngineHealth,
    FinishReason,
    Generation,
    PauseMode,
    RequestError,
    SamplingParams,
)
from agentrl.rollout.sglang.client import Part, ServerFailed, describe
from agentrl.rollout.sglang.fleet import Timings
from agentrl.rollout.sglang.model import ModelFacts
from agentrl.rollout.sglang.router import NoServer
from agentrl.rollout.sglang.supervisor import Server, Supervisor
from agentrl.rollout.sglang.sync.update import WeightSender
from agentrl.rollout.weights import SyncReport, Weights
from agentrl.trajectory import VersionSpan

MAX_FAILOVERS = 8
"""Servers that one request may see fail before it is given up."""
FREED = ("kv_cache", "weights")


@dataclass(slots=True)
class Call:
    """A running `generate`."""

    session: str
    aborted: bool = False
    server: Server | None = None
    """Where it runs now; None while it waits."""
    rid: str = ""
    part: Part = field(default_factory=Part)
    """What has arrived of the answer that it waits for."""


class SGLangEngine:
    """Implements `agentrl.rollout.engine.RolloutEngine`.

    Args:
        servers: started and answering, all with the weights of version 0; `close` stops those that have a process.
        http: the connections to all servers; closed with the engine.
        model: vocabulary and parameters, to check what a server would die of.
        sender: carries new weights to servers.
        max_model_len: tokens of the longest context, prompt and response together.
        deterministic: the servers honour seeds (SGLang's enable_deterministic_inference).
        free_weights: `sleep` frees the weights, too (the servers share the policy's device).
        notify: is told what happens to servers, in words for people.
        timings: of checks and restarts.
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
    ) -> None:
        self.max_model_len = max_model_len
        self._http = http
        self._model = model
        self._deterministic = deterministic
        self._free_weights = free_weights
        self._supervisor = Supervisor(servers, sender, notify, timings)
        self._calls: dict[str, Call] = {}
        self._paused: PauseMode | None = None
        self._asleep = self._updating = self._closed = self._weights_gone = False
        self._background: set[asyncio.Task[None]] = set()
        self._failovers = 0
        self._seeds = itertools.count(1 << 62)

    # Requests

    async def generate(self, ids: Sequence[int], params: SamplingParams, session: str) -> Generation:
        """See `RolloutEngine.generate`. While the engine is paused, asleep or takes new weights the request waits."""
        if self._closed:
            raise EngineError("the engine is closed")
        self._check(ids, params)
        params = self._seeded(params)
        if session in self._calls:
            raise RequestError(f"session {session!r} is generating already; one request a session at a time")
        self._supervisor.start()
        call = self._calls[session] = Call(session)
        try:
            return await self._serve(call, list(ids), params)
        finally:
            del self._calls[session]

    def _seeded(self, params: SamplingParams) -> SamplingParams:
        """As a server needs it to sample the same whatever else runs there.

        Without a seed every request would have the same one. And a batch in which any request has a top-k (a greedy
        one has 1) draws by rank, another by token id: all must have one.
        """
        seed = next(self._seeds) if params.seed is None else params.seed
        top_k = self._model.vocab_size if self._deterministic and params.top_k == -1 else params.top_k
        return dataclasses.replace(params, seed=seed, top_k=top_k)

    def _check(self, ids: Sequence[int], params: SamplingParams) -> None:
        params.check()
        if not ids:
            raise RequestError("the prompt is empty")
        if len(ids) + params.max_new_tokens > self.max_model_len:
            raise RequestError(
                f"{len(ids)} prompt tokens and max_new_tokens={params.max_new_tokens} exceed the context of "
                f"{self.max_model_len} tokens"
            )
        size = self._model.vocab_size
        if min(ids) < 0 or max(ids) >= size:
            bad = next(place for place, token in enumerate(ids) if not 0 <= token < size)
            raise RequestError(f"id {ids[bad]} at place {bad} is outside the vocabulary of {size}")

    async def _serve(self, call: Call, prompt: list[int], params: SamplingParams) -> Generation:
        """Ask servers until one has finished the answer; what earlier ones had begun of it is kept."""
        done = Generation([], [], FinishReason("abort"), [])
        cached: int | None = None
        for _ in range(MAX_FAILOVERS):
            server = await self._place(call)
            if server is None:
                return done
            version = self._supervisor.version
            part = call.part = Part()
            rest = dataclasses.replace(params, max_new_tokens=params.max_new_tokens - len(done.ids))
            try:
                answer = await self._ask(call, server, prompt + done.ids, rest, f"v{version}")
            except ServerFailed as error:
                failure = error
                self._failovers += 1
                self._supervisor.failed(server, str(error))
                # Where new weights came in between it is unknown which tokens are of which; stop strings are looked
                # for in what one server wrote.
                if version == self._supervisor.version and not params.stop:
                    done = joined(done, Generation(part.ids, part.logprobs, done.finish_reason, spans(version, part)))
                if len(done.ids) == params.max_new_tokens:
                    return dataclasses.replace(done, finish_reason=FinishReason("length"), cached_tokens=cached or 0)
                continue
            finally:
                self._supervisor.router.done(call.session, server.url)
                call.server = None
            cached = answer.cached_tokens if cached is None else cached
            if any(span.version < version for span in answer.versions):
                failure = ServerFailed(server.url, f"it generated with weights older than version {version}")
                self._supervisor.fleet.stale(server.url)
                self._supervisor.look()
                continue
            self._supervisor.fleet.served(server.url)
            if answer.finish_reason.kind == "abort" and not call.aborted:
                failure = ServerFailed(server.url, "it aborted the request by itself")
                done = done if params.stop else joined(done, answer)
                continue
            return dataclasses.replace(joined(done, answer), cached_tokens=cached)
        raise EngineError(f"{MAX_FAILOVERS} servers in a row failed; the last one: {failure}")

    async def _place(self, call: Call) -> Server | None:
        """The server that runs the call's next request, once requests may run; None when it was aborted meanwhile."""
        while not call.aborted:
            if not self._supervisor.quiet:
                try:
                    url = self._supervisor.router.route(call.session)
                except NoServer as error:
                    if self._supervisor.fleet.hopeless:
                        raise EngineError(f"{error}: {self._supervisor.reasons()}") from error
                else:
                    if not self._supervisor.fleet.suspect(url):
                        return self._supervisor.servers[url]
                    self._supervisor.router.done(call.session, url)
            await self._supervisor.changed.wait()
        return None

    async def _ask(
        self, call: Call, server: Server, ids: list[int], params: SamplingParams, cache_key: str
    ) -> Generation:
        """One request to one server. Cancelled, it is aborted there; when the server is given up, ServerFailed."""
        call.server, call.rid = server, uuid.uuid4().hex
        client, rid = server.client, call.rid
        asking = asyncio.create_task(client.generate(rid, ids, params, cache_key=cache_key, part=call.part))
        server.asking.add(asking)
        try:
            return await asking
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                self._spawn(quietly(client.abort(rid)))
                raise
            raise ServerFailed(server.url, self._supervisor.fleet.reason(server.url) or "given up") from error
        finally:
            server.asking.discard(asking)

    async def abort(self, session: str | None = None) -> None:
        """See `RolloutEngine.abort`."""
        calls = [call for call in self._calls.values() if session is None or call.session == session]
        for call in calls:
            call.aborted = True
        self._supervisor.wake()
        running = [(call.server, call.rid) for call in calls if call.server is not None]
        await asyncio.gather(*[quietly(server.client.abort(rid)) for server, rid in running if server is not None])

    async def release(self, session: str) -> None:
        """See `RolloutEngine.release`. A request of the session that still runs is aborted."""
        if session in self._calls:
            await self.abort(session)
        self._supervisor.router.forget(session)

    # Control

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `RolloutEngine.pause`. abort ends the requests that wait, too."""
        self._paused = mode
        if mode == "abort":
            for call in self._calls.values():
                call.aborted = True
        self._hush()
        await self._supervisor.each(lambda server: server.client.pause(mode))
        while mode == "abort" and any(call.server is not None for call in self._calls.values()):
            await asyncio.sleep(0.001)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._supervisor.each(lambda server: server.client.resume())
        self._paused = None
        self._hush()

    async def flush_cache(self) -> None:
        """See `RolloutEngine.flush_cache`. A server refuses while requests run; its idle entries go by age then."""
        await self._supervisor.each(lambda server: server.client.flush_cache())

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        if self._calls:
            raise EngineError(f"sleep: {len(self._calls)} requests are running; pause with mode abort")
        self._asleep = True
        self._hush()
        await self._supervisor.each(lambda server: self._free(server))
        self._weights_gone = self._free_weights

    async def _free(self, server: Server) -> None:
        await server.client.flush_cache()
        tags = FREED if self._free_weights else FREED[:1]
        await server.client.release_memory(tags)
        server.freed = tags

    async def wake(self) -> None:
        """See `RolloutEngine.wake`. Raises EngineError when weights were freed and no new ones have come."""
        if self._weights_gone:
            raise EngineError("wake: the weights were freed; update_weights must come first")
        await self._supervisor.each(lambda server: self._restore(server, FREED))
        self._asleep = False
        self._hush()

    async def _restore(self, server: Server, tags: Sequence[str]) -> None:
        freed = [tag for tag in server.freed if tag in tags]
        if freed:
            await server.client.resume_memory(freed)
            server.freed = tuple(tag for tag in server.freed if tag not in freed)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`; as the client sees it, without asking the servers."""
        running = sum(call.server is not None for call in self._calls.values())
        metrics = {
            "servers_healthy": float(len(self._supervisor.fleet.serving)),
            "failovers": float(self._failovers),
            "restarts": float(self._supervisor.restarts),
        }
        waiting = len(self._calls) - running
        return EngineHealth(self._supervisor.version, running, waiting, self._paused is not None, self._asleep, metrics)

    async def close(self) -> None:
        """See `RolloutEngine.close`. Servers that were running before stay."""
        if self._closed:
            return
        self._closed = True
        await self.abort()
        while self._calls:
            self._supervisor.wake()
            await asyncio.sleep(0.001)
        await asyncio.gather(*self._background, return_exceptions=True)
        try:
            await self._supervisor.close()
        finally:
            await self._http.close()

    # Weights

    async def update_weights(self, weights: Weights, version: int) -> SyncReport:
        """See `RolloutEngine.update_weights`. A server that cannot be given them serves no more until it was.

        Raises ValueError for what the model does not have, and EngineError when no server could be given them.
        """
        self._model.check(weights)
        began = time.perf_counter()
        async with self._exchange() as servers:
            faults = await self._supervisor.send_weights(servers, weights, version)
            self._weights_gone = False
        if servers and len(faults) == len(servers):
            raise EngineError(f"no server took the weights: {describe(next(iter(faults.values())))}")
        return SyncReport(self._supervisor.bytes_sent, time.perf_counter() - began)

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[list[Server]]:
        """Nothing is sampled inside; gives the servers that answer. Running requests go on behind it, their keys and
        values computed anew unless they were paused in_place before."""
        servers = self._supervisor.answering()
        self._updating = True
        self._hush()
        try:
            if self._paused is None:
                await self._supervisor.each(lambda server: server.client.pause("retract"), servers)
            await self._supervisor.each(lambda server: self._restore(server, FREED[1:]), servers)
            if self._paused != "in_place":
                await self._supervisor.each(lambda server: server.client.flush_cache(), servers)
            yield servers
        finally:
            if self._paused is None:
                await self._supervisor.each(lambda server: server.client.resume(), servers)
            self._updating = False
            self._hush()

    def _hush(self) -> None:
        """Whether servers may generate has changed."""
        self._supervisor.quiet = self._paused is not None or self._asleep or self._updating
        self._supervisor.wake()

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def joined(first: Generation, second: Generation) -> Generation:
    """One answer from two parts of it; ends as the second does."""
    shift = len(first.ids)
    moved = [VersionSpan(span.version, span.start + shift, span.end + shift) for span in second.versions]
    return Generation(
        first.ids + second.ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
        first.versions + moved,
        second.cached_tokens,
    )


def spans(version: int, part: Part) -> list[VersionSpan]:
    return [VersionSpan(version, 0, len(part.ids))] if part.ids else []


async def quietly(call: Awaitable[object]) -> None:
    """For a server that may be gone: then there is nothing to abort."""
    try:
        await call
    except (EngineError, RequestError):
        return
