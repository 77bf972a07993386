"""Machines of a cluster that are there, are gone, or do not answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.rollouts.local import engine_folder

ray = pytest.importorskip("ray")


def node(port: int, *, alive: bool = True) -> dict[str, object]:
    return {"NodeID": "n", "Alive": alive, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": port}


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def test_a_machine_that_does_not_answer_is_waited_for_until_ray_knows_whether_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, nobody: int
) -> None:
    from agentrl.runtime.ray.network import is_gone

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    told = iter([[node(nobody)], [node(nobody)], [node(nobody, alive=False)]])
    monkeypatch.setattr(ray, "nodes", lambda: next(told))
    assert is_gone("n")
    assert next(told, None) is None, "it asked until Ray knew"


def test_a_machine_that_answers_is_there_and_one_that_ray_does_not_know_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentrl.runtime.ray.network import is_gone

    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(ray, "nodes", lambda: [node(listening.getsockname()[1])])
        assert not is_gone("n")
        assert is_gone("another")


def test_engines_of_several_workers_have_folders_of_their_own() -> None:
    run = Path("run")
    assert engine_folder(run, (1, 1)) == run
    assert len({engine_folder(run, (number, 2)) for number in (1, 2)} | {run}) == 3
