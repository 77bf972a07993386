"""RLSD by hand: the reward's sign, the teacher's size."""

from __future__ import annotations

import math

import pytest
import torch

from agentrl.algorithms.estimate import Settings, estimate
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.errors import ConfigError
from agentrl.trajectory.batch import RaggedBatch

TEACHER = DistillationConfig.model_validate({"teacher": {"path": "policy", "privileged": "It is {ground_truth}."}})
GAINS = [1.1, 0.9, 3.0, 0.1]
"""p_T / p_S of the four sampled tokens of each sequence; the first and the fourth token of it are not sampled."""
NAN = math.nan


def batch_of(rewards: list[float], trajectories: list[int] | None = None, version: int = 0) -> RaggedBatch:
    """Sequences of six tokens, of one prompt: prompt, two sampled, a tool's, two sampled."""
    count = len(rewards)
    mask = torch.tensor([False, True, True, False, True, True]).repeat(count)
    gains = torch.tensor([NAN, GAINS[0], GAINS[1], NAN, GAINS[2], GAINS[3]]).log().repeat(count)
    old = torch.where(mask, -1.0, 0.0)
    paid = torch.zeros(count, 6)
    paid[:, 5] = torch.tensor(rewards)
    batch = RaggedBatch.unsampled(
        torch.arange(count + 1) * 6,
        torch.arange(6 * count),
        mask,
        torch.zeros(count, dtype=torch.int64),
        torch.tensor(trajectories or range(count)),
    )
    return batch.with_fields(
        rollout_logprobs=old,
        old_logprobs=old,
        rewards=paid.flatten(),
        version=torch.where(mask, version, -1).int(),
        turn=mask.int() - 1,
        teacher=torch.zeros(6 * count, dtype=torch.int32),
        teacher_scores=(old + gains)[:, None],
    )


def advantages(batch: RaggedBatch, **options: float) -> torch.Tensor:
    config = AlgorithmConfig(adv_estimator="rlsd", adv_options=dict(options), norm_adv_by_std_in_grpo=False)
    columns, _ = estimate(batch, config, Settings(2, distillation=TEACHER))
    return columns["advantages"].view(len(batch), 6)


def test_by_hand() -> None:
    """Rewards 1 and 0: A = 1/2 and -1/2. With mix 1, w = p_T / p_S where A > 0, its inverse where A < 0, within
    [0.8, 1.2]: 1.1, 0.9, 1.2, 0.8, and 1 / 1.1, 1 / 0.9, 0.8, 1.2. With mix 1/2 half of the distance from 1."""
    whole = advantages(batch_of([1.0, 0.0]), mix=1, decay_steps=0)
    assert whole[0].tolist() == pytest.approx([0, 0.55, 0.45, 0, 0.6, 0.4])
    assert whole[1].tolist() == pytest.approx([0, -0.5 / 1.1, -0.5 / 0.9, 0, -0.4, -0.6])
    half = advantages(batch_of([1.0, 0.0]))
    assert half[0].tolist() == pytest.approx([0, 0.525, 0.475, 0, 0.55, 0.45])


def test_the_share_falls_with_the_versions() -> None:
    """From a half at version 0 to nothing at 50: at version 20 it is 0.3, and A_t = 1/2 (0.7 + 0.3 w)."""
    at_20 = advantages(batch_of([1.0, 0.0], version=20))
    assert at_20[0].tolist() == pytest.approx([0, 0.515, 0.485, 0, 0.53, 0.47])
    for late in (50, 80):
        assert advantages(batch_of([1.0, 0.0], version=late))[0].tolist() == pytest.approx([0, 0.5, 0.5, 0, 0.5, 0.5])


def test_whatever_the_teacher_says_the_sign_is_the_rewards() -> None:
    batch = batch_of([1.0, 0.0, 1.0, 0.0])
    for seed in range(20):
        scores = 30 * torch.randn(24, 1, generator=torch.Generator().manual_seed(seed))
        found = advantages(batch.with_fields(teacher_scores=scores), mix=1, clip=0.99, decay_steps=0)
        mask = batch.mask.view(4, 6)
        assert (found[::2][mask[::2]] > 0).all() and (found[1::2][mask[1::2]] < 0).all() and (found[~mask] == 0).all()


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    """A privileged teacher without rewards is what leaks."""
    assert (advantages(batch_of([1.0, 1.0])) == 0).all()


def test_a_sequence_without_a_teacher_has_the_advantage_of_grpo() -> None:
    batch = batch_of([1.0, 0.0])
    assert batch.teacher is not None
    batch.teacher[:6] = -1
    found = advantages(batch, mix=1, decay_steps=0)
    assert found[0].tolist() == pytest.approx([0, 0.5, 0.5, 0, 0.5, 0.5])
    assert found[1].tolist() == pytest.approx([0, -0.5 / 1.1, -0.5 / 0.9, 0, -0.4, -0.6])


def test_the_transcripts_of_a_trajectory_have_one_reward_and_weights_of_their_own() -> None:
    """Trajectory 0 has two transcripts, of which the second ends with the reward."""
    batch = batch_of([0.0, 1.0, 0.0], trajectories=[0, 0, 1])
    assert batch.teacher_scores is not None
    batch.teacher_scores[6:12] = batch.old_logprobs[6:12, None]  # type: ignore[index]
    found = advantages(batch, mix=1, decay_steps=0)
    assert found[0].tolist() == pytest.approx([0, 0.55, 0.45, 0, 0.6, 0.4])
    assert found[1].tolist() == pytest.approx([0, 0.5, 0.5, 0, 0.5, 0.5])


def test_the_teacher_does_nothing_else_to_the_advantages() -> None:
    """A share of 0 is GRPO exactly, though a teacher's estimates are taken off other estimators' advantages."""
    batch = batch_of([1.0, 0.0])
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    plain, _ = estimate(batch, config, Settings(2))
    mixed, told = estimate(batch, config, Settings(2, distillation=TEACHER))
    assert torch.equal(advantages(batch, mix=0).flatten(), plain["advantages"])
    assert not torch.equal(mixed["advantages"], plain["advantages"]) and told["distill/taught_fraction"] == 1


def test_options_that_are_none() -> None:
    for options in ({"clip": 1.0}, {"mix": 1.5}, {"decay_steps": -1}, {"epsilon": 0.1}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            advantages(batch_of([1.0, 0.0]), **options)
