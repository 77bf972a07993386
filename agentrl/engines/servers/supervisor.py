"""Supervision of an engine's servers: carries out due actions of `Fleet`, and gives `Router` the serving servers.

While the engine lives it checks servers, restarts dead servers, and sends weights to servers with old weights.
Requests on a server that died, or that may hold a mixture of weights, are given up there and continue elsewhere.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agentrl.engines.contract import Generation
from agentrl.engines.servers.client import Memory, PartialAnswer, ServerClient, ServerFailed, describe
from agentrl.engines.servers.fleet import Check, Fleet, FleetState, Restart, SendWeights, Timings
from agentrl.engines.servers.process import ServerProcess, status_text
from agentrl.engines.servers.router import Router
from agentrl.engines.servers.sync.adapters import AdapterSender
from agentrl.engines.servers.sync.update import WeightSender
from agentrl.engines.weights import Weights

FLUSH_SECONDS = 5.0
"""Time that a server has to end aborted requests, which hold a part of its prefix cache."""
TICK = 0.5
"""Seconds between two looks at the fleet."""


@dataclass(slots=True, eq=False)
class Asking:
    """One request to one server."""

    rid: str
    task: asyncio.Task[Generation]
    partial: PartialAnswer
    """The tokens that have arrived of its answer."""
    again: bool = False
    """True if it was ended to be asked again under other weights, through no fault of the server."""


@dataclass(slots=True)
class Server:
    """One server: its client, its process if we started it, and the requests that it runs now."""

    client: ServerClient
    process: ServerProcess | None = None
    asking: set[Asking] = field(default_factory=set)
    cache_key: str = "v0"
    """Key of what it adds to its prefix cache: another one with each sending of weights, also of the same version."""
    freed: tuple[Memory, ...] = ()
    """Parts of its memory that are released now."""

    @property
    def url(self) -> str:
        """Address, which names the server everywhere."""
        return self.client.url

    def give_up(self) -> None:
        """End its requests, which continue elsewhere."""
        for asking in self.asking:
            asking.task.cancel()

    async def ask_again(self, *, begun: bool = False) -> None:
        """End its requests that have no token yet: they would be answered under the cache key of older weights.

        begun: end the others, too, which continue from the tokens that have arrived.
        """
        waiting = [asking for asking in self.asking if begun or not asking.partial.ids]
        for asking in waiting:
            asking.again = True
            asking.task.cancel()
        await asyncio.gather(*[self.client.abort(asking.rid) for asking in waiting])


class Supervisor:
    """Checks, restarts and updates servers. `notify` shows the user a line when a server dies or returns."""

    def __init__(
        self,
        servers: Sequence[Server],
        sender: WeightSender,
        notify: Callable[[str], None],
        timings: Timings | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        """`keeps`: requests that run while servers are sent weights in turn keep their keys and values."""
        self.servers = {server.url: server for server in servers}
        self.keeps = keeps
        self.router = Router()
        self.version = 0
        """Version of the weights that servers must have."""
        self.quiet = False
        """True while servers may not generate; they cannot answer a check then."""
        self.restarts = 0
        self.changed = asyncio.Event()
        """Set, and replaced, whenever something changes that a waiting request may wait for."""
        self.sender = sender
        self.notify = notify
        self._clock = LoopClock()
        self.ends_requests = isinstance(sender, AdapterSender)
        """True where a request keeps the adapter that it began with, so that new ones end it."""
        self.restartable = all(server.process is not None for server in servers)
        self.fleet = Fleet(list(self.servers), self._clock.now, restartable=self.restartable, timings=timings)
        self._weights: Weights | None = None
        """Weights that can be sent; None while they are being changed."""
        self._offered = 0
        """Their version."""
        self.sending = asyncio.Lock()
        """Held while weights are sent to a server."""
        self._down: set[str] = set()
        """Servers whose death was reported and that have not come back."""
        self._watcher: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], Check | Restart | SendWeights] = {}
        for url in self.servers:
            self.fleet.started(url)
            self.fleet.answered(url, None)
        self.router.set_serving(self.fleet.serving)

    def start(self) -> None:
        """Begin to watch the servers, if it has not yet."""
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the watch and stop the servers that we started."""
        tasks = [*self._tasks, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self.sender.close()
        finally:
            processes = [server.process for server in self.servers.values() if server.process is not None]
            await asyncio.gather(*[asyncio.to_thread(process.stop) for process in processes])

    def answering(self) -> list[Server]:
        """List the servers that a control call may be sent to."""
        alive = (FleetState.HEALTHY, FleetState.STALE)
        return [server for url, server in self.servers.items() if self.fleet.state(url) in alive]

    def serving(self) -> list[ServerClient]:
        """List the servers that have the weights, and requests are sent to."""
        return [self.servers[url].client for url in self.fleet.serving]

    async def each(
        self, call: Callable[[Server], Awaitable[object]], servers: Sequence[Server] | None = None
    ) -> list[Server]:
        """Make a control call to `servers`, by default all that answer. Return those where it succeeded.

        A failure is reported to the fleet, not raised.
        """

        async def one(server: Server) -> bool:
            try:
                await call(server)
            except ServerFailed as error:
                self.failed(server, str(error))
                return False
            return True

        asked = self.answering() if servers is None else list(servers)
        done = await asyncio.gather(*[one(server) for server in asked])
        return [server for server, well in zip(asked, done, strict=True) if well]

    def failed(self, server: Server, reason: str) -> None:
        """Report that a request to the server failed."""
        self._see_ends()
        self.fleet.failed(server.url, reason)
        self.look()

    def _see_ends(self) -> None:
        for server in self.servers.values():
            if server.process is not None and (status := server.process.exited) is not None:
                text = f"its process ended ({status_text(status)}); its log: {server.process.log}"
                self.fleet.exited(server.url, text)

    def look(self) -> None:
        """Follow the fleet's state: set the routes, give up requests on dead servers, and show the user changes."""
        self._see_ends()
        before, now = set(self.router.serving), set(self.fleet.serving)
        for url in before - now:
            if self.fleet.state(url) is FleetState.DEAD:
                count = len(self.servers[url].asking)
                self.notify(f"{url} is dead: {self.fleet.reason(url)}. {count} requests go on elsewhere")
                self._down.add(url)
        for url in now & self._down:
            self._down.remove(url)
            self.notify(f"{url} serves again, with the weights of version {self.version}")
        for url, server in self.servers.items():
            if self.fleet.state(url) is FleetState.DEAD:
                server.give_up()
        if before != now:
            self.router.set_serving(self.fleet.serving)
        self.wake()

    def wake(self) -> None:
        """Let waiting requests look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    def reasons(self) -> str:
        """Describe the fault of each server, in one line."""
        return "; ".join(f"{url} is {self.fleet.state(url)}: {self.fleet.reason(url)}" for url in self.servers)

    # Weights

    async def send_weights(self, servers: Sequence[Server], weights: Weights, version: int) -> dict[str, Exception]:
        """Set new weights, which all servers must have from now on, and send them. Return the faults by server."""
        async with self.sending:
            self.version = version
            self._take(weights, version)
            self.fleet.target(version)
            self.look()
            return await self._send(servers, version)

    async def roll(self, weights: Weights, version: int) -> dict[str, Exception]:
        """Send new weights to one half of the servers, then to the other; requests continue, and end with them.

        Return the faults by server; such a server runs nothing before it was sent all weights.
        """
        async with self.sending:
            self.unlock_weights(weights, version)
            servers, faults = self.answering(), dict[str, Exception]()
            for wave in (servers[: len(servers) // 2], servers[len(servers) // 2 :]):
                urls = [server.url for server in wave]
                self.fleet.exchanging(urls)
                try:
                    faults |= await self._exchange(wave, version)
                finally:
                    self.fleet.exchanged(urls)
                    self.wake()
            self.version = version
            self.fleet.target(version)
            self.look()
            return faults

    async def _exchange(self, servers: Sequence[Server], version: int) -> dict[str, Exception]:
        paused = await self.each(lambda server: server.client.pause("in_place" if self.keeps else "retract"), servers)
        ready = await (self.each(Server.ask_again, paused) if self.keeps else self.flushed(paused))
        faults = await self._send(ready, version) if ready else {}
        well = [server for server in ready if server.url not in faults]
        for server in servers:
            if server not in well:
                self.fleet.stale(server.url, f"did not take the weights of version {version}")
                server.give_up()
        await self.each(lambda server: server.client.resume(), well)
        self.look()
        return faults

    async def flushed(self, servers: Sequence[Server]) -> list[Server]:
        """Empty the prefix caches of servers that are paused; returns those where it was done.

        Where running requests hold a part of a cache, they are given up, and are asked again under the new version.
        """

        async def flush(server: Server) -> None:
            if self.ends_requests:
                await server.ask_again(begun=True)
            if await server.client.flush_cache():
                return
            server.give_up()
            await server.client.abort()
            if not await server.client.flush_cache(wait=FLUSH_SECONDS):
                raise ServerFailed(server.url, "requests still hold keys and values of older weights")

        return await self.each(flush, servers)

    async def lock_weights(self) -> None:
        """Send the weights of the last update no more. Returns when nothing reads them."""
        self.fleet.sendable = False
        async with self.sending:
            self._weights = None

    def unlock_weights(self, weights: Weights, version: int) -> None:
        """Let servers have these weights, too; the weights of the required version are sent no more."""
        self.fleet.rolls_to(version, self.version)
        self._take(weights, version)

    def _take(self, weights: Weights, version: int) -> None:
        self._weights, self._offered, self.fleet.sendable = weights, version, True

    async def _send(self, servers: Sequence[Server], version: int) -> dict[str, Exception]:
        assert self._weights is not None
        for server in servers:  # random, as a run before may have left entries at a server that we attached to
            server.cache_key = f"v{version}.{secrets.token_hex(4)}"
        try:
            faults = await self.sender.send([server.client for server in servers], self._weights, version)
        except BaseException:
            for server in servers:
                server.give_up()
            raise
        for server in servers:
            if server.url not in faults:
                self.fleet.updated(server.url, version)
                continue
            self.notify(f"{server.url} did not take the weights: {describe(faults[server.url])}")
            server.give_up()  # it may have some of the new and some of the old
        self.look()
        return faults

    async def _catch_up(self, server: Server, action: SendWeights) -> None:
        """Send the weights to a server that does not serve.

        An earlier update may have left it paused; its cache and its running requests may be of unknown weights. It is
        resumed only when it has taken all of them.
        """
        async with self.sending:  # from the pause on: an update of all servers would resume it in between
            if self._weights is None:
                self.fleet.postponed(server.url)
                return
            if self.fleet.outstanding(server.url) is not action:
                return  # an update of all servers was first
            server.give_up()
            await server.client.pause("retract")
            await server.client.flush_cache()
            faults = await self._send([server], self._offered)
            if faults:
                raise faults[server.url]
            await self.each(lambda server: server.client.resume(), [server])

    # The watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            if self.quiet:
                continue
            self._clock.tick()
            self.look()
            for action in self.fleet.due():
                task = asyncio.create_task(self._act(action))
                self._tasks[task] = action
                task.add_done_callback(lambda task: self._tasks.pop(task, None))
            for task, action in self._tasks.items():
                if isinstance(action, Check) and self.fleet.outstanding(action.server) is not action:
                    task.cancel()  # too late, or pointless
            self.look()

    async def _act(self, action: Check | Restart | SendWeights) -> None:
        server = self.servers[action.server]
        try:
            match action:
                case Check():
                    if self.fleet.state(server.url) is FleetState.DEAD:
                        # Paused, as a broken update leaves it, it generates nothing, and with unknown weights it is
                        # not to: it says who it is, and is sent the weights. Nothing else is to run there.
                        await server.client.abort()
                        await server.client.info()
                    else:
                        await server.client.check(None)
                    self.fleet.answered(server.url, None)
                case SendWeights():
                    await self._catch_up(server, action)
                case Restart():
                    await self._restart(server)
        except Exception as error:  # for any error, the fleet decides the next action
            self.fleet.failed(server.url, describe(error), action)
        self.look()

    async def _restart(self, server: Server) -> None:
        assert server.process is not None
        self.restarts += 1
        self.notify(f"{server.url} is being started again")
        await asyncio.to_thread(server.process.stop)
        server.process.start()
        server.freed = ()
        self.fleet.started(server.url)


class LoopClock:
    """Clock that stands still while the event loop does, so that no check is late because the policy was updated."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last = time.monotonic()

    def now(self) -> float:
        """Seconds of the loop's own time."""
        return self._seconds

    def tick(self) -> None:
        """Advance the clock. Must be called every TICK seconds while the servers may generate."""
        now = time.monotonic()
        self._seconds += min(now - self._last, 4 * TICK)
        self._last = now
