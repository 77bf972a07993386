"""Tools of MCP servers, as entries of a tool YAML."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self, TypeVar

import mcp_types
import pydantic

from agentrl.errors import ConfigError
from agentrl.remote import RemoteFault, RemoteOptions, RemoteTool, RemoteUnavailable
from agentrl.system.plugin import nearest
from agentrl.system.proxies import proxy_url
from agentrl.tool import FunctionSchema, Tool, ToolResponse, ToolSchema, ToolSource
from tools.mcp.connection import Connection
from tools.mcp.content import response_of
from tools.mcp.servers import HttpServer, MCPServer, http_server, read_servers_file, stdio_server

T = TypeVar("T")

_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_CLOSING = 15.0
"""Seconds that a server may take, beyond `start_timeout`, to end after it has listed its tools."""


class MCPConfig(RemoteOptions):
    """Config of an entry with MCP tools; one of `command`, `url` and `servers_file` says where the server is."""

    command: list[str] | None = pydantic.Field(None, min_length=1)
    """Program, with its arguments, that speaks MCP on its standard streams."""
    pass_env: list[str] = []
    """Environment variables that programs see, besides PATH, HOME, SHELL, TERM, LOGNAME and USER."""
    url: str | None = None
    """URL of a server that speaks streamable HTTP."""
    auth_env: str | None = None
    """Environment variable with the token that `url` is sent as `Authorization: Bearer`."""
    servers_file: str | None = None
    """JSON file {"mcpServers": {name: {command, args, env} or {url, headers}}}, as other MCP clients read it."""
    servers: list[str] | None = None
    """Names of the servers of `servers_file` that are used. Null: all."""
    tools: list[str] | None = None
    """Tools that are shown to the model, by the server's names. Null: all."""
    prefix: str = ""
    """Text put before their names, where two servers have tools of one name."""
    session: Literal["shared", "trajectory"] = "shared"
    """Sessions. shared: one serves all; trajectory: each trajectory has its own, for servers that remember."""
    safe: bool | None = None
    """Permission to repeat calls when it is not known what became of them. Null: as the tool's annotations say."""
    start_timeout: float = pydantic.Field(30.0, gt=0)
    """Seconds until a server has started and listed its tools."""
    max_answer_bytes: int = pydantic.Field(4 << 20, gt=0)
    """Bytes of an answer; a longer one is a fault of the server."""

    @pydantic.model_validator(mode="after")
    def _fits(self) -> Self:
        places = {"command": self.command, "url": self.url, "servers_file": self.servers_file}
        given = [name for name, place in places.items() if place is not None]
        if len(given) != 1:
            raise ValueError(f"expected exactly one of {', '.join(places)}, found {' and '.join(given) or 'none'}")
        for key, value, belongs in (
            ("pass_env", self.pass_env, ("command", "servers_file")),
            ("auth_env", self.auth_env, ("url",)),
            ("servers", self.servers, ("servers_file",)),
            ("proxy", self.proxy, ("url", "servers_file")),
        ):
            if value and given[0] not in belongs:
                raise ValueError(f"{key} has no effect with {given[0]}")
        return self

    def places(self) -> list[MCPServer]:
        """Describe the servers. Raises ConfigError."""
        if self.command is not None:
            return [stdio_server(self.command[0], self.command, self.pass_env)]
        if self.url is not None:
            return [http_server(self.url, self.url, self.auth_env)]
        assert self.servers_file is not None
        return read_servers_file(self.servers_file, self.pass_env, self.servers)

    def proxied(self, server: MCPServer) -> MCPServer:
        """Return the server with the proxy by which it is asked, where it has a URL. Raises ConfigError."""
        if self.proxy is None or not isinstance(server, HttpServer):
            return server
        return replace(server, proxy=proxy_url(self.proxy, server.name))

    def connection(self, server: MCPServer, *, restarts: bool) -> Connection:
        """Make a connection that is not open yet."""
        return Connection(
            server,
            start_timeout=self.start_timeout,
            max_answer_bytes=self.max_answer_bytes,
            restarts=restarts,
            protocol="legacy" if self.session == "trajectory" and isinstance(server, HttpServer) else "auto",
        )


class MCPTools(ToolSource):
    """All tools of one or more MCP servers, as they list them when the YAML is loaded."""

    config_model = MCPConfig
    options: MCPConfig

    def tools(self) -> list[Tool]:
        """Start or ask the servers for their tools, and leave them.

        Raises ConfigError, with what the server wrote to stderr.
        """
        options = self.options
        servers = [options.proxied(server) for server in options.places()]
        listed = _in_thread(lambda: _list_all(options, servers), options.start_timeout + _CLOSING)
        names = [tool.name for tools in listed for tool in tools]
        if unknown := [name for name in options.tools or [] if name not in names]:
            known = ", ".join(names) or "none"
            raise ConfigError(f"tools: no tool {unknown[0]!r}{nearest(unknown[0], names)}; the server has {known}")
        made = [tool for server, tools in zip(servers, listed, strict=True) for tool in self._chosen(server, tools)]
        if not made:
            raise ConfigError(f"{', '.join(server.name for server in servers)}: no tools")
        return made

    def _chosen(self, server: MCPServer, listed: list[mcp_types.Tool]) -> Iterable[Tool]:
        options = self.options
        chosen = [tool for tool in listed if options.tools is None or tool.name in options.tools]
        if options.session == "shared":
            connection = options.connection(server, restarts=True)
            return [MCPTool(self.config, tool, connection) for tool in chosen]
        sessions = Sessions(partial(options.connection, server, restarts=False))
        return [MCPSessionTool(self.config, tool, sessions) for tool in chosen]


