"""Addresses of MCP servers, and how they are reached."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mcp.client.stdio import get_default_environment

from agentrl.errors import ConfigError
from agentrl.remote import checked_url
from agentrl.remote.credentials import Secrets, from_environment, passed_secrets

_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class StdioServer:
    """Program that speaks MCP on its standard streams."""

    name: str
    command: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    """All of the program's environment."""
    secrets: Secrets = field(repr=False)
    """Values of `pass_env`, which the program might write."""
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class HttpServer:
    """URL that speaks streamable HTTP."""

    name: str
    url: str
    headers: dict[str, str] = field(repr=False)

    secrets: Secrets = field(repr=False)
    """Secrets in URL and headers that the server might echo."""
    proxy: str | None = field(default=None, repr=False)
    """URL of the proxy by which it is asked."""


MCPServer = StdioServer | HttpServer


def stdio_server(
    name: str, command: list[str], pass_env: list[str], env: dict[str, str] | None = None, cwd: str | None = None
) -> StdioServer:
    """Describe a program that sees a few variables, those of `pass_env` and `env`, and nothing else.

    The few are PATH, HOME, SHELL, TERM and the user's name. Raises ConfigError for a variable that is not set.
    """
    passed = {variable: from_environment(variable) for variable in pass_env}
    environment = {**get_default_environment(), **passed, **(env or {})}
    return StdioServer(name, tuple(command), environment, passed_secrets(pass_env), cwd)


def http_server(
    name: str, url: str, auth_env: str | None, headers: dict[str, str] | None = None, secrets: Iterable[str] = ()
) -> HttpServer:
    """Describe a server at a URL. `secrets`: those in URL and headers besides `Authorization`.

    Raises ConfigError: no URL, a user's name or password in it, or a variable that is not set.
    """
    try:
        checked_url(url, "http://HOST:PORT/PATH")
    except ValueError as error:
        raise ConfigError(f"url: {error}") from error
    sent = dict(headers or {})
    if auth_env is not None:
        sent["Authorization"] = f"Bearer {from_environment(auth_env)}"
    tokens = [text.rpartition(" ")[2] for header, text in sent.items() if header.lower() == "authorization"]
    return HttpServer(name, url, sent, Secrets([*tokens, *secrets]))


def read_servers_file(path: str, pass_env: list[str], only: list[str] | None) -> list[MCPServer]:
    """Read the servers of a JSON file {"mcpServers": {name: {command, args, env, cwd} or {url, headers}}}.

    `${NAME}` in texts is an environment variable. Servers marked `disabled` are left out, keys of other clients
    ignored. Raises ConfigError naming the file and the server.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"servers_file {path}: cannot be read as JSON: {error}") from error
    entries = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(entries, dict) or not entries:
        raise ConfigError(f'servers_file {path}: expected {{"mcpServers": {{name: {{...}}}}}}')
    if unknown := [name for name in only or [] if name not in entries]:
        raise ConfigError(f"servers: {path} has no server {unknown[0]!r}; it has {', '.join(entries)}")
    servers = []
    for name, entry in entries.items():
        if (only is not None and name not in only) or (isinstance(entry, dict) and entry.get("disabled") is True):
            continue
        try:
            servers.append(_server(name, entry, pass_env))
        except ConfigError as error:
            raise ConfigError(f"servers_file {path}: server {name!r}: {error}") from None
    return servers


def _server(name: str, entry: object, pass_env: list[str]) -> MCPServer:
    if not isinstance(entry, dict) or ("command" in entry) == ("url" in entry):
        raise ConfigError("expected a mapping with `command` (and `args`) or `url`")
    if "url" in entry:
        if entry.get("type") == "sse":
            raise ConfigError("the transport `sse` is not supported; streamable HTTP and stdio are")
        variables = _VARIABLE.findall(json.dumps([entry["url"], entry.get("headers")]))
        secrets = [from_environment(variable) for variable in variables]
        headers = dict(_texts("headers", entry.get("headers")) or {})
        if entry.get("auth_token"):  # as verl's files have it
            headers["Authorization"] = f"Bearer {_text('auth_token', entry['auth_token'])}"
        return http_server(name, _text("url", entry["url"]), None, headers, secrets)
    arguments = entry.get("args") or []
    if not isinstance(arguments, list):
        raise ConfigError(f"args: expected a list, found {arguments!r}")
    command = [_text("command", entry["command"]), *(_text("args", argument) for argument in arguments)]
    cwd = _text("cwd", entry["cwd"]) if entry.get("cwd") else None
    return stdio_server(name, command, pass_env, _texts("env", entry.get("env")), cwd)


def _texts(key: str, value: object) -> dict[str, str]:
    given = value or {}
    if not isinstance(given, dict):
        raise ConfigError(f"{key}: expected a mapping of texts")
    return {str(name): _text(f"{key}.{name}", text) for name, text in given.items()}


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{key}: expected a text, found {type(value).__name__}")
    return _VARIABLE.sub(lambda match: from_environment(match[1]), value)
