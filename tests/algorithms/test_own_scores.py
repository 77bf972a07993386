"""Scores of single transcripts: the advantage that their trajectory would have with them."""

from __future__ import annotations

import pytest
import torch

from agentrl.algorithms.advantages import compute_advantages, why_no_scores
from agentrl.config.declaration import declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.errors import ConfigError
from agentrl.trajectory.batch import RaggedBatch
from tests.algorithms.batches import Row, algorithm, batch_of
from tests.naming import naming

TAKING = [name for name in ADVANTAGE_ESTIMATORS.names() if declaration_of(ADVANTAGE_ESTIMATORS.get(name)).by_reward]


def group(rewards: list[float], *, second: int = 0, first: int = 0) -> list[Row]:
    """Trajectories of one prompt; the one at `second` has two sequences, its reward on the last."""
    rows = []
    for number, reward in enumerate(rewards):
        if number == second:
            rows.append(Row("0110", group=first, trajectory=first + number))
        rows.append(Row("011", {2: reward}, group=first, trajectory=first + number))
    return rows


def rows_of(batch: RaggedBatch, estimator: str, n: int = 4) -> list[float]:
    """The advantage of each sequence, which is the same on all of its policy tokens."""
    found = compute_advantages(batch, algorithm(estimator), n)
    assert found.advantages is not None and found.returns is not None
    assert torch.equal(found.advantages, found.returns)
    values = [
        found.advantages[start:end][found.mask[start:end]].unique().tolist()
        for start, end in zip(found.offsets[:-1].tolist(), found.offsets[1:].tolist(), strict=True)
    ]
    assert [len(one) for one in values] == [1] * len(values)
    return [one[0] for one in values]


@pytest.mark.parametrize("estimator", TAKING)
def test_a_transcript_gets_the_advantage_of_a_trajectory_with_its_score(estimator: str) -> None:
    """All others keep theirs, of its own trajectory, too."""
    rewards = [1.0, 0.0, 1.0, 0.25]
    plain = batch_of(*group(rewards), *group([0.5] * 3, first=4))
    before = rows_of(plain, estimator)
    shift = torch.zeros(len(plain), dtype=torch.float64)
    shift[0], shift[1], shift[2], shift[6] = -0.75, -0.5, 0.125, 0.25
    own = rows_of(plain.with_fields(score_shift=shift), estimator)
    assert own[3:6] == before[3:6] and own[7:] == before[7:] == [0.0] * 2
    for row, replaced in ((0, [0.25, 0.0, 1.0, 0.25]), (1, [0.5, 0.0, 1.0, 0.25]), (2, [1.0, 0.125, 1.0, 0.25])):
        alone = rows_of(batch_of(*group(replaced), *group([0.5] * 3, first=4)), estimator)
        assert own[row] == pytest.approx(alone[row], abs=1e-6)
    alone = rows_of(batch_of(*group(rewards), *group([0.75, 0.5, 0.5], first=4)), estimator)
    assert own[6] == pytest.approx(alone[6], abs=1e-6) and own[6] > 0, "its group's equal rewards say nothing of it"


@pytest.mark.parametrize("estimator", TAKING)
def test_a_score_like_the_sessions_changes_nothing(estimator: str) -> None:
    batch = batch_of(*group([1.0, 0.0, 1.0, 0.25]))
    shift = torch.zeros(len(batch), dtype=torch.float64)
    assert rows_of(batch.with_fields(score_shift=shift), estimator) == rows_of(batch, estimator)


def test_with_roles_the_score_replaces_its_roles() -> None:
    role = torch.tensor([1, 2] * 2)
    rows = [Row("011", {2: reward}, trajectory=number) for number in range(2) for reward in (1.0, 0.5 * number)]
    batch = batch_of(*rows).with_fields(role=role)
    shift = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    own = rows_of(batch.with_fields(score_shift=shift), "rloo", n=2)
    assert own == pytest.approx([0.0, -0.5, 0.0, 1.5])


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGE_ESTIMATORS.names() if name not in TAKING])
def test_other_estimators_refuse_such_scores(estimator: str) -> None:
    batch = batch_of(*group([1.0, 0.0])).with_fields(score_shift=torch.ones(3, dtype=torch.float64))
    with naming(ConfigError, f"algorithm.adv_estimator={estimator}"):
        compute_advantages(batch, algorithm(estimator), 4)


def test_the_refusal_names_all_that_take_them() -> None:
    said = why_no_scores(algorithm("gae"))
    assert said is not None and all(name in said for name in TAKING)
    assert set(TAKING) == {"grpo", "rloo", "opo", "maxrl"}
