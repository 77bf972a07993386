"""Losses in cases small enough to work out by hand, and what they must do with what is masked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.aggregate import LossScale, aggregate
from agentrl.algorithms.policy_loss import MicroLoss, actor_loss
from agentrl.algorithms.ragged import segment_sum
from agentrl.algorithms.value_loss import value_loss
from agentrl.config.declaration import declaration_of
from agentrl.config.registries import POLICY_LOSSES
from tests.algorithms.batches import micro_loss


def one_token(mode: str, ratio: float, advantage: float, dual: float = 3.0) -> tuple[float, float, MicroLoss]:
    """(loss, gradient by log-prob, all of it) of a single token."""
    old = torch.tensor([-1.0], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    mask, offsets = torch.tensor([True]), torch.tensor([0, 1])
    advantages = torch.tensor([advantage], dtype=torch.float64)
    found = micro_loss(mode, new, old, advantages, mask, offsets, dual=dual)
    found.by_token.sum().backward()
    assert new.grad is not None
    return found.by_token.item(), new.grad.item(), found


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped", "dual_clipped"),
    [
        (1.1, 1.0, -1.1, -1.1, 0, 0),
        (1.5, 1.0, -1.28, 0.0, 1, 0),  # above 1 + high
        (0.5, 1.0, -0.5, -0.5, 0, 0),  # below 1 - low, but coming back
        (0.5, -1.0, 0.8, 0.0, 1, 0),  # below 1 - low
        (2.0, -1.0, 2.0, 2.0, 0, 0),  # above, but coming back
        (5.0, -1.0, 3.0, 0.0, 0, 1),  # dual clip
        (5.0, 1.0, -1.28, 0.0, 1, 0),  # no dual clip for a positive advantage
    ],
)
def test_vanilla(ratio: float, advantage: float, loss: float, gradient: float, clipped: int, dual_clipped: int) -> None:
    value, slope, found = one_token("vanilla", ratio, advantage)
    assert [value, slope] == pytest.approx([loss, gradient])
    assert (found.tokens.item(), found.sums["clip_frac"].item()) == (1, clipped)
    assert found.sums["clip_frac_lower"].item() == dual_clipped
    assert found.sums["ppo_kl"].item() == pytest.approx(-math.log(ratio))


def test_statistics_are_of_policy_tokens_with_advantage() -> None:
    old, new = torch.zeros(4), torch.tensor([5.0, 0.1, 0.3, -0.2])
    mask, offsets = torch.tensor([False, True, True, True]), torch.tensor([0, 4])
    found = micro_loss("vanilla", new, old, torch.tensor([1.0, 1.0, 0.0, 1.0]), mask, offsets)
    assert [found.tokens.item(), found.sums["ppo_kl"].item()] == pytest.approx([2, 0.1])


@pytest.mark.parametrize("mode", POLICY_LOSSES.names())
def test_a_token_without_advantage_has_no_gradient_if_the_loss_declares_so(mode: str) -> None:
    assert declaration_of(POLICY_LOSSES.get(mode)).advantage_only
    new = torch.tensor([-1.0, -0.5, -2.0, -0.1], requires_grad=True)
    mask, advantages = torch.tensor([False, True, True, True]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    micro_loss(mode, new, torch.full((4,), -1.0), advantages, mask, torch.tensor([0, 4])).by_token.sum().backward()
    assert new.grad is not None
    assert new.grad[[1, 3]].eq(0).all() and new.grad[2] != 0


def test_gspo_has_no_dual_clip() -> None:
    value, slope, found = one_token("gspo", 5.0, -1.0)
    assert [value, slope, found.sums["clip_frac_lower"].item()] == pytest.approx([5.0, 5.0, 0])


@pytest.mark.parametrize("mode", POLICY_LOSSES.names())
def test_a_log_ratio_beyond_20_is_clamped_before_exp(mode: str) -> None:
    assert one_token(mode, math.exp(100), -1.0, dual=1e12)[0] == pytest.approx(math.exp(20))
    assert one_token(mode, math.exp(-100), 1.0)[0] == pytest.approx(-math.exp(-20))


def test_gspo_is_the_gradient_of_the_sequence_ratio() -> None:
    # With seq-mean-token-mean the objective of the paper is the mean over sequences of -A * exp(mean log-ratio).
    generator = torch.Generator().manual_seed(0)
    old, change = torch.randn(7, generator=generator).double(), 0.05 * torch.randn(7, generator=generator).double()
    mask = torch.tensor([False, True, True, False, True, False, True])
    offsets, advantages = torch.tensor([0, 5, 7]), torch.tensor([1.0] * 5 + [-0.5] * 2, dtype=torch.float64)

    ours = (old + change).requires_grad_()
    by_token = micro_loss("gspo", ours, old, advantages, mask, offsets).by_token
    loss = aggregate(by_token, mask, offsets, LossScale.of(segment_sum(mask.double(), offsets), "seq-mean-token-mean"))
    loss.backward()

    paper = (old + change).requires_grad_()
    log_ratio = paper - old
    first, second = log_ratio[[1, 2, 4]].mean().exp(), log_ratio[6].exp()
    expected = (-1.0 * first + 0.5 * second) / 2
    expected.backward()
    assert loss.item() == pytest.approx(expected.item())
    torch.testing.assert_close(ours.grad, paper.grad)


@pytest.mark.parametrize("mode", POLICY_LOSSES.names())
def test_masked_tokens_may_hold_anything(mode: str) -> None:
    nan = float("nan")
    old = torch.tensor([nan, -1.0, float("-inf"), -2.0])
    new = torch.tensor([nan, -1.1, float("-inf"), -1.9], requires_grad=True)
    mask, offsets = torch.tensor([False, True, False, True]), torch.tensor([0, 4])
    found = micro_loss(mode, new, old, torch.tensor([nan, 1.0, nan, -1.0]), mask, offsets)
    whole = actor_loss(found.by_token, entropy=new.exp(), entropy_coeff=0.1)
    loss = aggregate(whole, mask, offsets, LossScale.of(segment_sum(mask.double(), offsets), "seq-mean-token-mean"))
    loss.backward()
    assert math.isfinite(loss.item()) and all(math.isfinite(one.item()) for one in found.sums.values())
    assert new.grad is not None
    assert new.grad[~mask].nan_to_num().abs().sum() == 0 and new.grad[mask].isfinite().all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / 50),
    ],
)
def test_aggregate(mode: Any, expected: float) -> None:
    """Three sequences, one without a policy token, which counts nowhere."""
    loss = torch.tensor([9.0, 1, 2, 3, 9, 9, 10], requires_grad=True)
    mask = torch.tensor([False, True, True, True, False, False, True])
    offsets = torch.tensor([0, 4, 5, 7])
    scale = LossScale.of(segment_sum(mask.double(), offsets), mode, norm_length=50)
    assert (scale.tokens, scale.sequences) == (4, 2)
    total = aggregate(loss, mask, offsets, scale)
    assert total.item() == pytest.approx(expected)
    total.backward()
    assert loss.grad is not None
    assert (loss.grad[mask] > 0).all() and loss.grad[~mask].eq(0).all()


def test_a_constant_length_must_be_given() -> None:
    with pytest.raises(ValueError, match="norm_length"):
        LossScale.of(torch.tensor([1]), "seq-mean-token-sum-norm")


def test_the_loss_of_no_policy_token_is_zero() -> None:
    mask, offsets = torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2])
    for mode in ("token-mean", "seq-mean-token-mean"):
        scale = LossScale.of(segment_sum(mask.double(), offsets), mode)
        assert aggregate(torch.ones(2), mask, offsets, scale).item() == 0.0


def test_actor_loss_rewards_entropy_and_punishes_kl() -> None:
    found = actor_loss(
        torch.tensor([1.0]), entropy=torch.tensor([2.0]), entropy_coeff=0.1, kl=torch.tensor([3.0]), kl_coef=0.01
    )
    assert found.item() == pytest.approx(1 - 0.2 + 0.03)


def test_value_loss_takes_the_larger_error() -> None:
    # v, v_old, R: free error, then the error of v held within 0.5 of v_old.
    values = torch.tensor([1.0, 3.0, 3.0, float("nan")], requires_grad=True)
    old, returns = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.tensor([2.0, 4.0, 1.0, 0.0])
    mask = torch.tensor([True, True, True, False])
    loss, clipped = value_loss(values, old, returns, mask, 0.5)
    assert loss.tolist() == pytest.approx([0.5 * 1.5**2, 0.5 * 2.5**2, 0.5 * 2.0**2, 0.0])
    assert clipped.item() == 2
    loss.sum().backward()
    gradient: Tensor | None = values.grad
    assert gradient is not None
    assert gradient.tolist() == [0.0, 0.0, 2.0, 0.0]
