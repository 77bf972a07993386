"""Answers of a user's engine that nothing may be learnt from: named with the engine, and not trained on unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.train import main
from tests.naming import Names, assert_names
from tests.runs import Overrides

ENGINE = """
from dataclasses import replace
from agentrl.engines.embedded.build import build as embedded
from agentrl.engines.embedded.engine import EmbeddedEngine


def build(setting, loop):
    engine = embedded(setting, loop)
    generate = engine.generate

    async def changed(*given, **more):
        found = await generate(*given, **more)
        return WRONG

    engine.generate = changed
    return engine
"""


def run_with(wrong: str, small_run: Overrides, tmp_path: Path, *more: str) -> int:
    (tmp_path / "my_engine.py").write_text(ENGINE.replace("WRONG", wrong))
    name = f"actor_rollout_ref.rollout.name={tmp_path}/my_engine.py:build"
    short = ["trainer.total_training_steps=1", "trainer.val_before_train=false", "data.val_files=null"]
    return main(small_run(name, *short, *more))


@pytest.mark.parametrize("proximal", ["recomputed", "rollout"])
def test_log_probs_of_0_are_an_alarm_whatever_the_bounds_of_the_gap(
    small_run: Overrides, tmp_path: Path, proximal: str
) -> None:
    wide = ["trainer.checks.gap=100", "algorithm.rollout_correction.gap_alarm=null"]
    correction = f"algorithm.rollout_correction.proximal={proximal}"
    assert run_with("replace(found, logprobs=[0.0] * len(found.ids))", small_run, tmp_path, correction, *wide) == 0
    alarms = [json.loads(line) for line in (tmp_path / "run" / "alarms.jsonl").read_text().splitlines()]
    (gap,) = [one for one in alarms if one["check"] == "gap"]
    assert gap["severity"] == "sign" and "as if each had been certain" in gap["what"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "replace(found, logprobs=None)",
            ("Generation", "log-prob", "found None"),
        ),
        ("replace(found, logprobs=[None] * len(found.ids))", ("Generation", "found None")),
        (
            "replace(found, versions=0)",
            ("Generation", "found 0"),
        ),
        ("replace(found, ids=tuple(found.ids))", ("ids", "Generation", "found (")),
        ("found.ids", ("agentrl.engines.contract.Generation", "found [")),
    ],
)
def test_an_answer_of_another_form_names_the_engine_and_what_was_expected(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str, said: Names
) -> None:
    assert run_with(wrong, small_run, tmp_path) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: rollout engine EmbeddedEngine (my_engine.build.<locals>.changed): ")
    assert_names(message, said, f"{tmp_path}/my_engine.py")
    assert "agent loop" not in message
