"""What is counted of trainings that are killed: turns that were sampled again, and processes that stay."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from labs.deaths import trainer_deaths
from labs.deaths.ended_turns import LEFT_ALONE, EndedTurn
from labs.deaths.trainer_deaths import AGENT, Remains, sampled_again


def test_turns_of_workers_that_outlive_their_driver_do_not_count() -> None:
    first = EndedTurn(0, 8.0, "a", "x")
    late = EndedTurn(0, 11.0, "a", "y")  # the driver was killed at 10
    ended = [first, late, EndedTurn(1, 20.0, "a", "y"), EndedTurn(1, 21.0, "b", "x")]
    assert sampled_again(ended, [10.0, 30.0]) == (0, 3, 0.0)
    assert sampled_again([*ended, EndedTurn(1, 22.0, "a", "x")], [10.0, 30.0]) == (1, 3, 2.0)
    assert sampled_again([replace(first, kill=LEFT_ALONE), *ended[2:], first], [10.0, 30.0]) == (1, 3, 0.0)


def test_processes_that_stay_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(trainer_deaths, "OUTLIVED", 0.5)
    stays, ends = (subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2))
    try:
        remains = Remains()
        remains.watch([psutil.Process(stays.pid)], time.time(), "first")
        remains.watch([psutil.Process(ends.pid)], time.time(), "second")
        ends.kill()  # a zombie from now on
        remains.join()
    finally:
        for process in (stays, ends):
            process.kill()
            process.communicate()
    assert [one.split()[0] for one in remains.outlived] == [str(stays.pid)]
    said = sorted(capsys.readouterr().out.splitlines())
    assert said[0] == "first: 1 processes are left" and said[1].startswith("second: the last of 1 processes was gone")


def test_what_attached_servers_keep_is_waited_for_when_they_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_deaths, "OUTLIVED", 0.5)
    command = ["torch_shm_manager", "-c", "input()"]
    kept = subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE)
    remains = Remains()
    try:
        remains.watch([psutil.Process(kept.pid)], time.time(), "first")
        remains.join()
        assert remains.outlived == [f"{kept.pid} torch_shm_manager"], "its servers are gone, and it is not"
        remains.outlived.clear()
    finally:
        kept.kill()
        kept.communicate()
    remains.join()
    assert not remains.outlived


@pytest.mark.parametrize(
    ("line", "is_agent"),
    [
        ("ray::DashboardAgent", True),
        ("/venv/bin/python -u /venv/ray/_private/runtime_env/agent/main.py --node-id=1", True),
        ("/venv/bin/python -u /venv/ray/dashboard/agent.py --node-id=1", True),
        ("/venv/ray/raylet --agent=/venv/bin/python -u /venv/ray/dashboard/agent.py --node-id=1", False),
        ("ray::RolloutWorker", False),
    ],
)
def test_agents_of_ray_are_told_from_what_trains(line: str, is_agent: bool) -> None:
    assert bool(AGENT.search(line)) == is_agent
