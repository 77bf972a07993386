"""What is decided of servers before they are started or attached to."""

from __future__ import annotations

import socket

import pytest

from agentrl.engines.servers.start import is_this_machine


@pytest.mark.parametrize("name", [socket.gethostname(), "no-such-host.invalid"])
def test_which_urls_are_of_this_machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also where the machine's own name is unknown, as it is in some containers."""
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert all(is_this_machine(f"http://{host}:30000") for host in ("127.0.0.1", "127.1.2.3", "localhost", "[::1]"))
    assert not any(
        is_this_machine(f"http://{host}:30000") for host in ("192.0.2.1", "no-such-host.invalid", "[2001:db8::1]")
    )
