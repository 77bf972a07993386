"""From logged conversations to rows, two steps of training with recorded answers, and agreement on held-out logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.evaluate import main as evaluate
from agentrl.generate import main as generate
from agentrl.sft import main as sft
from agentrl.train import main as train
from data_prep.log_rows import main as log_rows
from tests.data_prep.test_log_rows import WEATHER, asks, calls, file, row, says
from tests.e2e.test_train import lines

CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Paris")
LENGTHS = ("data.max_prompt_length=300", "data.max_response_length=64")


def conversation(number: int, *, good: bool) -> dict[str, Any]:
    city = CITIES[number % len(CITIES)]
    answer = f"It is {number} degrees." if good else "I cannot tell."
    messages = (asks(f"Weather in {city}, {number}?"), *calls(city, f"{number} degrees"), says(answer))
    return row(*messages, tools=[WEATHER], session=str(number), feedback=1.0 if good else -1.0)


def held_out(folder: Path, policy: Path, name: str) -> dict[str, Any]:
    """The numbers of a policy's answers to the held-out prompts."""
    out = folder / f"{name}.parquet"
    tools = f"rollout.multi_turn.tool_config_path={folder}/rl/tools.yaml"
    keys = [f"data.path={folder}/rl/held_out.parquet", f"data.output_path={out}", f"model.path={policy}", tools]
    assert generate([*keys, *LENGTHS, "rollout.n=2", "data.output_trajectories=true"]) == 0
    assert evaluate([f"data.path={out}", f"data.output_path={folder}/{name}.json"]) == 0
    numbers: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["all"]
    return numbers


@pytest.mark.timeout(300)
def test_two_steps_on_logs(policy_dir: Path, tmp_path: Path) -> None:
    logs = [conversation(n, good=True) for n in range(20)] + [conversation(n, good=False) for n in range(10)]
    source = file(tmp_path, *logs)
    other = file(tmp_path, *(conversation(n, good=True) for n in range(20, 24)), name="held_out.parquet")
    assert log_rows(["--source", str(source), "--held-out", str(other), "--out", f"{tmp_path}/rl"]) == 0
    warm = [f"data.train_files={source}", "data.feedback=filter", f"model.path={policy_dir}", "data.max_length=300"]
    warm += ["data.train_batch_size=5", "trainer.total_epochs=20", "optim.lr=1e-2"]
    assert sft([*warm, f"trainer.default_local_dir={tmp_path}/warm"]) == 0
    before = held_out(tmp_path, tmp_path / "warm" / "policy", "before")
    keys = [
        f"data.train_files={tmp_path}/rl/train.parquet",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/rl/tools.yaml",
        f"actor_rollout_ref.model.path={tmp_path}/warm/policy",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "trainer.total_training_steps=2",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert train([*keys, *LENGTHS]) == 0
    steps = lines(tmp_path / "run")
    assert len(steps) == 2
    for step in steps:
        assert step["reward/min"] < step["reward/max"] and step["train/sequences"] > 0
        assert step["tool/weather/calls"] > 0 and 0 <= step["tool/weather/not_recorded"] < 1
        assert step["left_out/failed"] == 0
    after = held_out(tmp_path, tmp_path / "run" / "policy", "after")
    for numbers in (before, after):
        assert (numbers["rows"], numbers["failures"]) == (4, 0)
        assert set(numbers["extra"]) == {"liked", "disliked", "liked_f1", "disliked_f1"}
        assert 0 < numbers["extra"]["liked_f1"] <= 1
