"""What is decided of servers before they are started or attached to."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from agentrl.engines.servers.start import Software, is_this_machine, reach
from agentrl.engines.sglang.build import SGLANG
from agentrl.engines.vllm.build import VLLM
from agentrl.errors import ConfigError
from agentrl.system.http import http_client


@pytest.mark.parametrize("name", [socket.gethostname(), "no-such-host.invalid"])
def test_which_urls_are_of_this_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also where the machine's own name is unknown, as it is in some containers."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert all(is_this_machine(f"http://{host}:30000") for host in ("127.0.0.1", "127.1.2.3", "localhost", "[::1]"))
    assert not any(
        is_this_machine(f"http://{host}:30000") for host in ("192.0.2.1", "no-such-host.invalid", "[2001:db8::1]")
    )


@pytest.mark.parametrize(
    ("software", "status", "remedy"),
    [
        (VLLM, 404, "VLLM_SERVER_DEV_MODE=1 .*--weight-transfer-config .*--enable-scale-out"),  # a plain `vllm serve`
        (SGLANG, 404, "--incremental-streaming-output"),
        (VLLM, 401, "server_api_key_env"),
        (SGLANG, 403, "server_api_key_env"),
    ],
)
async def test_a_refusing_fake_server_is_not_waited_for(software: Software, status: int, remedy: str) -> None:
    """A wrong key or another server ends the run at once with what to do, not after `server_start_timeout`."""

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    runner = web.AppRunner(app, shutdown_timeout=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with asyncio.timeout(60), http_client() as http:
            with pytest.raises(ConfigError, match=f"server_urls: {url}: .*status {status}.*{remedy}"):
                await reach(software.client(url, http, None), software.needs, 600.0)
    finally:
        await runner.cleanup()
