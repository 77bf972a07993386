"""Client of all servers: deadlines, retries, circuit breaker.

Every call ends within the deadline around it: with an answer, with the server's refusal of this very call, or with
`RemoteUnavailable`. A server that is back before the deadline is over has cost time and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import orjson
import pydantic
import tenacity

from agentrl.remote.breaker import CircuitBreaker, CircuitOpen
from agentrl.remote.credentials import Secrets
from agentrl.remote.faults import FaultKind, RemoteFault, RemoteRefused, RemoteUnavailable
from agentrl.system.addresses import is_loopback
from agentrl.system.deadline import seconds_left
from agentrl.system.http import allow_many_files, http_client
from agentrl.system.metrics import Metrics
from agentrl.system.proxies import named_proxies, proxy_url, shown

T = TypeVar("T")

CLIENT_HEADER = "x-client-id"
"""Header with the run's name, so that servers can share their capacity fairly between runs."""
TIMEOUT_HEADER = "x-request-timeout-ms"
"""Header with the milliseconds within which a request has to begin: one begun later would end when nobody waits for it
any more."""
MAX_ANSWER_BYTES = 16 << 20
NO_DEADLINE = 30.0
"""Seconds that a call without a deadline around it may take."""
_MOST_DETAIL = 300
_REFUSED_CREDENTIALS = (401, 403, 407)
_LATER = (408, 425, 504)
_OVERLOADED = (429, 503)


class RemoteOptions(pydantic.BaseModel):
    """Config keys of everything that asks a server. Its total deadline is the tool's `timeout`."""

    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)

    attempt_timeout: float = pydantic.Field(10.0, gt=0)
    """Seconds after which a request that is safe to repeat is given up and made again."""
    attempts: int = pydantic.Field(8, gt=0)
    """Requests a call, at most. Between two of them lies a pause that doubles, with jitter, or the server's own."""
    breaker_failures: int = pydantic.Field(16, ge=0)
    """Failures in a row after which the server is left alone for a while; 0: never."""
    breaker_seconds: float = pydantic.Field(5.0, gt=0)
    """Seconds that it is left alone before one request tries whether it is back. Calls wait, within their deadlines."""
    proxy: str | None = None
    """Proxy by which the server is asked: http://HOST:PORT, or the environment variable that holds it. Null: no proxy,
    even if the environment names one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a server with a status of 2xx."""

    status: int
    body: bytes
    headers: Mapping[str, str]


