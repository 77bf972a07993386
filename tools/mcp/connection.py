"""Session with an MCP server, which one task opens, watches and opens again."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Any, Literal

import mcp_types
from mcp import Client
from mcp.client import IncomingMessage
from mcp.shared.exceptions import MCPError

from agentrl.remote import FaultKind, RemoteFault
from agentrl.tool import ToolError, ToolFailed
from tools.mcp.http import FAULT, HttpLink
from tools.mcp.servers import MCPServer, StdioServer
from tools.mcp.stdio import StdioLink

logger = logging.getLogger(__name__)

SILENCE = 60.0
"""Seconds that a server leaves calls unanswered, all of them, before it is taken for hung and started again."""
_MOST_PAGES = 100
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0
"""Seconds before the server is started again; doubled while it does not live for _STABLE seconds."""
_STABLE = 30.0
_LAST_ANSWERS = 1.0
"""Seconds that calls have to hear that their session is lost, before it is closed under them."""
_MOST_SAID = 500
_LEAVING = 5.0
"""Seconds that it takes at most to leave a server that did not start."""


def link_to(server: MCPServer, max_answer_bytes: int) -> StdioLink | HttpLink:
    """Make the link of a server's transport."""
    if isinstance(server, StdioServer):
        return StdioLink(server, max_answer_bytes)
    return HttpLink(server, max_answer_bytes)


