"""What is added to a batch's rewards, and that they are finite."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch

from agentrl.algorithms.estimate import Settings, add_rewards, estimate
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.config.sections.algorithm import KLType
from agentrl.errors import TrainingError
from agentrl.trajectory.batch import RaggedBatch
from tests.algorithms.batches import algorithm


def test_rewards_of_trajectories_go_to_their_last_policy_tokens() -> None:
    """Trajectory 3 has two sequences, and both trajectories end with a tool's token."""
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    batch = RaggedBatch.from_columns(
        offsets=torch.tensor([0, 3, 7, 11]),
        ids=torch.arange(11),
        mask=mask,
        rollout_logprobs=torch.zeros(11),
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=0.5 * mask,
        group=torch.tensor([0, 0, 1]),
        trajectory=torch.tensor([3, 3, 7]),
        policy=torch.zeros(3, dtype=torch.int32),
        policies=("policy",),
    )
    by_trajectory = {3: 2.0, 5: 100.0, 7: -1.0}
    rewards = torch.tensor([by_trajectory[owner] for owner in batch.trajectory.tolist()])
    added = add_rewards(batch, rewards) - batch.rewards
    assert added.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, -1, 0]
    assert torch.equal(add_rewards(batch, torch.zeros(len(batch))), batch.rewards)
    assert len(add_rewards(batch.select([]), rewards[:0])) == 0


def scored(**columns: Any) -> RaggedBatch:
    """Two trajectories of prompt 4 and two of prompt 6, numbered 8, 9, 12 and 13, of three tokens each."""
    mask = torch.tensor([False, True, True] * 4)
    rewards = torch.zeros(12)
    rewards[5] = 1.0
    batch = RaggedBatch.from_columns(
        offsets=torch.arange(0, 13, 3),
        ids=torch.arange(12),
        mask=mask,
        rollout_logprobs=torch.zeros(12),
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=rewards,
        group=torch.tensor([4, 4, 6, 6]),
        trajectory=torch.tensor([8, 9, 12, 13]),
        policy=torch.zeros(4, dtype=torch.int32),
        policies=("policy",),
        old_logprobs=torch.full((12,), -1.0),
        ref_logprobs=torch.full((12,), -1.0),
        values=torch.zeros(12),
        squared_probs=torch.full((12,), 0.5),
        greedy_rewards=torch.zeros(4),
        running_returns=torch.zeros(4, dtype=torch.float64),
        state=torch.zeros(12, dtype=torch.int64),
        teacher=torch.zeros(12, dtype=torch.int32),
        teacher_scores=torch.full((12, 1), -1.0),
    )
    return batch.with_fields(**columns)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_rewards_that_are_not_finite_are_refused(estimator: str, value: float) -> None:
    """A NaN would make its group one that teaches nothing, an infinity one whose rewards are all equal."""
    config = algorithm(estimator)
    sound = scored()
    estimate(sound, config, Settings(2))
    rewards = sound.rewards.clone()
    rewards[[7, 10]] = value
    said = rf"those of 2 trajectories are not; the first is trajectory 12 of the step \(prompt 6\), with {value}"
    with pytest.raises(TrainingError, match=said):
        estimate(sound.with_fields(rewards=rewards), config, Settings(2))
    with pytest.raises(TrainingError, match=r"trajectory 9 .* \(prompt 4\)"):
        estimate(sound.with_fields(model_rewards=torch.tensor([1.0, value, 0.0, 0.0])), config, Settings(2))


def test_further_rewards_that_float32_cannot_hold_are_refused() -> None:
    with pytest.raises(TrainingError, match=r"trajectory 8 .* with inf"):
        estimate(scored(model_rewards=torch.tensor([1e39, 0.0, 0.0, 0.0])), algorithm("grpo"), Settings(2))


@pytest.mark.parametrize(("column", "counts"), [("old_logprobs", (1, 0)), ("ref_logprobs", (0, 1))])
@pytest.mark.parametrize("kind", get_args(KLType))
def test_a_kl_in_the_reward_that_is_not_finite_names_its_log_probs(
    column: str, counts: tuple[int, int], kind: str
) -> None:
    config = algorithm("grpo", use_kl_in_reward=True, kl_penalty=kind)
    broken = torch.full((12,), -1.0)
    broken[[0, 4]] = math.nan  # the first is no policy token's
    said = f"the KL of 1 of 8 policy tokens .* log-probs {counts[0]} of the policy's and {counts[1]} of the reference's"
    with pytest.raises(TrainingError, match=said):
        estimate(scored(**{column: broken}), config, Settings(2, 0.1))
    columns, metrics = estimate(scored(), config, Settings(2, 0.1))
    assert columns["zero_advantage"].tolist() == [False, False, True, True]
    assert columns["rewards"].isfinite().all()
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.0)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_how_much_of_the_returns_the_critic_knows() -> None:
    """Returns are 0 but for two of 1: values of half of these know three quarters of the variance."""
    config = algorithm("gae")
    rewarded = scored()
    for values, expected in ((torch.zeros(12), 0.0), (0.5 * (rewarded.trajectory == 9)[rewarded.sequence_ids()], 0.75)):
        _, metrics = estimate(rewarded.with_fields(values=values.float()), config, Settings(2))
        assert metrics["critic/explained_variance"] == pytest.approx(expected)
    for without in (scored(rewards=torch.zeros(12)), scored(values=None)):
        _, metrics = estimate(without, algorithm("grpo"), Settings(2))
        assert "critic/explained_variance" not in metrics
