"""The arena: every contender is a training that can be asked for, the errand can be walked, and one match is run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.config import load_config
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from agentrl.quickstart.tiny_policy import make_tiny_policy
from data_prep.files import write_parquet
from examples.gigpo import walk
from labs.arena import credit
from labs.arena.contenders import CONTENDERS, ESTIMATOR, LOSS, Contender
from labs.arena.page import document, table
from labs.arena.runs import TASKS, Match, Result, finish, keys


def test_every_estimator_and_loss_contends() -> None:
    chosen = {key: {one.keys[key] for one in CONTENDERS if key in one.keys} for key in (ESTIMATOR, LOSS)}
    same = {"tir_optimal_token_baseline"}  # verl's name of optimal_token_baseline
    assert chosen == {ESTIMATOR: set(ADVANTAGE_ESTIMATORS.names()) - same, LOSS: set(POLICY_LOSSES.names())}


@pytest.mark.slice(8, "matrix")
@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda one: f"{one.ray} {one.name}")
def test_every_contender_is_a_valid_config(contender: Contender, tmp_path: Path) -> None:
    (place := tmp_path / "walk-1" / "assets").mkdir(parents=True)
    (place / "interactions.yaml").write_text(walk.INTERACTION.format(steps=walk.STEPS))
    for task in TASKS:
        match = Match(task, contender, 1, 20)
        load_config([f"{key}={json.dumps(value)}" for key, value in keys(match, tmp_path).items()])


def test_a_walk_without_strays_ends_at_its_goal_by_the_shortest_way() -> None:
    for start, goal in (next(walk.errands(str(seed))) for seed in range(20)):
        said: Any = walk.conversation(start, goal, 0.0, random.Random(1))["messages"]
        moves = [message["content"] for message in said if message["role"] == "assistant"]
        assert len(moves) == abs(start[0] - goal[0]) + abs(start[1] - goal[1])
        world = walk.Walk()
        first, _ = world.reset(seed=None, options={"start": list(start), "goal": list(goal)})
        assert said[0]["content"] == f"{walk.question(goal)}\n\n{first}"
        rewards = [world.step(walk.move_of(move, world))[1:3] for move in moves]
        assert rewards == [(0.0, False)] * (len(moves) - 1) + [(1.0, True)]


def test_what_is_no_move_is_told() -> None:
    with pytest.raises(ValueError, match="say left, right, up, down"):
        walk.move_of("north", walk.Walk())


def test_several_seeds_are_told_by_their_mean_and_range(tmp_path: Path) -> None:
    grpo = CONTENDERS[0]
    matches = [Match("walk", grpo, seed, 1) for seed in (1, 2, 3)]
    for match, after in zip(matches[:2], (0.5, 0.9), strict=True):
        folder = match.folder(tmp_path)
        folder.mkdir(parents=True)
        lines: list[dict[str, float]] = [
            {"step": 0, "val/success_sampled": 0.1},
            {"step": 1, "val/success_sampled": after, "success/rate": 0.3},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "done.json").write_text('{"cpu_seconds": 10}')
    assert table(matches[:1], tmp_path)[-1] == "| `grpo` | 10.0% | 50.0% | 30.0% | never | 10 |"
    row = "| `grpo` | 10.0% (10.0% to 10.0%) | 70.0% (50.0% to 90.0%) | 30.0% (30.0% to 30.0%) | 1 of 2 | 10 |"
    assert table(matches, tmp_path)[-1] == row, "and a seed that is not finished does not count"


def test_what_a_move_was_worth_is_the_change_of_the_probability_to_arrive() -> None:
    """Against the share of many walks that arrive, and with nothing left to walk no move is worth anything."""
    torch.manual_seed(1)
    table, goal = credit.beginning(1.0, 1), torch.tensor([4, 2])
    added = credit.worth(table, goal, 10)
    assert not added[0].any()
    reach = torch.arange(walk.SIDE)
    chosen = table[credit.row_of(torch.cartesian_prod(reach, reach), goal)].softmax(-1)
    assert (chosen * added).sum(-1).abs().max() < 1e-6
    beside = 3 * walk.SIDE + 2
    assert added[1, beside, 1] == pytest.approx(float(1 - chosen[beside, 1]), abs=1e-6), "the last step to the goal"
    walks = credit.walk(table, "walks", 10)
    assert walks.columns.rewards.sum() == walks.success.sum() and 0 < walks.success.float().mean() < 1
    assert ((walks.place + credit.STEP[walks.move]).clamp(0, 4) == walks.goal).all(-1).sum() == walks.success.sum()


def test_what_a_critic_explains_stands_in_the_table(tmp_path: Path) -> None:
    """Where some contender of a ray has a critic; the mean of the last half of its steps."""
    chosen = [one for one in CONTENDERS if one.name in ("gae", "grpo", "cispo")]
    matches = [Match("walk", one, 1, 4) for one in chosen]
    for match in matches:
        folder = match.folder(tmp_path)
        folder.mkdir(parents=True)
        (folder / "done.json").write_text('{"cpu_seconds": 7}')
        steps: list[dict[str, float]] = [{"step": 0, "val/success_sampled": 0.25}]
        for step, explained in enumerate((-1.0, 0.0, 0.25, 0.75), 1):
            own = {"critic/explained_variance": explained} if match.contender.name == "gae" else {}
            steps.append({"step": step, "success/rate": 0.5, **own})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    lines = table(matches, tmp_path)
    assert lines[0].endswith("| CPU-s | explained variance |") and lines[1].count("|---") == 7
    assert "| `gae` | 25.0% | 25.0% | 50.0% | never | 7 | 0.50 |" in lines
    assert "| `grpo` | 25.0% | 25.0% | 50.0% | never | 7 |  |" in lines
    assert "| `cispo` | 25.0% | 25.0% | 50.0% | never | 7 |" in lines, "no column where no contender has a critic"


@pytest.mark.slice(0, "long run")
def test_a_match_is_run_once_and_documented(tmp_path: Path) -> None:
    place = tmp_path / "walk-1" / "assets"
    make_tiny_policy(place / "policy", 1)
    (place / "interactions.yaml").write_text(walk.INTERACTION.format(steps=walk.STEPS))
    drawn = walk.errands("rows")
    for split, count in (("train", 32), ("val", 2)):
        write_parquet(place / f"{split}.parquet", [walk.row(*next(drawn), index) for index in range(count)])
    matches = [Match("walk", one, 1, 1) for one in CONTENDERS if one.name in ("gigpo", "cispo")]
    assert finish(matches, tmp_path, 2) == [], [file.read_text()[-2000:] for file in tmp_path.rglob("*.log")]
    results = [Result.from_folder(match, tmp_path) for match in matches]
    assert [[seen for seen, _ in one.success] for one in results if one] == [[0, 256], [0, 256]]
    stamps = [file.stat().st_mtime_ns for file in tmp_path.rglob("done.json")]
    assert finish(matches, tmp_path, 2) == []
    assert [file.stat().st_mtime_ns for file in tmp_path.rglob("done.json")] == stamps
    docs = tmp_path / "docs"
    (docs / "images").mkdir(parents=True)
    (docs / "algorithms.md").write_text("before\n<!-- arena -->\nold\n<!-- end of arena -->\nafter\n")
    document(matches, tmp_path, docs)
    page = (docs / "algorithms.md").read_text()
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert "| estimator | walk: before" in page and "| `gigpo` | 0.0% | 0.0% |" in page
    assert (docs / "images" / "arena.png").read_bytes().startswith(b"\x89PNG")