class MCPTool(RemoteTool):
    """Tool of a server, asked in the one session that all trajectories share."""

    config_model = MCPConfig
    options: MCPConfig

    def __init__(self, config: dict[str, Any], tool: mcp_types.Tool, sessions: Connection | Sessions) -> None:
        """Take `tool` as the server lists it."""
        super().__init__(config, _schema(tool, config.get("prefix", "")))
        self._tool, self._sessions = tool.name, sessions
        hints = tool.annotations
        repeatable = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        self._safe = repeatable if self.options.safe is None else self.options.safe

    async def start(self, run: str) -> None:
        await super().start(run)
        if isinstance(self._sessions, Connection):
            try:
                await self._sessions.open()
            except RemoteFault as fault:
                raise ConfigError(str(fault) + self._sessions.last_words) from fault

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        sessions = self._sessions
        connection = sessions if isinstance(sessions, Connection) else sessions.connection(instance_id)

        async def attempt(seconds: float) -> mcp_types.CallToolResult:
            return await connection.call(self._tool, arguments, seconds)

        secrets = connection.server.secrets
        with secrets.hidden_in_errors():
            answer = response_of(await self.client.call(attempt, safe=self._safe))
        return ToolResponse(secrets.hide(answer.text), images=answer.images)

    async def close(self) -> None:
        await super().close()
        await self._sessions.close()


class MCPSessionTool(MCPTool):
    """Tool of a server of which each trajectory has a session of its own, shared by the server's tools."""

    _sessions: Sessions

    @property
    def remembers(self) -> bool:
        return True

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        try:
            await self._sessions.open(instance_id)
        except RemoteFault as fault:
            raise RemoteUnavailable(fault.kind, str(fault)) from fault

    async def release(self, instance_id: str) -> None:
        await self._sessions.release(instance_id)


class Sessions:
    """Sessions by trajectory, each until the last of its tools has released it."""

    def __init__(self, make: Callable[[], Connection]) -> None:
        self._make = make
        self._opened: dict[str, list[Connection]] = {}
        """Connection of each trajectory, once for each tool that opened it."""

    async def open(self, instance_id: str) -> None:
        """Open the trajectory's session, or share the open one. Raises RemoteFault."""
        users = self._opened.setdefault(instance_id, [])
        users.append(users[0] if users else self._make())
        try:
            await users[0].open()
        except BaseException:
            await self.release(instance_id)
            raise

    def connection(self, instance_id: str) -> Connection:
        """Return the trajectory's open connection."""
        return self._opened[instance_id][0]

    async def release(self, instance_id: str) -> None:
        """Give the session up for one of its tools; the last one closes it."""
        users = self._opened.get(instance_id)
        if users is None:  # `close` ended it
            return
        connection = users.pop()
        if not users:
            del self._opened[instance_id]
            await connection.close()

    async def close(self) -> None:
        """End the sessions that were not released."""
        left, self._opened = self._opened, {}
        await asyncio.gather(*(users[0].close() for users in left.values()))


def _schema(tool: mcp_types.Tool, prefix: str) -> ToolSchema:
    """Write the server's schema as OpenAI does. Characters that its names may not have become `_`."""
    declaration: FunctionSchema = {
        "name": _NO_NAME.sub("_", prefix + tool.name),
        "description": tool.description or tool.title or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": declaration}


async def _list_all(options: MCPConfig, servers: list[MCPServer]) -> list[list[mcp_types.Tool]]:
    asked = (_list(options.connection(server, restarts=False)) for server in servers)
    listed = await asyncio.gather(*asked, return_exceptions=True)  # so that the others end in order when one fails
    for tools in listed:
        if isinstance(tools, BaseException):
            raise tools
    return [tools for tools in listed if not isinstance(tools, BaseException)]


async def _list(connection: Connection) -> list[mcp_types.Tool]:
    try:
        await connection.open()
        return connection.tools
    except RemoteFault as fault:
        raise ConfigError(str(fault) + connection.last_words) from fault
    finally:
        await connection.close()


def _in_thread(listing: Callable[[], Coroutine[None, None, T]], seconds: float) -> T:
    """Run a coroutine in an event loop of its own: the caller may be inside one.

    In a daemon thread, so that Ctrl-C ends all.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(listing()))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="list MCP tools", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        raise ConfigError(f"the servers have not listed their tools within {seconds:g} s") from None