class Connection:
    """Session with one server that is opened again when it is lost.

    `call` from any task of the event loop in which it was opened.
    """

    def __init__(
        self,
        server: MCPServer,
        *,
        start_timeout: float,
        max_answer_bytes: int,
        restarts: bool,
        protocol: Literal["auto", "legacy"] = "auto",
    ) -> None:
        """`restarts`: a session that is lost is opened again; else all further calls fail. `protocol`: legacy is the
        one before 2026-07-28, in which a server at a URL knows sessions."""
        self.server = server
        self.protocol: Literal["auto", "legacy"] = protocol
        self.start_timeout, self.max_answer_bytes, self.restarts = start_timeout, max_answer_bytes, restarts
        self.tools: list[mcp_types.Tool] = []
        """Tools as the server last listed them."""
        self.link: StdioLink | HttpLink | None = None
        self._client: asyncio.Future[Client] | None = None
        self._owner: asyncio.Task[None] | None = None
        self._problem = "no connection yet"
        self._unanswered = 0
        self._unanswered_since = 0.0

    async def open(self) -> None:
        """Wait until the server has answered and listed its tools. Opening again changes nothing.

        Raises RemoteFault when it does not within `start_timeout`.
        """
        if self._owner is None:
            self._client = asyncio.get_running_loop().create_future()
            self._owner = asyncio.create_task(self._keep_open(), name=f"MCP server {self.server.name}")
        await self._ready(self.start_timeout + _LEAVING)

    async def close(self) -> None:
        """End the session, and the server that was started for it."""
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.cancel()
            await asyncio.wait([owner])

    async def call(self, name: str, arguments: dict[str, Any], seconds: float) -> mcp_types.CallToolResult:
        """Call a tool. Raises RemoteFault when the server does not answer, ToolError when it rejects the call."""
        client = await self._ready(seconds / 2)
        if self._unanswered == 0:
            self._unanswered_since = time.monotonic()
        self._unanswered += 1
        try:
            return await client.call_tool(name, arguments)
        except MCPError as error:
            raise _classify(error) from error
        except asyncio.CancelledError:
            self._end_if_hung()
            raise
        except Exception as error:  # what it answered is not what it declares, or no answer to a call
            raise RemoteFault(FaultKind.ANSWER, f"{type(error).__name__}: {error}"[:300], again=False) from error
        finally:
            self._unanswered -= 1

    async def _ready(self, seconds: float) -> Client:
        if self._client is None:
            raise RemoteFault(FaultKind.CONNECT, "the tool was not started", again=False)
        await asyncio.wait([self._client], timeout=seconds)
        if not self._client.done():
            raise RemoteFault(FaultKind.CONNECT, self._problem, ran=False)
        return self._client.result()

    def _end_if_hung(self) -> None:
        link = self.link
        if link is not None and time.monotonic() - max(link.last_heard, self._unanswered_since) > SILENCE:
            link.ended.set()

    async def _keep_open(self) -> None:
        """Keep a session open, until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            begun = time.monotonic()
            try:
                await self._run_session()
                self._set_problem("the connection was lost")
            except Exception as error:
                self._set_problem(_reason(error, self.start_timeout))
            if not self.restarts:
                assert self._client is not None
                self._client.set_exception(RemoteFault(FaultKind.BROKEN, self._problem, again=False))
                self._client.exception()  # seen: nobody may call any more
                return
            pause = _FIRST_PAUSE if time.monotonic() - begun > _STABLE else min(_LONGEST_PAUSE, 2 * pause)
            await asyncio.sleep(pause * random.uniform(1.0, 1.5))

    async def _run_session(self) -> None:
        """Keep one session, from its opening until it is lost."""
        self.link = link = link_to(self.server, self.max_answer_bytes)
        async with asyncio.timeout(self.start_timeout) as starting:
            async with Client(link.open(), message_handler=self._on_message, cache=None, mode=self.protocol) as client:
                self._set_tools(await list_tools(client))
                starting.reschedule(None)
                assert self._client is not None
                self._client.set_result(client)
                try:
                    await link.ended.wait()
                finally:  # from now on calls wait for another session
                    self._client = asyncio.get_running_loop().create_future()
                await self._wait_for_callers()

    async def _wait_for_callers(self) -> None:
        """Wait until the calls of a lost session have been told why, or have had the time for it."""
        until = time.monotonic() + _LAST_ANSWERS
        while self._unanswered > 0 and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def _set_problem(self, problem: str) -> None:
        """Keep and log the problem that is reported to calls that find no session."""
        self._problem = f"MCP server {self.server.name}: {self.server.secrets.hide(problem)}"
        logger.warning("%s%s", self._problem, self.last_words)

    @property
    def last_words(self) -> str:
        """End of what the server wrote to stderr: for people, since nobody knows what it may tell."""
        said = self.server.secrets.hide(self.link.stderr)[-_MOST_SAID:] if self.link is not None else ""
        return f"; the end of its stderr: {said}" if said else ""

    def _set_tools(self, tools: list[mcp_types.Tool]) -> None:
        gone = {tool.name for tool in self.tools} - {tool.name for tool in tools}
        if gone:
            logger.warning("MCP server %s has no longer: %s", self.server.name, ", ".join(sorted(gone)))
        self.tools = tools

    async def _on_message(self, message: IncomingMessage) -> None:
        if isinstance(message, mcp_types.ToolListChangedNotification):
            logger.warning("MCP server %s changed its tools; a run goes on with those it began with", self.server.name)


async def list_tools(client: Client) -> list[mcp_types.Tool]:
    """List the tools of all pages. Raises ToolError when there are too many pages."""
    tools: list[mcp_types.Tool] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise ToolError(f"its list of tools has more than {_MOST_PAGES} pages")


def _classify(error: MCPError) -> RemoteFault | ToolError:
    """Tell a call that the server did not answer (RemoteFault) from one that it rejected (ToolError)."""
    fault = error.data.get(FAULT) if isinstance(error.data, dict) else None
    if isinstance(fault, dict):
        kind = FaultKind(fault["kind"])
        again = kind is not FaultKind.ANSWER
        return RemoteFault(kind, error.message, ran=fault["ran"], retry_after=fault["after"], again=again)
    if error.code == mcp_types.CONNECTION_CLOSED:
        return RemoteFault(FaultKind.BROKEN, error.message)
    if error.code == mcp_types.PARSE_ERROR:
        return RemoteFault(FaultKind.ANSWER, error.message, again=False)
    return (ToolError if error.code == mcp_types.INVALID_PARAMS else ToolFailed)(error.message)


def _reason(error: BaseException, start_timeout: float) -> str:
    """Describe why a session could not be opened, or broke. The SDK's task groups wrap the cause in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"no answer within {start_timeout:g} s of its start"
    return str(error) or type(error).__name__
