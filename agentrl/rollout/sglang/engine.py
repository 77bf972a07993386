"""The rollout engine over a fleet of SGLang servers.

A request goes to its session's server, which has the session's prefix in its cache. When that server fails, the
request goes on elsewhere from the tokens that had arrived; what it says of its weights is checked, so that a server
with old weights cannot pass as current. What has to be done about a server's state is decided by `Fleet`, where a
request goes by `Router`; both are pure, and this class does what they say.
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

import httpx

from agentrl.rollout.engine import (
    EngineError,
    EngineHealth,
    FinishReason,
    Generation,
    PauseMode,
    RequestError,
    SamplingParams,
)
from agentrl.rollout.sglang.client import Part, ServerFailed, SGLangClient, describe
from agentrl.rollout.sglang.fleet import Check, Fleet, FleetState, Restart, SendWeights, Timings
from agentrl.rollout.sglang.model import ModelFacts
from agentrl.rollout.sglang.process import ServerProcess
from agentrl.rollout.sglang.router import NoServer, Router
from agentrl.rollout.sglang.sync.update import WeightSender
from agentrl.rollout.weights import SyncReport, Weights
from agentrl.trajectory import VersionSpan

TICK = 0.5
"""Seconds between two looks at the fleet."""
MAX_FAILOVERS = 8
"""Servers that one request may see fail before it is given up."""
FREED = ("kv_cache", "weights")


@dataclass(slots=True)
class Server:
    """One server: its client, its process if we started it, and what asks it now."""

    client: SGLangClient
    process: ServerProcess | None = None
    asking: set[asyncio.Task[Generation]] = field(default_factory=set)
    freed: tuple[str, ...] = ()
    """What of its memory is released now."""

    @property
    def url(self) -> str:
        return self.client.url


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
        http: the client of all servers; closed with the engine.
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
        http: httpx.AsyncClient,
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
        self._servers = {server.url: server for server in servers}
        self._http = http
        self._model = model
        self._sender = sender
        self._deterministic = deterministic
        self._free_weights = free_weights
        self._notify = notify
        self._clock = LoopClock()
        restartable = all(server.process is not None for server in servers)
        self._fleet = Fleet(list(self._servers), self._clock.now, restartable=restartable, timings=timings)
        self._router = Router()
        self._calls: dict[str, Call] = {}
        self._weights: Weights | None = None
        self._version = 0
        self._paused: PauseMode | None = None
        self._asleep = self._updating = self._closed = self._weights_gone = False
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], Check | Restart | SendWeights] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()
        self._failovers = self._restarts = 0
        self._seeds = itertools.count(1 << 62)
        for url in self._servers:
            self._fleet.started(url)
            self._fleet.answered(url, None)
        self._router.set_serving(self._fleet.serving)

    # Requests

    async def generate(self, ids: Sequence[int], params: SamplingParams, session: str) -> Generation:
        """See `RolloutEngine.generate`. While the engine is paused, asleep or takes new weights the request waits."""
        if self._closed:
            raise EngineError("the engine is closed")
        self._check(ids, params)
        params = self._seeded(params)
        if session in self._calls:
            raise RequestError(f"session {session!r} is generating already; one request a session at a time")
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
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
            version = self._version
            part = call.part = Part()
            rest = dataclasses.replace(params, max_new_tokens=params.max_new_tokens - len(done.ids))
            try:
                answer = await self._ask(call, server, prompt + done.ids, rest, f"v{version}")
            except ServerFailed as error:
                failure = error
                self._failovers += 1
                self._failed(server, str(error))
                # Where new weights came in between it is unknown which tokens are of which; stop strings are looked
                # for in what one server wrote.
                if version == self._version and not params.stop:
                    done = joined(done, Generation(part.ids, part.logprobs, done.finish_reason, spans(version, part)))
                if len(done.ids) == params.max_new_tokens:
                    return dataclasses.replace(done, finish_reason=FinishReason("length"), cached_tokens=cached or 0)
                continue
            finally:
                self._router.done(call.session, server.url)
                call.server = None
            cached = answer.cached_tokens if cached is None else cached
            if any(span.version < version for span in answer.versions):
                failure = ServerFailed(server.url, f"it generated with weights older than version {version}")
                self._fleet.stale(server.url)
                self._look()
                continue
            self._fleet.served(server.url)
            if answer.finish_reason.kind == "abort" and not call.aborted:
                failure = ServerFailed(server.url, "it aborted the request by itself")
                done = done if params.stop else joined(done, answer)
                continue
            return dataclasses.replace(joined(done, answer), cached_tokens=cached)
        raise EngineError(f"{MAX_FAILOVERS} servers in a row failed; the last one: {failure}")

    async def _place(self, call: Call) -> Server | None:
        """The server that runs the call's next request, once requests may run; None when it was aborted meanwhile."""
        while not call.aborted:
            if not (self._paused or self._asleep or self._updating):
                try:
                    url = self._router.route(call.session)
                except NoServer as error:
                    if self._fleet.hopeless:
                        raise EngineError(f"{error}: {self._reasons()}") from error
                else:
                    if not self._fleet.suspect(url):
                        return self._servers[url]
                    self._router.done(call.session, url)
            await self._changed.wait()
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
            raise ServerFailed(server.url, self._fleet.reason(server.url) or "given up") from error
        finally:
            server.asking.discard(asking)

    async def abort(self, session: str | None = None) -> None:
        """See `RolloutEngine.abort`."""
        calls = [call for call in self._calls.values() if session is None or call.session == session]
        for call in calls:
            call.aborted = True
        self._wake()
        running = [(call.server, call.rid) for call in calls if call.server is not None]
        await asyncio.gather(*[quietly(server.client.abort(rid)) for server, rid in running if server is not None])

    async def release(self, session: str) -> None:
        """See `RolloutEngine.release`. A request of the session that still runs is aborted."""
        if session in self._calls:
            await self.abort(session)
        self._router.forget(session)

    # Control

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `RolloutEngine.pause`. abort ends the requests that wait, too."""
        self._paused = mode
        if mode == "abort":
            for call in self._calls.values():
                call.aborted = True
            self._wake()
        await self._each(lambda server: server.client.pause(mode))
        while mode == "abort" and any(call.server is not None for call in self._calls.values()):
            await asyncio.sleep(0.001)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self._each(lambda server: server.client.resume())
        self._paused = None
        self._wake()

    async def flush_cache(self) -> None:
        """See `RolloutEngine.flush_cache`. A server refuses while requests run; its idle entries go by age then."""
        await self._each(lambda server: server.client.flush_cache())

    async def sleep(self) -> None:
        """See `RolloutEngine.sleep`."""
        if self._calls:
            raise EngineError(f"sleep: {len(self._calls)} requests are running; pause with mode abort")
        self._asleep = True
        await self._each(lambda server: self._free(server))
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
        await self._each(lambda server: self._restore(server, FREED))
        self._asleep = False
        self._wake()

    async def _restore(self, server: Server, tags: Sequence[str]) -> None:
        freed = [tag for tag in server.freed if tag in tags]
        if freed:
            await server.client.resume_memory(freed)
            server.freed = tuple(tag for tag in server.freed if tag not in freed)

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`; as the client sees it, without asking the servers."""
        running = sum(call.server is not None for call in self._calls.values())
        metrics = {
            "servers_healthy": float(len(self._fleet.serving)),
            "failovers": float(self._failovers),
            "restarts": float(self._restarts),
        }
        waiting = len(self._calls) - running
        return EngineHealth(self._version, running, waiting, self._paused is not None, self._asleep, metrics)

    async def close(self) -> None:
        """See `RolloutEngine.close`. Servers that were running before stay."""
        if self._closed:
            return
        self._closed = True
        await self.abort()
        while self._calls:
            self._wake()
            await asyncio.sleep(0.001)
        tasks = [*self._tasks, *self._background, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._sender.close()
        finally:
            await self._http.aclose()
            processes = [server.process for server in self._servers.values() if server.process is not None]
            await asyncio.gather(*[asyncio.to_thread(process.stop) for process in processes])

    # Weights

    async def update_weights(self, weights: Weights, version: int) -> SyncReport:
        """See `RolloutEngine.update_weights`. A server that cannot be given them serves no more until it was.

        Raises ValueError for what the model does not have, and EngineError when no server could be given them.
        """
        self._model.check(weights)
        began = time.perf_counter()
        async with self._sending, self._exchange() as servers:
            self._version, self._weights = version, weights
            self._fleet.target(version)
            self._look()
            failures = await self._send(servers, version)
        if servers and len(failures) == len(servers):
            raise EngineError(f"no server took the weights: {describe(next(iter(failures.values())))}")
        return SyncReport(self._sender.bytes_sent, time.perf_counter() - began)

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[list[Server]]:
        """Nothing is sampled inside; gives the servers that answer. Running requests go on behind it, their keys and
        values computed anew unless they were paused in_place before."""
        servers = self._answering()
        self._updating = True
        try:
            if self._paused is None:
                await self._each(lambda server: server.client.pause("retract"), servers)
            await self._each(lambda server: self._restore(server, FREED[1:]), servers)
            if self._paused != "in_place":
                await self._each(lambda server: server.client.flush_cache(), servers)
            yield servers
            if self._paused is None:
                await self._each(lambda server: server.client.resume(), servers)
        finally:
            self._updating = False
            self._wake()

    async def _send(self, servers: Sequence[Server], version: int) -> dict[str, Exception]:
        assert self._weights is not None
        failures = await self._sender.send([server.client for server in servers], self._weights, version)
        for server in servers:
            if server.url in failures:
                self._notify(f"{server.url} did not take the weights: {describe(failures[server.url])}")
            else:
                self._fleet.updated(server.url, version)
        self._weights_gone = False
        self._look()
        return failures

    # The fleet

    async def _watch(self) -> None:
        """Look after the servers for as long as the engine lives."""
        while True:
            await asyncio.sleep(TICK)
            if self._paused or self._asleep or self._updating:
                continue  # servers that may not generate cannot answer a check
            self._clock.tick()
            for server in self._servers.values():
                if server.process is not None and (status := server.process.exited) is not None:
                    self._fleet.exited(server.url, f"its process ended with status {status}")
            self._look()
            for action in self._fleet.due():
                task = asyncio.create_task(self._act(action))
                self._tasks[task] = action
                task.add_done_callback(lambda task: self._tasks.pop(task, None))
            for task, action in self._tasks.items():
                if isinstance(action, Check) and self._fleet.outstanding(action.server) is not action:
                    task.cancel()  # too late, or pointless
            self._look()

    async def _act(self, action: Check | Restart | SendWeights) -> None:
        server = self._servers[action.server]
        try:
            match action:
                case Check():
                    await server.client.check(None)
                    self._fleet.answered(server.url, None)
                case SendWeights():
                    async with self._sending:
                        failures = await self._send([server], self._version)
                    if failures:
                        raise failures[server.url]
                case Restart():
                    await self._restart(server)
        except (EngineError, RequestError) as error:
            self._fleet.failed(server.url, describe(error), action)
        self._look()

    async def _restart(self, server: Server) -> None:
        assert server.process is not None
        self._restarts += 1
        await asyncio.to_thread(server.process.stop)
        server.process.start()
        server.freed = ()
        self._fleet.started(server.url)

    def _failed(self, server: Server, reason: str) -> None:
        """A request failed there."""
        if server.process is not None and server.process.exited is not None:
            self._fleet.exited(server.url, f"its process ended with status {server.process.exited}")
        else:
            self._fleet.failed(server.url, reason)
        self._look()

    def _look(self) -> None:
        """Route by the fleet's state; give up what runs on dead servers, and say what has changed."""
        before, now = set(self._router.serving), set(self._fleet.serving)
        for url in before - now:
            server, state = self._servers[url], self._fleet.state(url)
            if state is FleetState.DEAD:
                self._notify(f"{url} is dead: {self._fleet.reason(url)}. {len(server.asking)} requests go on elsewhere")
        for url, server in self._servers.items():
            if self._fleet.state(url) is FleetState.DEAD:
                for asking in server.asking:
                    asking.cancel()
        if before != now:
            self._router.set_serving(self._fleet.serving)
        self._wake()

    def _reasons(self) -> str:
        return "; ".join(f"{url} is {self._fleet.state(url)}: {self._fleet.reason(url)}" for url in self._servers)

    async def _each(self, call: Callable[[Server], Awaitable[object]], servers: Sequence[Server] | None = None) -> None:
        """A control call to every server that answers; one that fails is the fleet's concern."""

        async def one(server: Server) -> None:
            try:
                await call(server)
            except ServerFailed as error:
                self._failed(server, str(error))

        await asyncio.gather(*[one(server) for server in (self._answering() if servers is None else servers)])

    def _answering(self) -> list[Server]:
        alive = (FleetState.HEALTHY, FleetState.STALE)
        return [server for url, server in self._servers.items() if self._fleet.state(url) in alive]

    def _wake(self) -> None:
        """Let those that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _spawn(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


class LoopClock:
    """Seconds that stand still while the event loop does: between two steps of training no check can be late."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = time.monotonic()

    def now(self) -> float:
        return self._seconds

    def tick(self) -> None:
        """Must be called every TICK seconds while the servers may generate."""
        now = time.monotonic()
        self._seconds += min(now - self._last, 4 * TICK)
        self._last = now


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
