"""Link to an MCP server by streamable HTTP, over the connections that all remote tools use.

The SDK's transport (mcp 2.3) is given a client whose requests never raise: what goes wrong with one request becomes the
JSON-RPC error that answers it. With the SDK's own client a lost connection ends the session and with it the calls of
all trajectories, and an answer of any length is read into memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping

import aiohttp
import httpx2
import orjson
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import LAST_EVENT_ID, MCP_SESSION_ID, streamable_http_client
from mcp_types import CONNECTION_CLOSED, INVALID_PARAMS

from agentrl.remote import FaultKind
from agentrl.remote.client import NO_DEADLINE
from agentrl.system.deadline import seconds_left
from agentrl.system.http import allow_many_files, http_client
from agentrl.system.json_value import JSON
from tools.mcp.servers import HttpServer

FAULT = f"agentrl-{secrets.token_hex(8)}"
"""Key of a JSON-RPC error's data, which no server can know: it marks errors of this link, {kind, ran, after}."""
_EVENTS = "text/event-stream"


class HttpLink:
    """One session with the server."""

    stderr = ""
    """Text of stderr, which a server elsewhere does not show."""

    def __init__(self, server: HttpServer, max_answer_bytes: int) -> None:
        self.server, self.max_answer_bytes = server, max_answer_bytes
        self.ended = asyncio.Event()
        """Event that is set when the server no longer knows the session."""
        self.last_heard = time.monotonic()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[TransportStreams]:
        """Open the session, from its first request to the one that ends it."""
        allow_many_files()
        async with (
            http_client(proxy=self.server.proxy) as connections,
            httpx2.AsyncClient(
                transport=_NeverRaises(self, connections), headers=self.server.headers, timeout=None
            ) as client,
            streamable_http_client(
                self.server.url, http_client=client, max_sse_event_size=self.max_answer_bytes
            ) as streams,
        ):
            yield streams


class _NeverRaises(httpx2.AsyncBaseTransport):
    def __init__(self, link: HttpLink, connections: aiohttp.ClientSession) -> None:
        self._link, self._connections = link, connections

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = {**request.headers, "accept-encoding": "identity"}
        # Only the stream of the server's own messages lasts; the SDK leaves a POST open whose caller has given up.
        is_call = request.method != "GET" or LAST_EVENT_ID in request.headers
        ends = asyncio.get_running_loop().time() + seconds_left(NO_DEADLINE) if is_call else None
        try:
            async with asyncio.timeout_at(ends):
                response = await self._connections.request(
                    request.method, str(request.url), data=await request.aread(), headers=headers, allow_redirects=False
                )
                self._link.last_heard = time.monotonic()
                return await self._response(request, response, ends)
        except TimeoutError:
            return _fault(FaultKind.TIMEOUT, "no answer within the call's deadline")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return _fault(FaultKind.CONNECT, f"no connection ({error})", ran=False)
        except (aiohttp.ClientError, OSError) as error:
            return _fault(FaultKind.BROKEN, f"the connection broke ({error or type(error).__name__})")
        except ValueError as error:
            return _error(INVALID_PARAMS, f"this cannot be sent: {error}")

    async def _response(
        self, request: httpx2.Request, response: aiohttp.ClientResponse, ends: float | None
    ) -> httpx2.Response:
        status, kind = response.status, response.headers.get("Content-Type", "")
        kept = {name: response.headers[name] for name in ("Content-Type", MCP_SESSION_ID) if name in response.headers}
        if status == 200 and kind.lower().startswith(_EVENTS):
            return httpx2.Response(status, headers=kept, stream=_Stream(response, ends))
        async with response:
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > self._link.max_answer_bytes:
                    return _fault(FaultKind.ANSWER, f"the answer is longer than {self._link.max_answer_bytes} bytes")
        if MCP_SESSION_ID in request.headers and (status == 404 or (status == 400 and b"session" in body.lower())):
            self._link.ended.set()
            return _fault(FaultKind.BROKEN, "the server no longer knows the session", ran=False)
        said = f"status {status}: {bytes(body[:200]).decode(errors='replace')}"
        if status in (429, 503):
            return _fault(FaultKind.OVERLOADED, said, ran=False, after=_seconds(response.headers.get("Retry-After")))
        if status >= 500:
            return _fault(FaultKind.SERVER, said)
        if 300 <= status < 400 or status in (401, 403, 407):
            return _fault(FaultKind.ANSWER, said)
        return httpx2.Response(status, headers=kept, content=bytes(body))


class _Stream(httpx2.AsyncByteStream):
    """Server-sent events; the SDK limits the length of one."""

    def __init__(self, response: aiohttp.ClientResponse, ends: float | None) -> None:
        """`ends`: when it is given up, in the event loop's time."""
        self._response, self._ends = response, ends

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            async with asyncio.timeout_at(self._ends):
                part = await self._response.content.readany()
            if not part:
                return
            yield part

    async def aclose(self) -> None:
        self._response.close()


def _fault(kind: FaultKind, problem: str, *, ran: bool = True, after: float | None = None) -> httpx2.Response:
    """Make the answer in place of the server's."""
    return _error(CONNECTION_CLOSED, problem, {FAULT: {"kind": kind.value, "ran": ran, "after": after}})


def _error(code: int, problem: str, data: Mapping[str, JSON] | None = None) -> httpx2.Response:
    """Make the answer with a JSON-RPC error, to which the SDK gives the request's id."""
    error = {"code": code, "message": problem, "data": data}
    content = orjson.dumps({"jsonrpc": "2.0", "id": None, "error": error})
    return httpx2.Response(502, headers={"Content-Type": "application/json"}, content=content)


def _seconds(header: str | None) -> float | None:
    return min(60.0, float(header)) if header and header.isdecimal() else None
