"""Many trajectories whose server fails, hangs and is killed: the benchmark, at a size for every run of the tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.quickstart.tiny_policy import make_tiny_policy
from benchmarks.tools.faulty_tools import build, run, serving


@pytest.mark.timeout(170)
def test_no_trajectory_is_lost_none_has_a_false_zero_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.tools.faulty_tools.ATTEMPT", 3.0)  # less to wait for than with 2,000 at once
    monkeypatch.setattr("benchmarks.tools.faulty_tools.TIMEOUT", 12.0)
    chat = Chat.from_pretrained(str(make_tiny_policy(tmp_path, seed=1)))
    with serving(failing=0.05, hanging=0.01) as server:
        found = asyncio.run(run(build(chat, server.url), 100, server, kill=True))
    assert {name: found[name] for name in ("trajectories", "lost", "false_score")} == {
        "trajectories": 100,
        "lost": 0,
        "false_score": 0,
    }
    assert [found[name] for name in ("tasks_left", "files_left", "sessions_left")] == [0, 0, 0]
    assert found["request_retries"] > 0
