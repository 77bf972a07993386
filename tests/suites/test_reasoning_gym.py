"""Reasoning Gym's tasks and scores are the package's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.suites import reasoning_gym
from agentrl.suites.contract import Request
from tests.naming import naming
from tests.tiers import takes_all


@pytest.fixture(scope="module")
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package: installed, in the folder that AGENTRL_REASONING_GYM names, or fetched where all tests run."""
    if not takes_all(request.config):
        pytest.skip("reasoning-gym is fetched where all tests run: make test-all")
    folder = os.environ.get("AGENTRL_REASONING_GYM")
    if folder is None:
        folder = str(tmp_path_factory.mktemp("packages"))
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, "reasoning-gym==0.1.25"]
        assert subprocess.run(words).returncode == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, folder])  # behind all that is installed
        yield reasoning_gym.package()


def test_right_answers_score_1_and_wrong_ones_what_the_package_says(package: Any, tmp_path: Path) -> None:
    tasks = reasoning_gym.tasks(Request(limit=3))
    assert len(tasks.rows) == 3 * len(reasoning_gym.DEFAULT) and tasks.version == "reasoning-gym 0.1.25, seed 42"
    assert tasks.rows == reasoning_gym.tasks(Request(limit=3)).rows
    scores = set()
    for row in tasks.rows:
        own = package.create_dataset(row.part, size=3, seed=42)
        entry = own[int(row.id)]
        assert str(row.question).startswith(entry["question"])
        assert reasoning_gym.compute_score(f"So <answer>{entry['answer']}</answer>.", row.ground_truth) == 1.0
        for wrong in ("nonsense", f"perhaps {entry['answer']}", ""):
            score = reasoning_gym.compute_score(f"<answer>{wrong}</answer>", row.ground_truth)
            assert score == own.score_answer(wrong, entry)
            scores.add(score)
        assert reasoning_gym.compute_score(entry["answer"], row.ground_truth) == own.score_answer(None, entry)
    assert len(scores) > 2, "some wrong answers are paid in part"


def test_tasks_whose_scorers_run_answers_are_refused(package: Any) -> None:
    with naming(ConfigError, "reasoning-gym", "Python", "countdown"):
        reasoning_gym.tasks(Request(("gcd", "countdown")))
    with naming(ConfigError, "'chain_sums'", "'chain_sum'", "unknown"):
        reasoning_gym.tasks(Request(("chain_sums",)))


def test_no_other_scorer_runs_answers(package: Any) -> None:
    """Of the tasks that are taken by default: an answer that is a program changes nothing, and scores as a text."""
    for row in reasoning_gym.tasks(Request(limit=1)).rows:
        with pytest.MonkeyPatch.context() as patch:
            text = "__import__('os').environ.__setitem__('RAN', '1')"
            reasoning_gym.compute_score(f"<answer>{text}</answer>", row.ground_truth)
            assert "RAN" not in os.environ
            patch.delenv("RAN", raising=False)


MAKE = """
import json, sys
sys.path.append(sys.argv[1])
from agentrl.suites import reasoning_gym as suite
from agentrl.suites.contract import Request
parts = [one for one in suite.package().factory.DATASETS if one not in suite.REFUSED and one != "composite"]
rows = suite.tasks(Request(tuple(sorted(parts)), limit=1)).rows
print("\\n" + json.dumps([row.ground_truth for row in rows]))  # A package may have left a line open.
"""


@pytest.mark.timeout(600)
def test_every_process_makes_the_same_tasks(package: Any) -> None:
    folder = str(Path(package.__file__).parents[1])
    made = [
        subprocess.run(
            [sys.executable, "-c", MAKE, folder],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for seed in ("1", "2")
    ]
    assert made[0] == made[1] and len(json.loads(made[0])) > 80
