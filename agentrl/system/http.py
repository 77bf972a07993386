"""HTTP connections that hold a thousand requests in flight.

By aiohttp: at 1,000 requests in flight httpx with its own transport serves 84 requests a second where aiohttp's
connections serve 2,000. See docs/decisions/043-http-by-aiohttp.md.
"""

from __future__ import annotations

import resource

import aiohttp

KEEP_ALIVE = 3.0
"""Seconds that an idle connection is kept: less than servers keep theirs (uvicorn: 5), so that the client closes first.
"""


def http_client(*, proxy: str | None = None) -> aiohttp.ClientSession:
    """Create a client with kept-alive connections, no cap on their number and no deadline on an answer.

    Needs a running event loop. Deadlines are the caller's. Proxies but `proxy`, credentials and cookies are not used.
    Must be closed.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        proxy=proxy,
    )


def allow_many_files() -> None:
    """Raise this process's limit of open files to the system's maximum: each request in flight is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
