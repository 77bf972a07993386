"""Clusters that are not there."""

from __future__ import annotations

import socket

import pytest

from agentrl.errors import ConfigError
from agentrl.runtime.ray.session import start_ray

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "localhost:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:99999"]
)
def test_an_address_where_nobody_listens_is_told_at_once(address: str) -> None:
    """Ray itself goes on trying for minutes."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens
        at = address.format(port=closed.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"ray_init\.address={at}: nobody listens there"):
            start_ray(at, None)
    assert not ray.is_initialized()


def test_a_cluster_that_asks_for_a_token_is_told_so_fault_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        text = (
            "Failed to connect to GCS. Traceback:\n  File x\nInvalidAuthToken: RAY_AUTH_MODE is currently 'disabled'\n"
        )
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(text)

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"ray_init\.address=auto: Failed to connect .*: InvalidAuthToken: RAY_AUTH"):
        start_ray("auto", None)
