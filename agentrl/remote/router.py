"""An address on loopback that forwards requests to the servers of one model, to any that can answer.

Its clients see no fault of a server. A request that a server does not answer, or answers by an error of its own, is
made again at the next server until one answers. It ends when the caller goes away, as at its deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from agentrl.errors import ConfigError
from agentrl.system.http import allow_many_files, http_client
from agentrl.system.loop_thread import LoopThread
from agentrl.system.metrics import Metrics
from agentrl.system.throttle import OncePerKey

MAX_BODY = 64 << 20
"""Bytes of a request."""
LONGEST_WAIT = 15.0
"""Seconds between two tries of a request, at most."""
LATER = (408, 425, 429)
"""Statuses below 500 that mean: not now."""
PASSED_ON = ("Content-Type", "Accept", "Authorization")
"""Headers of a request that servers see."""


@dataclass(frozen=True, slots=True)
class ServerAccess:
    """Servers of one model."""

    urls: tuple[str, ...]
    key: str | None = field(default=None, repr=False)
    """Key that they ask for; None: the caller's own."""


class ModelRouter:
    """HTTP server at 127.0.0.1 in a thread of its own, for code that blocks its event loop while it asks."""

    def __init__(self, servers: ServerAccess, warn: Callable[[str], None]) -> None:
        """`warn` is called from that thread, at a server's first fault."""
        self._servers, self._warn = servers, warn
        self._running = dict.fromkeys(servers.urls, 0)
        self._faults = 0
        self._is_new = OncePerKey()
        self._thread = LoopThread("router of the reward model")
        self._client: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self._is_closed = False
        self.address = ""
        """host:port, once it was started."""

    def start(self, within: float) -> None:
        """Begin to answer. Raises ConfigError where one of the servers does not answer within so many seconds."""
        try:
            self._thread.run(self._start(within))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop; requests that wait get no answer. Closed again, it stays closed."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.run(self._stop())
            self._thread.close()

    def take_metrics(self) -> Metrics:
        """Return and reset the count of requests that were made again."""
        metrics = Metrics()
        metrics.sum("retries", self._faults)
        self._faults = 0
        return metrics

    async def _start(self, within: float) -> None:
        allow_many_files()
        self._client = http_client()
        for url in self._servers.urls:
            await self._reach(url, within)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.address = f"{host}:{port}"

    async def _stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._client is not None:
            await self._client.close()

    async def _reach(self, url: str, within: float) -> None:
        loop, problem = asyncio.get_running_loop(), ""
        end = loop.time() + within
        while loop.time() < end:
            try:
                async with asyncio.timeout_at(end):
                    answer = await self._sent(url, "GET", "/v1/models", {}, b"")
                if answer.status < 500:  # it may keep no list, or ask for a key that the caller has
                    return
                problem = f"status {answer.status}"
            except (aiohttp.ClientError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(0.5)
        raise ConfigError(f"the reward model's server {url} does not answer within {within:g} s: {problem}")

    async def _answer(self, request: web.Request) -> web.Response:
        """Return the first server's answer that is no fault of the server."""
        body = await request.read()
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        wait, tried = 0.5, list[str]()
        while True:
            url = min(self._servers.urls, key=lambda one: (tried.count(one), self._running[one]))
            self._running[url] += 1
            try:
                answer = await self._sent(url, request.method, request.path_qs, headers, body)
                if answer.status < 500 and answer.status not in LATER:
                    return answer
                said = answer.body[:300].decode(errors="replace") if isinstance(answer.body, bytes) else ""
                problem = f"status {answer.status}: {said}"
            except (aiohttp.ClientError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
            finally:
                self._running[url] -= 1
            self._faults += 1
            if self._is_new(url):
                self._warn(f"the reward model's server {url} failed, and is asked again until it answers: {problem}")
            tried.append(url)
            if len(tried) % len(self._servers.urls) == 0:  # all of them fail
                await asyncio.sleep(wait)
                wait = min(2 * wait, LONGEST_WAIT)

    async def _sent(self, url: str, method: str, path: str, headers: dict[str, str], body: bytes) -> web.Response:
        assert self._client is not None
        if self._servers.key is not None:
            headers = {**headers, "Authorization": f"Bearer {self._servers.key}"}
        asking = self._client.request(method, url + path, data=body, headers=headers, allow_redirects=False)
        async with asking as answer:
            kind = answer.headers.get("Content-Type", "application/octet-stream")
            return web.Response(status=answer.status, body=await answer.read(), headers={"Content-Type": kind})
