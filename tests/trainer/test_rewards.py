"""What a trajectory is trained on as a whole: the same in the batch, in the files of trajectories, in the metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.estimate import add_rewards
from agentrl.errors import DataError
from agentrl.observe.metrics import step_metrics
from agentrl.trainer.model_scores import with_model_score
from agentrl.trajectory import COUNTED, Status, Trajectory
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.parquet import fill_rewards, read_trajectories, write_trajectories
from tests.trajectory.written import Writer

NUMBERS = st.floats(-4, 4, allow_nan=False).map(lambda number: round(number, 3))
TURNS = st.lists(st.tuples(st.sampled_from(["", "a", "abc"]), st.none() | NUMBERS), max_size=4)
ENDINGS = st.sampled_from([Status.COMPLETED, Status.LENGTH, Status.FAILED, Status.TIMEOUT])


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    """With turn rewards, some of which the score counts; some fail, and some have no policy token."""
    made = []
    for number in range(draw(st.integers(1, 4))):
        writer = Writer("p", uid=f"u{number}", group=number // 2)
        for text, reward in draw(TURNS):
            writer.says(text, reward=reward).hears("b")
        status = draw(ENDINGS)
        has_score = status in (Status.COMPLETED, Status.LENGTH)
        trajectory = writer.ends(draw(NUMBERS) if has_score else None, status)
        if draw(st.booleans()):
            trajectory.score_extra[COUNTED] = sum(trajectory.turn_rewards)
        made.append(trajectory)
    return made


@settings(max_examples=25, deadline=None)
@given(trajectories(), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.none() | st.lists(NUMBERS, min_size=4, max_size=4))
def test_batch_file_and_metrics_agree(made: list[Trajectory], coef: float, model: list[float] | None) -> None:
    outlines = [one.outline() for one in made]
    batch = from_trajectories(made, turn_reward_coef=coef)
    if model is not None:
        outlines = [replace(one, model_reward=by_model) for one, by_model in zip(outlines, model, strict=False)]
        batch = batch.with_fields(
            rewards=add_rewards(batch, torch.tensor([model[number] for number in batch.trajectory]))
        )
    trained: dict[int, float] = {}
    for owner, start, end in zip(batch.trajectory.tolist(), batch.offsets[:-1], batch.offsets[1:], strict=True):
        trained[owner] = trained.get(owner, 0.0) + float(batch.rewards[start:end].double().sum())

    with TemporaryDirectory() as folder:
        kept = None if model is not None else coef
        path = write_trajectories(Path(folder), made, step=1, split="train", turn_reward_coef=kept)
        if model is not None:
            assert pq.read_table(path)["reward"].null_count == len(made), "nobody can know it yet"
            fill_rewards(path, outlines, coef)
        written = pq.read_table(path).to_pylist()
    for number, (row, outline) in enumerate(zip(written, outlines, strict=True)):
        assert (row["reward"] is None) == (number not in trained)
        if row["reward"] is not None:
            assert row["reward"] == outline.reward(coef) == pytest.approx(trained[number], abs=1e-5)
            assert row["model_reward"] == (None if model is None else model[number])
            turns = sum(row["turn_rewards"]) - dict(row["score_extra"]).get(COUNTED, 0.0)
            assert row["reward"] == pytest.approx(row["score"] + coef * turns + (row["model_reward"] or 0.0))
    metrics = step_metrics(outlines, turn_reward_coef=coef, success_threshold=1.0)
    if trained:
        assert metrics["reward/mean"] == pytest.approx(sum(trained.values()) / len(trained), abs=1e-5)
        assert metrics["reward/max"] == pytest.approx(max(trained.values()), abs=1e-5)


def test_what_the_score_counts_already_lies_on_its_turns_and_is_paid_once() -> None:
    made = Writer("p").says("ab", reward=0.25).hears("c").says("d", reward=0.5).ends(1.0)
    made.score_extra[COUNTED] = 0.75
    for coef, expected in ((1.0, [0, 0, 0.25, 0, 0.75]), (0.0, [0, 0, 0, 0, 1.0]), (0.4, [0, 0, 0.1, 0, 0.9])):
        batch = from_trajectories([made], turn_reward_coef=coef)
        assert batch.rewards.tolist() == pytest.approx(expected)
        assert made.outline().reward(coef) == 1.0


def test_rewards_are_filled_in_without_touching_anything_else(tmp_path: Path) -> None:
    made = [Writer("p", uid=uid).says("a", reward=0.5).ends(1.0) for uid in "ab"]
    path = write_trajectories(tmp_path, made, step=1, split="train", turn_reward_coef=None)
    before = pq.read_table(path)
    outlines = [replace(one.outline(), model_reward=by_model) for one, by_model in zip(made, (2.0, 0.0), strict=True)]
    fill_rewards(path, outlines, 0.5)
    after = pq.read_table(path)
    assert after["reward"].to_pylist() == [3.25, 1.25]
    assert after["model_reward"].to_pylist() == [2.0, 0.0]
    assert after.schema == before.schema
    rest = [
        name for name in before.column_names if "reward" not in name or name == "turn_rewards"
    ]  # the status as well
    assert after.select(rest) == before.select(rest)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(DataError, match=r"train_000001\.parquet.*other trajectories"):
        fill_rewards(path, outlines[::-1], 0.5)


def test_a_trajectory_that_the_reward_model_fails_is_failed_in_its_file(tmp_path: Path) -> None:
    made = [Writer("p", uid=uid).says("a").ends(1.0) for uid in "ab"]
    path = write_trajectories(tmp_path, made, step=1, split="train", turn_reward_coef=None)
    outlines = [
        with_model_score(one.outline(), score, 2.0) for one, score in zip(made, (float("nan"), 0.5), strict=True)
    ]
    fill_rewards(path, outlines, 1.0)
    failed, kept = pq.read_table(path).to_pylist()
    assert (failed["status"], failed["score"], failed["reward"], failed["model_reward"]) == ("failed", None, None, None)
    assert failed["failure"] == outlines[0].failure and "reward_model: " in failed["failure"]
    assert (kept["status"], kept["failure"], kept["score"], kept["reward"]) == ("completed", None, 1.0, 2.0)
    assert [one.status for one in read_trajectories(path)] == [one.status for one in outlines]


def test_add_rewards_reaches_only_what_is_trained_on() -> None:
    batch = from_trajectories([Writer("p").ends(1.0), Writer("p").says("a").ends(1.0)], turn_reward_coef=1.0)
    assert torch.equal(add_rewards(batch, torch.tensor([2.0])), torch.tensor([0.0, 3.0]))
