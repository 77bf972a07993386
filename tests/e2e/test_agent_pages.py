"""docs/agents: each page's commands train its agent, with its real client in an environment of its own."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks.packages import install
from tests.e2e.test_docs import SMALL, blocks, commands, write_files
from tests.e2e.test_train import lines
from tests.openai_api.test_sdks import PAGES, packages_of
from tests.wheel import Run


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_the_page_trains_its_agent(
    run_wheel: Run,
    policy_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    page: str,
) -> None:
    document = f"docs/agents/{page}.md"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # as where a venv is active
    assert "my_rows.py" in write_files(document, tmp_path)
    for text in blocks(document, "sh"):
        (tmp_path / "my_agent.sh").write_text(text)
    *environment, rows, train = (shlex.split(line) for line in commands(document))
    if packages := packages_of(page):
        assert [line[:3] for line in environment] == [
            ["python", "-m", "venv"],
            ["agent-env/bin/pip", "install", packages[0]],
        ]
        python = tmp_path / "agent-env" / "bin" / "python"
        python.parent.mkdir(parents=True)
        folder = install(packages, pytestconfig.cache.mkdir("clients"))
        python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
        python.chmod(0o755)
    run_wheel(rows[1:], tmp_path)
    words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in train[1:]]
    more = [
        *SMALL,
        "data.train_batch_size=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        "algorithm.filter_groups.enable=false",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    run_wheel([*words, *more], tmp_path)
    metrics = lines(tmp_path / "run")[-1]
    assert metrics["left_out/failed"] == 0 and metrics["trajectory/openai_calls"] >= 1
    assert metrics.get("trajectory/openai_bad_requests", 0) == 0