class RemoteClient:
    """Pooled connections, retries, a circuit breaker and counts for one server; serves all trajectories."""

    def __init__(self, name: str, options: RemoteOptions) -> None:
        """Set up the client without connecting. `name` names the server in messages.

        Raises ConfigError for a proxy that cannot be asked.
        """
        self.name, self.options = name, options
        self.run = f"{socket.gethostname()}-{os.getpid()}"
        """Name of the run, sent as `x-client-id`."""
        self._breaker = CircuitBreaker(options.breaker_failures, options.breaker_seconds)
        self._proxy = None if options.proxy is None else proxy_url(options.proxy, name)
        self.secrets = Secrets([])
        """Texts to hide in what the server says, before that is cut: half of a secret is not found any more."""
        self._url = ""
        """URL of the last request."""
        self._metrics = Metrics()
        self._connections: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(
        self,
        method: str,
        url: str,
        *,
        safe: bool,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        runs: float = 0.0,
        queued: float = 0.0,
    ) -> Answer:
        """Make an HTTP request; `body` is JSON, unless `headers` say otherwise.

        `safe`: the request may be repeated after any outcome; else it is repeated only when it surely was not
        begun (no connection, 429, 503). `runs`: seconds that it may take once the server has begun with it. `queued`:
        see `call`.

        Raises RemoteRefused for 4xx, RemoteUnavailable for everything else that is not 2xx within the deadline.
        """

        async def attempt(seconds: float) -> Answer:
            sent = {
                "Accept-Encoding": "identity",
                CLIENT_HEADER: self.run,
                TIMEOUT_HEADER: str(int(1000 * max(seconds - runs, seconds / 4))),
                **({"Content-Type": "application/json"} if body is not None else {}),
                **(headers or {}),
            }
            return await self._send(method, url, body, sent, max_answer_bytes)

        self._url = url
        return await self.call(attempt, safe=safe, queued=queued)

    async def call(self, attempt: Callable[[float], Awaitable[T]], *, safe: bool, queued: float = 0.0) -> T:
        """Await `attempt(seconds)`, again and again until it does not raise RemoteFault; return its result.

        `seconds` is how long the attempt may take. Its other exceptions are raised here. Raises RemoteUnavailable when
        the deadline or the attempts are used up. A server that says that it is busy uses up neither for `queued`
        seconds. The caller then has to pause the deadline around the call
        (`agentrl.system.deadline.paused_deadlines`).
        """
        self._use_loop()
        deadline = seconds_left(NO_DEADLINE)
        deadline -= min(0.25, 0.05 * deadline)  # to be the one who says what happened
        ends = (begun := asyncio.get_running_loop().time()) + deadline
        faults: list[RemoteFault] = []

        def waits_its_turn() -> bool:
            busy = bool(faults) and faults[-1].kind is FaultKind.OVERLOADED
            return busy and asyncio.get_running_loop().time() < begun + queued

        def is_over(state: tenacity.RetryCallState) -> bool:
            used = sum(not queued or fault.kind is not FaultKind.OVERLOADED for fault in faults)
            late = asyncio.get_running_loop().time() + state.upcoming_sleep >= ends
            return not waits_its_turn() and (late or used >= self.options.attempts)

        async def once() -> T:
            nonlocal ends
            if waits_its_turn():
                ends = asyncio.get_running_loop().time() + deadline
            try:
                async with self._breaker.attempt(ends):
                    left, most = ends - asyncio.get_running_loop().time(), self.options.attempt_timeout
                    if safe and most < left:  # what would not be asked again gains nothing from being given up early
                        return await _within(attempt, most, f"no answer within {most:.3g} s")
                    return await _within(attempt, left, f"no answer within {deadline:.3g} s")
            except RemoteFault as fault:
                faults.append(fault)
                self._metrics.sum(f"fault/{fault.kind}")
                raise

        retrying = tenacity.AsyncRetrying(
            stop=is_over,
            wait=_pause,
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, RemoteFault) and error.again and (safe or not error.ran)
            ),
            reraise=True,
        )
        try:
            return await retrying(once)
        except RemoteFault as fault:
            raise RemoteUnavailable(fault.kind, self._summary(faults)) from fault
        except CircuitOpen as error:
            kind = faults[-1].kind if faults else FaultKind.TIMEOUT
            raise RemoteUnavailable(
                kind, f"{self._summary(faults)}; the deadline of {deadline:.3g} s is over"
            ) from error
        finally:
            self._metrics.sum("retries", max(0, retrying.statistics.get("attempt_number", 1) - 1))

    def take_metrics(self) -> Metrics:
        """Return and reset the counts: retries, fault/<kind>, breaker_opened; and breaker_open, 1 while it is open.

        Over several rollout workers all of them are sums: `breaker_open` is the number of open breakers.
        """
        metrics, self._metrics = self._metrics, Metrics()
        opened, self._breaker.opened = self._breaker.opened, 0
        metrics.sum("retries", 0)  # also without a retry
        metrics.sum("breaker_opened", opened)
        metrics.sum("breaker_open", self._breaker.is_open)
        return metrics

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()

    def _summary(self, faults: list[RemoteFault]) -> str:
        tries = f" ({len(faults)} attempts)" if len(faults) > 1 else ""
        waiting = "; it is left alone after too many failures" if self._breaker.is_open else ""
        told = str(faults[-1]) if faults else "no answer"
        causes = [fault for fault in faults if fault.kind is not FaultKind.TIMEOUT]
        if causes and causes[-1] is not faults[-1]:  # that the time was over does not say why
            told = f"{causes[-1]}, then {told}"
        return f"{self.name}: {told}{tries}{waiting}{self._way(faults)}"

    def _way(self, faults: list[RemoteFault]) -> str:
        """Say by which proxy the server was asked, or that the environment's is not used."""
        if self._proxy is not None:
            return f"; asked by the proxy {shown(self._proxy)}"
        named, host = named_proxies(os.environ), urlsplit(self._url).hostname
        unreached = bool(faults) and faults[-1].kind in (FaultKind.CONNECT, FaultKind.TIMEOUT)
        if not named or not unreached or host is None or is_loopback(host):
            return ""
        return f"; the environment's proxy ({named}) is not used: the key `proxy` names one"

    async def _send(self, method: str, url: str, body: bytes | None, headers: Mapping[str, str], most: int) -> Answer:
        if self._connections is None:  # closed between two attempts, at the end of a run
            raise RemoteFault(FaultKind.CONNECT, "the client is closed", ran=False, again=False)
        try:
            async with self._connections.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                content = await _read(response, most)
        except aiohttp.ClientHttpProxyError as error:
            again = error.status not in _REFUSED_CREDENTIALS
            problem = f"the proxy answers {error.status} {error.message}"
            raise RemoteFault(FaultKind.CONNECT, problem, ran=False, again=again) from error
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RemoteFault(FaultKind.CONNECT, f"no connection ({error})", ran=False) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            raise RemoteFault(FaultKind.BROKEN, f"the connection broke ({_text(error)})") from error
        except aiohttp.ClientError as error:
            if isinstance(error, ValueError):  # InvalidURL
                raise
            raise RemoteFault(FaultKind.ANSWER, f"it did not answer as a web server does ({_text(error)})") from error
        status = response.status
        if 200 <= status < 300:
            return Answer(status, content, response.headers)
        said = f"status {status}: {self._detail(content)}"
        if status in _OVERLOADED or status in _LATER:
            after = _seconds(response.headers.get("Retry-After"))
            raise RemoteFault(FaultKind.OVERLOADED, said, ran=status in _LATER, retry_after=after)
        if status >= 500:
            raise RemoteFault(FaultKind.SERVER, said)
        if status < 400 or status in _REFUSED_CREDENTIALS:
            raise RemoteFault(FaultKind.ANSWER, said, again=False)
        raise RemoteRefused(status, self._detail(content))

    def _detail(self, content: bytes) -> str:
        """Extract the server's explanation from the body of a refusal."""
        text: object = content.decode(errors="replace")
        try:
            said = orjson.loads(content)
            text = next((said[key] for key in ("detail", "message", "error") if key in said), text)
        except (orjson.JSONDecodeError, TypeError, IndexError):
            pass
        return self.secrets.hide(text if isinstance(text, str) else orjson.dumps(text).decode())[:_MOST_DETAIL]

    def _use_loop(self) -> None:
        """Open connections and a breaker for the running event loop, to which they belong."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self._connections = loop, None
            self._breaker = CircuitBreaker(self.options.breaker_failures, self.options.breaker_seconds)
        if self._connections is None:
            allow_many_files()
            self._connections = http_client(proxy=self._proxy)


async def _within(attempt: Callable[[float], Awaitable[T]], seconds: float, said: str) -> T:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            return await attempt(seconds)
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise RemoteFault(FaultKind.TIMEOUT, said) from error


_BACK_OFF = tenacity.wait_random_exponential(multiplier=0.2, max=4.0)


def _pause(state: tenacity.RetryCallState) -> float:
    """Seconds before the next attempt: the server's demand plus a random 0 to 0.2, 0.4, ... 4."""
    error = state.outcome.exception() if state.outcome is not None else None
    asked = error.retry_after if isinstance(error, RemoteFault) else None
    return (asked or 0.0) + _BACK_OFF(state)


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Read the body. Raises RemoteFault when it is longer than `most` bytes."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > most:
            raise RemoteFault(FaultKind.ANSWER, f"the answer is longer than {most} bytes", again=False)
    return b"".join(parts)


def _seconds(header: str | None) -> float | None:
    try:
        return min(60.0, max(0.0, float(header))) if header else None
    except ValueError:
        return None  # a date


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
