"""Baselines by role: each role of a trajectory is compared with the same role of the others, or with its past."""

from __future__ import annotations

import json

import pytest
import torch

from agentrl.algorithms.advantages import compute_advantages, group_counts
from agentrl.algorithms.running_returns import RunningReturns
from agentrl.config.columns import role_number
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.trajectory import Outline, Status
from agentrl.trajectory.batch import RaggedBatch
from tests.algorithms.batches import Row, algorithm, batch_of, suited

WHITE, BLACK = role_number("white"), role_number("black")
RETURNS = [(1.0, -1.0), (0.5, 0.0), (-1.0, 1.0)]
"""Of three games of one prompt: white's and black's."""


def both() -> RaggedBatch:
    """A sequence for each role of the games; white's come with two policy tokens, black's with one."""
    rows = [
        row
        for game, (white, black) in enumerate(RETURNS)
        for row in (Row("011", {2: white}, trajectory=game), Row("0010", {2: black}, trajectory=game))
    ]
    return batch_of(*rows).with_fields(role=torch.tensor([WHITE, BLACK] * 3))


PER_BATCH = {
    "gae",
    "bi_level_gae",
    "decoupled_gae",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "gpg",
}
"""Estimators that whiten or weigh over the batch, so roles move each other's scale."""


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGE_ESTIMATORS.names() if name not in PER_BATCH])
def test_a_role_has_the_advantages_that_it_has_alone(estimator: str) -> None:
    whole = suited(both(), estimator)
    together = compute_advantages(whole, algorithm(estimator), 3)
    for first in (0, 1):
        rows = [first, first + 2, first + 4]
        alone = compute_advantages(whole.select(rows).with_fields(role=None), algorithm(estimator), 3)
        of_role = together.select(rows)
        assert of_role.advantages is not None and alone.advantages is not None
        assert torch.equal(of_role.advantages, alone.advantages)


def test_without_roles_the_trajectory_is_compared_as_a_whole() -> None:
    assert group_counts(both(), 3)["groups"] == 2
    assert group_counts(both().with_fields(role=None), 3)["groups"] == 1


def outline(game: int, source: str = "nim") -> Outline:
    white, black = RETURNS[game]
    scores = {"role/white": white, "role/black": black}
    return Outline(f"t/{game}", 0, source, Status.COMPLETED, None, white + black, scores, 0.0, {}, [], 2, 3, 3, 3)


def test_rae_subtracts_the_running_mean_of_the_role() -> None:
    outlines = [outline(game) for game in range(3)]
    running = RunningReturns.from_options({"decay": 0.8}, 1.0)
    batch = both()
    batch = batch.with_fields(running_returns=running.column(batch, outlines))
    white = [0.2, 0.8 * 0.2 + 0.2 * 0.5, 0.8 * 0.26 - 0.2]
    black = [-0.2, 0.8 * -0.2, 0.8 * -0.16 + 0.2]
    assert batch.running_returns is not None
    assert batch.running_returns.tolist() == pytest.approx([x for pair in zip(white, black, strict=True) for x in pair])
    made = compute_advantages(batch, algorithm("rae"), 1).advantages
    assert made is not None
    expected = [
        value
        for game, (w, b) in enumerate(RETURNS)
        for value in (0, w - white[game], w - white[game], 0, 0, b - black[game], 0)
    ]
    assert made.tolist() == pytest.approx(expected)


def test_the_running_means_come_back_bit_for_bit() -> None:
    batch, outlines = both(), [outline(game) for game in range(3)]
    undisturbed = RunningReturns.from_options({}, 1.0)
    undisturbed.column(batch, outlines)
    resumed = RunningReturns.from_options({}, 1.0)
    resumed.restore(json.loads(json.dumps(undisturbed.state())))
    assert torch.equal(resumed.column(batch, outlines), undisturbed.column(batch, outlines))
    assert resumed.means.keys() == {"nim/white", "nim/black"}


def test_an_episode_without_roles_has_one_running_mean() -> None:
    batch = batch_of(Row("01", {1: 3.0}), Row("01", {1: 5.0}))
    plain = [
        Outline(f"t/{k}", k, "sums", Status.COMPLETED, None, score, {}, 0.0, {}, [], 1, 1, 1, 1)
        for k, score in enumerate((3.0, 5.0))
    ]
    running = RunningReturns.from_options({"decay": 0.5}, 1.0)
    assert running.column(batch, plain).tolist() == [1.5, 3.25]
    assert running.state() == {"sums": 3.25}
