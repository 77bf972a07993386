"""A thousand clean steps of many arrangements: no check raises an alarm that a sound run must not."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from agentrl.checks.finding import MEANINGS
from benchmarks.training import clean_steps
from benchmarks.training.clean_steps import ARRANGEMENTS, STEPS, Assets, Outcome, measure
from tests.naming import assert_names

LONG = "long answers"
"""The arrangement that takes twice as long as any other."""


@pytest.fixture
def assets(policy_dir: Path, data_dir: Path, reward_file: Path) -> Assets:
    return Assets(policy_dir, data_dir, reward_file)


@pytest.mark.slice(1, "soak")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("arrangement", [name for name in ARRANGEMENTS if name != LONG])
def test_a_clean_run_raises_no_alarm(arrangement: str, assets: Assets, tmp_path: Path) -> None:
    assert_quiet(arrangement, assets, tmp_path)


@pytest.mark.slice(0, "soak")
@pytest.mark.timeout(600)
def test_a_clean_run_of_long_answers_raises_no_alarm(assets: Assets, tmp_path: Path) -> None:
    assert_quiet(LONG, assets, tmp_path)


def assert_quiet(arrangement: str, assets: Assets, folder: Path) -> None:
    found = measure(assets.words(ARRANGEMENTS[arrangement], STEPS), folder / "run")
    assert found.steps == STEPS and found.told("fault") == []
    assert {one["check"] for one in found.alarms} <= ({"gap"} if "ahead" in arrangement else set()), found.alarms
    compared = {"record", "mask", "coverage", "columns", "versions", "rewards", "advantages", "weights", "update"}
    assert min(found.evaluated.get(check, 0) for check in (*compared, "fates", "standstill")) >= STEPS
    assert ("weights" in arrangement) <= (found.evaluated["ess"] == STEPS)


def test_a_fault_and_a_check_that_never_compared_fail_the_soak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def status(evaluated: dict[str, int], alarms: list[dict[str, object]]) -> tuple[int, str]:
        outcome = Outcome(3, evaluated, alarms, 0.5)
        (tmp_path / "grpo.json").write_text(json.dumps(asdict(outcome)))
        return clean_steps.main(["--out", str(tmp_path), "--only", "grpo"]), capsys.readouterr().out

    everything = dict.fromkeys(MEANINGS, 3)
    sign: dict[str, object] = {"step": 2, "check": "gap", "severity": "sign", "what": "far"}
    fault = sign | {"severity": "fault"}
    assert status(everything, [sign])[0] == 0
    code, said = status(everything, [fault])
    assert code == 1 and "faults: grpo: step 2: gap: far" in said
    code, said = status(everything | {"tools": 0}, [])
    assert_names(said, "never compared", "tools", "`gap`")
    assert code == 1
