"""Clusters that are not there."""

from __future__ import annotations

import socket

import pytest

from agentrl.config.sections.trainer import RayInitConfig
from agentrl.errors import ConfigError
from agentrl.runtime.ray.session import ray_session, start_ray
from tests.naming import naming

ray = pytest.importorskip("ray")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:{port}", "localhost:{port}", "ray://127.0.0.1:{port}", "127.0.0.1:99999"]
)
def test_an_address_where_nobody_listens_is_told_at_once(address: str) -> None:
    """Ray itself goes on trying for minutes."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else has the port, and nobody listens
        at = address.format(port=closed.getsockname()[1])
        with naming(ConfigError, f"ray_init.address={at}"):
            start_ray(at, None)
    assert not ray.is_initialized()


def test_a_cluster_that_asks_for_a_token_is_told_so_fault_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: object) -> None:
        text = (
            "Failed to connect to GCS. Traceback:\n  File x\nInvalidAuthToken: RAY_AUTH_MODE is currently 'disabled'\n"
        )
        raise ConnectionError("Failed to connect to Ray cluster") from RuntimeError(text)

    monkeypatch.setattr(ray, "init", refuse)
    with naming(ConfigError, "ray_init.address=auto", "InvalidAuthToken", "RAY_AUTH_MODE"):
        start_ray("auto", None)


def test_a_node_that_does_not_start_is_told_in_words_fault_injected(monkeypatch: pytest.MonkeyPatch) -> None:
    def times_out(*args: object, **kwargs: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr("ray.init", times_out)
    with naming(ConfigError, "timed out", "ray_init.num_cpus"):
        start_ray(None, 1)


def test_the_dashboard_and_the_variables_of_processes_reach_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr("ray.init", lambda **kwargs: given.update(kwargs))
    config = RayInitConfig.model_validate({"include_dashboard": True, "runtime_env": {"env_vars": {"A": "1"}}})
    with ray_session(config, 2):
        pass
    assert (given["include_dashboard"], given["runtime_env"]) == (True, {"env_vars": {"A": "1"}})
