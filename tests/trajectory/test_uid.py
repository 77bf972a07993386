"""The form of a trajectory's name, as the page says it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.config.sections.offline import GenerateConfig
from agentrl.rollouts.contract import Task, responses, training, validation
from agentrl.trajectory import Trajectory, Transcript
from agentrl.trajectory.sample import Sample
from tests.naming import assert_names

PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
KEYS = ["actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.n=2"]
ROW = Sample([{"role": "user", "content": "?"}], "x", "single_turn", file="rows.parquet", row=9)


def tasks() -> dict[str, Task]:
    config = load_config(KEYS)
    remax = load_config([*KEYS, "algorithm.adv_estimator=remax"])
    offline = load_config([*KEYS, "data.path=a.parquet", "data.output_path=b.parquet"], "generate", GenerateConfig)
    return {
        "a training": training(config, 12),
        "its baseline": training(remax, 12),
        "a sampled validation": validation(config, 12, greedy=False),
        "a greedy one": validation(config, 12, greedy=True),
        "agentrl.generate": responses(offline, greedy=False),
    }


@pytest.mark.parametrize("kind", tasks())
def test_names_have_the_form_that_the_page_says(kind: str) -> None:
    (line,) = re.findall(r"^- \*\*`uid`\*\*.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    said = dict(re.findall(r"`([a-z0-9/]+)` \(([^)]+)\)", line))
    assert sorted(said.values()) == sorted(tasks()), line
    task = tasks()[kind]
    made = [task.origin(3, number, ROW) for number in range(task.each)]
    assert {name for name, of in said.items() if of == kind} <= {one.uid for one in made}
    assert len({one.uid for one in made}) == len({*made}) == task.each
    assert {(one.split, one.step, one.row) for one in made} == {(task.split, task.step, 9)}
    assert made[-1].greedy == (kind in ("its baseline", "a greedy one"))


def test_a_trajectory_is_shown_without_its_tokens() -> None:
    shown = repr(Trajectory("train/1/0/0", 0, "x/y", transcripts=[Transcript(ids=list(range(9999)))], score=0.5))
    assert_names(shown, "train/1/0/0", "x/y", "score 0.5")
    assert len(shown) < 120
