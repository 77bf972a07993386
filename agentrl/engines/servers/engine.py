"""The rollout engine over a fleet of HTTP servers.

A request goes to its session's server, which has the session's prefix in its cache. When that server fails, the
request continues elsewhere from the tokens that had arrived. The versions in each answer are checked, so that a server
with old weights cannot pass as current. `Supervisor` looks after the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from agentrl.engines.contract import (
    EngineError,
    EngineHealth,
    FinishReason,
    Generation,
    Listener,
    PauseMode,
    RequestError,
    SamplingParams,
    check_request,
    outside_vocabulary,
)
from agentrl.engines.servers.client import Memory, PartialAnswer, ServerFailed, describe
from agentrl.engines.servers.fleet import FleetState, Timings
from agentrl.engines.servers.model import ModelFacts
from agentrl.engines.servers.router import NoServer
from agentrl.engines.servers.supervisor import Asking, Server, Supervisor
from agentrl.engines.servers.sync.adapters import AdapterSender
from agentrl.engines.servers.sync.delta import DeltaSender
from agentrl.engines.servers.sync.update import WeightSender
from agentrl.engines.weights import SyncReport, Weights
from agentrl.system.cancellation import is_being_cancelled
from agentrl.system.metrics import Metrics
from agentrl.trajectory import PlacedImage, VersionSpan

MAX_FAILOVERS = 8
"""Most servers that may fail under one request before it is given up."""
FREED: tuple[Memory, ...] = ("kv_cache", "weights")
GRACE = 5.0
"""Seconds that a server has to abort a request, or to become idle."""


@dataclass(slots=True)
class Call:
    """A running `generate`."""

    session: str
    images: Sequence[PlacedImage] = ()
    aborted: bool = False
    server: Server | None = None
    """The server that runs it now; None while it waits."""
    asking: asyncio.Task[Generation] | None = None
    """The request to that server."""
    rid: str = ""
    partial: PartialAnswer = field(default_factory=PartialAnswer)
    """The tokens that have arrived of the answer that it waits for."""
    cache_key: str = ""
    """The server's when it was asked (`Server.cache_key`)."""
    listener: Listener | None = None
    heard: int = 0
    """Tokens that the listener has heard."""

    def hear(self, ids: Sequence[int]) -> None:
        """Pass on tokens to the listener."""
        assert self.listener is not None
        self.heard += len(ids)
        self.listener(ids)

    def check_heard(self, kept: Sequence[int]) -> None:
        """Raise EngineError where the listener has heard other tokens than are `kept` of the answer."""
        if self.listener is not None and self.heard != len(kept):
            raise EngineError(
                f"a server failed behind {self.heard} tokens, of which {len(kept)} can be kept, and an agent has been "
                "sent them all"
            )


