"""Where the store listens that servers and the trainer meet at for a broadcast of weights."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from agentrl.engines.servers.sync.distributed import _Group, address_towards, listener
from agentrl.engines.sglang.client import SGLangClient


def listening() -> set[tuple[str, int]]:
    """Addresses at which this process listens."""
    connections = psutil.Process(os.getpid()).net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


def server(url: str) -> SGLangClient:
    return SGLangClient(url, None)  # type: ignore[arg-type]  # no request is sent


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[_Group]:
    urls = request.param
    made = _Group([server(url) for url in urls], [(url, 1) for url in urls], "gloo", 10.0)
    yield made
    made.abort()


@pytest.mark.parametrize("group", [["http://127.0.0.1:30000", "http://localhost:30001"]], indirect=True)
def test_the_store_of_servers_of_this_machine_is_on_loopback_only(group: _Group) -> None:
    assert {address for address, port in listening() if port == group._port} == {"127.0.0.1"}
    invitation = group.invitation(server("http://localhost:30001"))
    assert (invitation.address, invitation.port) == ("127.0.0.1", group._port)
    joined = TCPStore(invitation.address, invitation.port, 3, is_master=False, timeout=timedelta(seconds=5))
    joined.set("key", "value")
    assert group._store is not None and group._store.get("key") == b"value"


@pytest.mark.parametrize(
    ("seen", "chosen"),
    [
        (["127.0.0.1"], "127.0.0.1"),
        (["::1"], "::1"),
        (["OWN"], "OWN"),
        (["127.0.0.1", "OWN", "OWN"], "OWN"),
        (["OWN", "192.0.2.7"], "0.0.0.0"),  # only where servers see this machine under two addresses
        (["2001:db8::1", "192.0.2.7"], "::"),
    ],
)
def test_it_listens_at_no_more_than_servers_have_to_reach(seen: list[str], chosen: str) -> None:
    own = address_towards("http://198.51.100.1:80")  # of the interface that leads out
    with listener([own if name == "OWN" else name for name in seen]) as listening:
        assert listening.getsockname()[0] == (own if chosen == "OWN" else chosen)
        assert listening.family == (socket.AF_INET6 if ":" in chosen else socket.AF_INET)
