"""One weight update of several servers: its bracket, and what became of each server.

SGLang takes tensors only between /begin_weight_update and /end_weight_update. A server that fails is dropped from the
update and its fault kept; the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from agentrl.engines.contract import EngineError
from agentrl.engines.weights import Weights

Comparison = Literal["sent", "servers", "none"]
"""What servers were compared with: what was sent; one another; nothing, as there was one server only."""


class Server(Protocol):
    """What a sender needs of a server; `SGLangClient` is one."""

    @property
    def url(self) -> str: ...

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float | None) -> Any:
        """The answer. Raises EngineError (server at fault) or RequestError (it refused), with its message."""
        ...

    async def info(self) -> Any:
        """Has `tensor_parallel`, how many ranks the server has, each with a part of the weights, `weight_version` and
        `device`."""
        ...


class WeightSender(Protocol):
    """Gives servers the weights of a policy."""

    bytes_sent: int
    """Bytes of weights of the last `send`, counted once however many servers there are."""
    compared: Comparison
    """What the servers' weights were compared with after the last `send`."""

    async def send(self, servers: Sequence[Server], weights: Weights, version: int) -> dict[str, Exception]:
        """All weights and `version` to each of `servers`, at the same time. Faults are returned by server's URL: such
        a server may hold some new and some old weights and must not serve; the next `send` puts it right.

        Names and shapes were checked before, and the servers paused or drained by the caller, who also flushes caches.
        Raises ValueError when `weights.read` does not give what `weights.shapes` says.
        """
        ...

    async def close(self) -> None:
        """Free what is held on this side and on the servers."""
        ...


class WeightUpdateFailed(EngineError):
    """A server did not take the weights; the message has the server, the step and the server's own words."""


class Update:
    """The servers that still take part, and the faults of those that do not."""

    def __init__(self, servers: Sequence[Server], version: int, timeout: float) -> None:
        """`timeout`: seconds that one step may take on one server."""
        self.servers = list(servers)
        self.version = version
        self.timeout = timeout
        self.faults: dict[str, Exception] = {}

    async def post(self, step: str, path: str, body: Callable[[Server], Mapping[str, Any]]) -> None:
        """One request to each server still in the update. Returns when all have answered or failed."""
        await self.each(step, lambda server: self.post_one(server, path, body(server)))

    async def begin(self) -> None:
        """Open the bracket; one that an earlier, broken update left open is closed first."""
        await self.each("begin", self._begin_one)

    async def end(self) -> None:
        """Close the bracket; from here on the weights are whole."""
        await self.post("end", "/end_weight_update", lambda _: {})

    async def infos(self) -> dict[str, Any]:
        """What each server says of itself, by its URL."""
        infos: dict[str, Any] = {}

        async def ask(server: Server) -> None:
            infos[server.url] = await server.info()

        await self.each("asking for its ranks", ask)
        return infos

    def fail(self, server: Server, step: str, error: Exception) -> None:
        """Drop a server from the update. Only its first fault is kept."""
        self.servers = [other for other in self.servers if other.url != server.url]
        message = str(error) or repr(error)
        at = "" if server.url in message else f"{server.url}: "
        fault = WeightUpdateFailed(f"weights of version {self.version}, {step}: {at}{message}")
        fault.__cause__ = error
        self.faults.setdefault(server.url, fault)

    def fail_all(self, servers: Iterable[Server], step: str, error: Exception) -> None:
        for server in list(servers):
            self.fail(server, step, error)

    async def each(self, step: str, act: Callable[[Server], Awaitable[Any]]) -> None:
        """`act` on all servers still in the update at once; where it raises, the server is dropped."""
        servers = list(self.servers)
        outcomes = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.fail(server, step, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _begin_one(self, server: Server) -> None:
        try:
            await self.post_one(server, "/begin_weight_update", {})
        except Exception as error:
            if "already open" not in str(error):
                raise
            await self.post_one(server, "/end_weight_update", {})
            await self.post_one(server, "/begin_weight_update", {})

    async def post_one(self, server: Server, path: str, body: Mapping[str, Any]) -> Any:
        """The answer of one server. Raises what `Server.post` raises, and EngineError for an answer without success."""
        answer = await server.post(path, body, timeout=self.timeout)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineError(str(answer.get("message", answer)))
        return answer