class ServerEngine:
    """Implements `agentrl.engines.contract.RolloutEngine`.

    Args:
        servers: started and answering, all with the weights of version 0; `close` stops each that has a process.
        http: the connections to all servers; closed with the engine.
        model: vocabulary and parameters, for checks of requests and weights that a server would die of.
        sender: carries new weights to servers.
        max_model_len: tokens of the longest context, prompt and response together.
        deterministic: the servers honour seeds.
        free_weights: `sleep` frees the weights, too (the servers share the policy's device).
        notify: shows the user a line when a server dies or returns.
        timings: times of checks and restarts.
        keep_kv_cache: `update_in_flight` leaves running requests the keys and values of older weights.
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
        self.max_model_len = max_model_len
        self._http = http
        self._model = model
        self._deterministic = deterministic
        self._free_weights = free_weights
        self._supervisor = Supervisor(servers, sender, notify, timings, keeps=keep_kv_cache)
        self._calls: dict[str, Call] = {}
        self._paused: PauseMode | None = None
        self._asleep = self._updating = self._closed = self._weights_gone = False
        self._background: set[asyncio.Task[None]] = set()
        self._failovers = 0

    # Requests

    async def generate(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        session: str,
        images: Sequence[PlacedImage] = (),
        listener: Listener | None = None,
    ) -> Generation:
        """See `RolloutEngine.generate`. While the engine is paused, asleep or takes new weights the request waits."""
        if self._closed:
            raise EngineError("the engine is closed")
        check_request(ids, params, self.max_model_len)
        if min(ids) < 0 or max(ids) >= self._model.vocab_size:
            raise outside_vocabulary(ids, self._model.vocab_size)
        if session in self._calls:
            raise RequestError(f"session {session!r} is generating already; one request a session at a time")
        self._supervisor.start()
        call = self._calls[session] = Call(session, images, listener=listener)
        try:
            return await self._serve(call, list(ids), params)
        finally:
            del self._calls[session]

    def _server_params(self, server: Server, params: SamplingParams) -> SamplingParams:
        """Adapt the parameters of a request to the software of a server."""
        return params

    async def _serve(self, call: Call, prompt: list[int], params: SamplingParams) -> Generation:
        """Ask servers until one has finished the answer. Tokens that earlier ones had sent are kept."""
        done = Generation([], [], FinishReason("abort"), [])
        cached: int | None = None
        failures: list[ServerFailed] = []
        while len(failures) < MAX_FAILOVERS:
            call.check_heard(done.ids)
            if len(done.ids) == params.max_new_tokens:
                return dataclasses.replace(done, finish_reason=FinishReason("length"), cached_tokens=cached or 0)
            server = await self._place(call)
            if server is None:
                return done
            version = self._supervisor.fleet.version(server.url)
            call.partial = PartialAnswer(listener=None if call.listener is None else call.hear)
            call.cache_key = server.cache_key
            ours = self._server_params(server, params)
            rest = dataclasses.replace(ours, max_new_tokens=params.max_new_tokens - len(done.ids))
            if rest.seed is not None and not self._deterministic:
                # A server that does not count a seed's numbers by place would draw the first ones again.
                rest = dataclasses.replace(rest, seed=rest.seed + len(done.ids))
            began = time.monotonic()
            try:
                answer = await self._ask(call, server, prompt + done.ids, rest, version)
            except ServerFailed as error:
                failures.append(error)
                self._failovers += 1
                self._supervisor.failed(server, str(error))
                answer = None
            finally:
                self._supervisor.router.done(call.session, server.url)
                call.server = call.asking = None
            if answer is None:
                if not params.stop:  # stop strings are looked for in what one server wrote
                    done = concatenated(done, self._arrived(call, server, version))
                continue
            cached = answer.cached_tokens if cached is None else cached
            if any(span.version < version for span in answer.versions):
                failures.append(ServerFailed(server.url, f"it generated with weights older than version {version}"))
                self._supervisor.fleet.stale(server.url)
                server.give_up()  # the others' tokens there are as old
                self._supervisor.look()
                continue
            self._supervisor.fleet.served(server.url)
            self._supervisor.router.served(server.url, len(answer.ids), time.monotonic() - began)
            if answer.finish_reason.kind == "abort" and not call.aborted:
                failures.append(ServerFailed(server.url, "it aborted the request by itself"))
                done = done if params.stop else concatenated(done, answer)
                continue
            found = dataclasses.replace(concatenated(done, answer), cached_tokens=cached)
            call.check_heard(found.ids)
            return found
        raise EngineError(f"{MAX_FAILOVERS} servers in a row failed; the last one: {failures[-1]}")

    async def _place(self, call: Call) -> Server | None:
        """Wait for a server that can run the call's next request. None when the call was aborted meanwhile."""
        while not call.aborted:
            if not self._supervisor.quiet:
                try:
                    url = self._supervisor.router.route(call.session)
                except NoServer as error:
                    if self._supervisor.fleet.hopeless:
                        raise EngineError(f"{error}: {self._supervisor.reasons()}") from error
                else:
                    fleet = self._supervisor.fleet
                    # A request that is asked during the exchange would have the old cache key, or the old adapter.
                    waits = self._supervisor.keeps or self._supervisor.ends_requests
                    if not fleet.suspect(url) and not (waits and fleet.is_exchanging(url)):
                        return self._supervisor.servers[url]
                    self._supervisor.router.done(call.session, url)
            await self._supervisor.changed.wait()
        return None

    async def _ask(
        self, call: Call, server: Server, ids: list[int], params: SamplingParams, version: int
    ) -> Generation | None:
        """Send one request to one server. Cancelled, it is aborted there. Raises ServerFailed, also when given up.

        Returns None where it had no token when its server was sent other weights: it is to be asked again.
        """
        call.server, call.rid = server, uuid.uuid4().hex
        client, rid = server.client, call.rid
        call.asking = asyncio.create_task(
            client.generate(rid, ids, params, cache_key=server.cache_key, partial=call.partial, images=call.images)
        )
        asking = Asking(rid, call.asking, call.partial)
        server.asking.add(asking)
        try:
            return await asking.task
        except asyncio.CancelledError as error:
            cancelled = is_being_cancelled()
            if cancelled or call.aborted:
                aborting = asyncio.create_task(ignore_failure(client.abort(rid)))
                self._background.add(aborting)
                aborting.add_done_callback(self._background.discard)
            if cancelled:
                raise
            if call.aborted:
                return self._arrived(call, server, version)
            if asking.again:
                return None
            raise ServerFailed(server.url, self._supervisor.fleet.reason(server.url) or "given up") from error
        finally:
            server.asking.discard(asking)

    def _arrived(self, call: Call, server: Server, version: int) -> Generation:
        """Make an aborted answer of the tokens that a request begun with `version` has brought.

        It is empty where new weights came in between, or the server had others: then nobody knows which tokens are of
        which weights. Whether they came says the cache key, which each sending changes and a death does not.
        """
        partial = call.partial
        others = server.cache_key != call.cache_key or self._supervisor.fleet.state(server.url) is FleetState.STALE
        if not partial.ids or others or partial.weight_version != str(version):
            return Generation([], [], FinishReason("abort"), [])
        return Generation(
            partial.ids, partial.logprobs, FinishReason("abort"), [VersionSpan(version, 0, len(partial.ids))]
        )

    async def abort(self, session: str | None = None) -> None:
        calls = [call for call in self._calls.values() if session is None or call.session == session]
        self._mark_aborted(calls)
        running = [(call.server, call.rid) for call in calls if call.server is not None]
        await asyncio.gather(
            *[ignore_failure(server.client.abort(rid)) for server, rid in running if server is not None]
        )

    def _mark_aborted(self, calls: Sequence[Call]) -> None:
        """End calls that wait, and those without a token yet: a server does not abort what it has not begun."""
        for call in calls:
            call.aborted = True
            if call.asking is not None and not call.partial.ids:
                call.asking.cancel()
        self._supervisor.wake()

    async def _all_ended(self) -> None:
        """Wait until the aborted calls have ended. A call that does not end in time keeps the tokens received."""
        late = time.monotonic() + GRACE
        while running := [call for call in self._calls.values() if call.server is not None]:
            for call in running:
                if call.asking is not None and (time.monotonic() > late or not call.partial.ids):
                    call.asking.cancel()
            await asyncio.sleep(0.001)

    async def release(self, session: str) -> None:
        """See `RolloutEngine.release`. A request of the session that still runs is aborted."""
        if session in self._calls:
            await self.abort(session)
        self._supervisor.router.forget(session)

    # Control

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See `RolloutEngine.pause`. abort ends the requests that wait, too."""
        self._paused = mode
        self._update_quiet()
        if mode == "abort":
            self._mark_aborted(list(self._calls.values()))
        await self._supervisor.each(lambda server: server.client.pause(mode))
        if mode == "abort":
            await self._all_ended()

    async def resume(self) -> None:
        await self._supervisor.each(lambda server: server.client.resume())
        self._paused = None
        self._update_quiet()

    async def flush_cache(self) -> None:
        """See `RolloutEngine.flush_cache`. A server refuses while requests run; its idle entries go by age then.

        A server whose answers have all arrived may still be finishing the last of them, so it is given time.
        """
        await self._supervisor.each(lambda server: server.client.flush_cache(wait=0.0 if server.asking else GRACE))

    async def sleep(self) -> None:
        running = sum(call.server is not None for call in self._calls.values())
        if running and self._paused != "retract":
            raise EngineError(f"sleep: {running} requests are running; pause with mode abort or retract")
        self._asleep = True
        self._update_quiet()
        if self._background:  # requests are being aborted
            await asyncio.wait(self._background, timeout=GRACE)
        if self._free_weights:
            await self._supervisor.lock_weights()  # what waits to be sent some would get them into freed memory
        async with self._supervisor.sending:
            flushed = await self._supervisor.flushed(self._supervisor.answering())
            await self._supervisor.each(self._free, flushed)
        self._weights_gone = self._free_weights

    async def _free(self, server: Server) -> None:
        tags = FREED if self._free_weights else FREED[:1]
        await server.client.release_memory(tags)
        server.freed = tags

    async def wake(self) -> None:
        """See `RolloutEngine.wake`. Raises EngineError when weights were freed and no new ones have come."""
        if self._weights_gone:
            raise EngineError("wake: the weights were freed; update_weights must come first")
        await self._supervisor.each(lambda server: self._restore(server, FREED))
        self._asleep = False
        self._update_quiet()

    async def _restore(self, server: Server, tags: Sequence[Memory]) -> None:
        freed = [tag for tag in server.freed if tag in tags]
        if freed:
            await server.client.resume_memory(freed)
            server.freed = tuple(tag for tag in server.freed if tag not in freed)

    async def _leave(self, server: Server) -> None:
        """Leave a server that we did not start as it was found: able to answer the next client.

        A server that an update left paused may have some of the new weights and some of the old, and stays paused.
        """
        if server.process is None:
            await self._restore(server, FREED)
            if self._supervisor.fleet.state(server.url) is not FleetState.STALE:
                await server.client.resume()

    async def health(self) -> EngineHealth:
        """See `RolloutEngine.health`. The servers are not asked."""
        running = sum(call.server is not None for call in self._calls.values())
        metrics = Metrics()
        metrics.sum("servers_healthy", len(self._supervisor.fleet.serving))
        metrics.sum("failovers", self._failovers)
        metrics.sum("restarts", self._supervisor.restarts)
        if isinstance(self._supervisor.sender, AdapterSender | DeltaSender):
            self._supervisor.sender.add_metrics(metrics)
        waiting = len(self._calls) - running
        return EngineHealth(self._supervisor.version, running, waiting, self._paused is not None, self._asleep, metrics)

    async def close(self) -> None:
        """See `RolloutEngine.close`. Servers that were running before stay."""
        if self._closed:
            return
        self._closed = True
        aborting = asyncio.create_task(self.abort())
        await asyncio.wait([aborting, *self._background], timeout=GRACE)
        await self._all_ended()
        while self._calls:
            await asyncio.sleep(0.001)
        for task in (aborting, *self._background):
            task.cancel()
        await asyncio.gather(aborting, *self._background, return_exceptions=True)
        try:
            states = map(self._supervisor.fleet.state, self._supervisor.servers)
            if self._supervisor.quiet or FleetState.STALE in states:  # an update may have left it paused
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._supervisor.each(self._leave), GRACE)
            await self._supervisor.close()
        finally:
            await self._http.close()

    # Weights

    async def update_weights(self, weights: Weights, version: int) -> SyncReport:
        """See `RolloutEngine.update_weights`. A server that did not take the weights does not serve until it has.

        Raises ValueError for a weight that the model does not have, and EngineError when no server took the weights.
        """
        self._model.check(weights)
        began = time.perf_counter()
        async with self._exchange() as servers:
            faults = await self._supervisor.send_weights(servers, weights, version)
            self._weights_gone = False
        return self._report(began, faults, taken=len(faults) < len(servers))

    async def update_in_flight(self, weights: Weights, version: int) -> SyncReport:
        """See `InFlightEngine.update_in_flight`. Raises as `update_weights` does."""
        self._model.check(weights)
        began = time.perf_counter()
        faults = await self._supervisor.roll(weights, version)
        return self._report(began, faults, taken=bool(self._supervisor.fleet.serving))

    def _report(self, began: float, faults: Mapping[str, Exception], *, taken: bool) -> SyncReport:
        """Report an update; raise EngineError where no server has `taken` the weights and a restart is no way out."""
        gone = all(isinstance(fault.__cause__, ServerFailed) for fault in faults.values())
        if not taken and not (gone and self._supervisor.restartable):
            why = describe(next(iter(faults.values()))) if faults else self._supervisor.reasons()
            raise EngineError(f"no server took the weights: {why}")
        return SyncReport(self._supervisor.sender.bytes_sent, time.perf_counter() - began)

    async def lock_weights(self) -> None:
        """See `InFlightEngine.lock_weights`. A server that starts meanwhile waits until it can be sent weights."""
        await self._supervisor.lock_weights()

    async def unlock_weights(self, weights: Weights, version: int) -> None:
        self._supervisor.unlock_weights(weights, version)

    @asynccontextmanager
    async def _exchange(self) -> AsyncIterator[list[Server]]:
        """Stop sampling inside the block; yields the servers that answer.

        Running requests continue after it. Their keys and values are recomputed unless they were paused in_place.
        """
        self._updating = True
        self._update_quiet()
        self._supervisor.look()  # servers may have ended while the event loop stood still
        servers = self._supervisor.answering()
        try:
            if self._paused is None:
                servers = await self._supervisor.each(lambda server: server.client.pause("retract"), servers)
            ready = await self._supervisor.each(lambda server: self._restore(server, FREED[1:]), servers)
            if self._paused == "in_place" and not self._supervisor.ends_requests:
                yield await self._supervisor.each(Server.ask_again, ready)
            else:
                yield await self._supervisor.flushed(ready)
        finally:
            try:
                if self._paused is None:
                    stale = FleetState.STALE  # of unknown weights
                    whole = [server for server in servers if self._supervisor.fleet.state(server.url) is not stale]
                    await self._supervisor.each(lambda server: server.client.resume(), whole)
            finally:
                self._updating = False
                self._update_quiet()

    def _update_quiet(self) -> None:
        """Recompute whether servers must not generate (paused, asleep or updating) and wake waiting requests."""
        self._supervisor.quiet = self._paused is not None or self._asleep or self._updating
        self._supervisor.wake()


def concatenated(first: Generation, second: Generation) -> Generation:
    """Join two parts of one answer, which ends as the second does."""
    shift = len(first.ids)
    moved = [VersionSpan(span.version, span.start + shift, span.end + shift) for span in second.versions]
    return Generation(
        first.ids + second.ids,
        first.logprobs + second.logprobs,
        second.finish_reason,
        first.versions + moved,
        second.cached_tokens,
    )


async def ignore_failure(call: Awaitable[object]) -> None:
    """Await an abort. A server that is gone has nothing to abort, so its failure does not matter."""
    try:
        await call
    except (EngineError, RequestError):
        return
