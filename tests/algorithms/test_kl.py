"""KL estimators against exact divergences, and the KL in the reward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentrl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    apply_kl_to_rewards,
    kl_loss,
    kl_penalty,
)
from tests.algorithms.batches import Row, batch_of

P, Q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
KL_P_Q = (P * (P / Q).log()).sum().item()


@pytest.mark.parametrize("kind", ["kl", "k1", "low_var_kl", "k3"])
def test_unbiased_kinds_average_to_the_divergence_of_the_policy_from_the_reference(kind: Any) -> None:
    assert (P * kl_penalty(P.log(), Q.log(), kind)).sum().item() == pytest.approx(KL_P_Q, rel=1e-5)


def test_k3_is_never_negative_and_clamped_twice() -> None:
    logprobs, ref = torch.tensor([-1.0, -1.0, -1.0, -50.0, 0.0]), torch.tensor([-1.0, -0.9, -1.1, -1.0, -50.0])
    found = kl_penalty(logprobs, ref, "k3").tolist()
    # log-ratios 0, 0.1, -0.1, 49 (clamped to 20, the result to 10), -50 (clamped to -20: e^-20 + 20 - 1 = 19 -> 10)
    assert found == pytest.approx([0.0, math.exp(0.1) - 1.1, math.exp(-0.1) - 0.9, 10.0, 10.0], abs=1e-6)


def test_k3_far_away_has_no_gradient_rather_than_a_broken_one() -> None:
    logprobs = torch.tensor([-300.0, -0.5], requires_grad=True)
    kl_penalty(logprobs, torch.tensor([-1.0, -300.0]), "k3").sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_k2_as_a_loss_has_the_gradient_of_the_divergence() -> None:
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    logprobs = logits.log_softmax(0)
    (logprobs.exp() * (logprobs - Q.log())).sum().backward()
    assert logits.grad is not None
    exact, logits.grad = logits.grad, None
    logprobs = logits.log_softmax(0)
    (logprobs.exp().detach() * kl_penalty(logprobs, Q.log(), "k2")).sum().backward()
    torch.testing.assert_close(logits.grad, exact)


@pytest.mark.parametrize("kind", ["kl+", "k1+", "abs+", "low_var_kl+", "k3+"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_the_divergence(kind: Any) -> None:
    logprobs = torch.tensor([-0.1, -1.0, -30.0], requires_grad=True)
    ref = torch.tensor([-0.5, -0.9, -2.0])
    found = kl_loss(logprobs, ref, kind)
    torch.testing.assert_close(found.detach(), kl_penalty(logprobs.detach(), ref, kind.removesuffix("+")))
    found.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.4, -0.1, -28.0])  # log p - log q


def test_kl_leaves_the_reward_of_policy_tokens_only() -> None:
    batch = batch_of(Row("0110", {2: 1.0}), Row("01"))
    batch = batch.with_fields(old_logprobs=torch.tensor([0.0, -1.0, -2.0, -9.0, float("nan"), -1.0]))
    batch = batch.with_fields(ref_logprobs=torch.tensor([0.0, -1.5, -1.0, -1.0, 0.0, -3.0]))
    controller = AdaptiveKLController(0.1, target=0.5, horizon=100)
    result, kl = apply_kl_to_rewards(batch, "k1", controller.coef)
    assert result.rewards.tolist() == pytest.approx([0, -0.05, 1.1, 0, 0, -0.2])
    assert batch.rewards.tolist() == [0, 0, 1, 0, 0, 0]
    # The mean over trajectories of (0.5 - 1) / 2 and 2.
    assert kl == pytest.approx((-0.25 + 2) / 2)
    controller.update(kl, 2)
    # 0.875 is 75 % above the target: the step is held to 20 %, times 2 trajectories of a horizon of 100.
    assert controller.coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))


def test_a_trajectory_counts_once_in_the_kl_that_steers_however_many_transcripts_it_has() -> None:
    """Of one trajectory with two transcripts (KL .4; .1, .1) and one with a single one (KL 1)."""
    batch = batch_of(Row("01", trajectory=0), Row("011", trajectory=0), Row("01", trajectory=1))
    batch = batch.with_fields(old_logprobs=torch.tensor([0.0, 0.4, 0.0, 0.1, 0.1, 0.0, 1.0]))
    batch = batch.with_fields(ref_logprobs=torch.zeros(7))
    assert apply_kl_to_rewards(batch, "k1", 0.1)[1] == pytest.approx((0.6 / 3 + 1) / 2)


def test_the_adaptive_coefficient_survives_a_checkpoint_and_the_fixed_one_is_the_config() -> None:
    adaptive = AdaptiveKLController(0.1, target=0.5, horizon=10)
    adaptive.update(0.0, 5)
    resumed = AdaptiveKLController(0.1, target=0.5, horizon=10)
    resumed.load_state_dict(adaptive.state_dict())
    assert resumed.coef == adaptive.coef == pytest.approx(0.1 * (1 - 0.2 * 0.5))
    resumed.load_state_dict(FixedKLController(0.7).state_dict())
    assert resumed.coef == adaptive.coef, "a constant coefficient leaves no state"
    fixed = FixedKLController(0.3)
    fixed.update(100.0, 5)
    fixed.load_state_dict(FixedKLController(0.7).state_dict())
    assert fixed.coef == 0.3
