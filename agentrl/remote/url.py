"""Validation of every URL that a file gives."""

from __future__ import annotations

import socket
from urllib.parse import SplitResult, urlsplit

from agentrl.system.addresses import is_loopback


def checked_url(url: str, expected: str = "http://HOST:PORT") -> SplitResult:
    """Split a URL. Raises ValueError for a URL that no request can be sent to, and for credentials, as messages would
    show them.

    `expected` says in messages how such a URL is written.
    """
    try:
        parts = urlsplit(url)
        can_be_sent = parts.scheme in ("http", "https") and parts.port != 0 and parts.hostname is not None
        name = (parts.hostname or "").encode("idna")
    except ValueError:  # an invalid port, brackets around no address, a name that is no host's
        can_be_sent, name = False, b""
    if "@" in url.split("://", 1)[-1].split("/", 1)[0]:
        raise ValueError("credentials do not belong in a URL")
    if not can_be_sent or not name or any(character.isspace() or character == "\\" for character in parts.netloc):
        raise ValueError(f"expected {expected}, found {url!r}")
    return parts


def how_to_start(command: str, url: str) -> str:
    """Describe how to start a server of ours where nobody answers at its `url`, and on which machine.

    A server on loopback is missing on this machine, which need not be the user's own.
    """
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    if is_loopback(host):
        here = f"on this machine, {socket.gethostname()}: `{command} --port {port}`"
        return f"start one {here}, or give the address of one on another machine"
    return f"start one there: `{command} --host {host} --port {port}`"
