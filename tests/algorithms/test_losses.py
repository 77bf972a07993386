"""Losses in cases small enough to work out by hand, beside those of test_reference, and what is masked."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms import LossColumns, TokenLoss, declare
from agentrl.algorithms.aggregate import LossScale, Scored, add_up, aggregate
from agentrl.algorithms.policy_loss import REPORTED, MicroLoss, PolicyLoss, select_tokens
from agentrl.algorithms.ragged import segment_sum
from agentrl.algorithms.terms import loss_terms
from agentrl.algorithms.value_loss import value_loss
from agentrl.config.declaration import declaration_of
from agentrl.config.registries import POLICY_LOSSES
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import PolicyLossConfig, RolloutCorrectionConfig
from agentrl.errors import CodeError, ConfigError, TrainingError
from agentrl.model.scores import TokenScores
from agentrl.system.registry import options_model
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.policy import PolicyWorker
from tests.algorithms.batches import Row, batch_of, micro_loss
from tests.naming import naming


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
    ("mode", "ratio", "advantage", "loss", "gradient", "clipped", "lower"),
    [
        # log p_old is -1; the bounds are 0.2, 0.28 and 3.
        ("vanilla", 1.5, 1.0, -1.28, 0.0, 1, 0),
        ("vanilla", 0.5, -1.0, 0.8, 0.0, 1, 0),
        ("vanilla", 5.0, -1.0, 3.0, 0.0, 0, 1),
        ("cispo", 1.1, 2.0, -1.1 * 2 * (-1 + math.log(1.1)), -2.2, 0, None),
        ("cispo", 2.0, 1.0, -1.28 * (-1 + math.log(2)), -1.28, 1, None),  # bounded, and still learnt from
        ("cispo", 0.5, -1.0, 0.8 * (-1 + math.log(0.5)), 0.8, 1, None),
        ("gpg", 2.0, 3.0, -3 * (-1 + math.log(2)), -3.0, None, None),
        # p_old = 0.368; p = 0.662 has gone up by 0.294, p = 0.552 by 0.184, p = 0.110 down by 0.258.
        ("dppo_tv", 1.8, 1.0, 0.0, 0.0, 1, 0),
        ("dppo_tv", 1.5, 1.0, -1.5 * (-1 + math.log(1.5)), -1.5, 0, 0),  # a ratio that PPO would clip
        ("dppo_tv", 1.8, -1.0, 1.8 * (-1 + math.log(1.8)), 1.8, 0, 0),  # coming back
        ("dppo_tv", 0.3, -1.0, 0.0, 0.0, 1, 0),
        # KL = 0.368 log(p_old / p) + 0.632 log(0.632 / (1 - p)): 0.180 at 1.8, 0.303 at 2.05, 0.226 at 0.3.
        ("dppo_kl", 1.8, 1.0, -1.8 * (-1 + math.log(1.8)), -1.8, 0, 0),
        ("dppo_kl", 2.05, 1.0, 0.0, 0.0, 1, 0),
        ("dppo_kl", 0.3, 1.0, -0.3 * (-1 + math.log(0.3)), -0.3, 0, 0),  # coming back
        ("dppo_kl", 0.3, -1.0, 0.0, 0.0, 1, 0),
        # The gate at r = 1 is 4 / tau / 2, and its slope 1.
        ("sapo", 1.0, 1.5, -1.5 * 2, -1.5, None, None),
        ("sapo", 1.0, -1.0, 2 / 1.05, 1.0, None, None),
        ("sapo", 2.0, 1.0, -4 / (1 + math.exp(-1)), -8 * math.exp(-1) / (1 + math.exp(-1)) ** 2, None, None),
        # Bounds of the log-ratio: -0.2 and 0.28.
        ("geo_mean", 1.1, 2.0, -2.2, -2.2, 0, 0),
        ("geo_mean", 2.0, 1.0, -math.exp(0.28), 0.0, 1, 0),
        ("geo_mean", 2.0, -1.0, 2.0, 2.0, 0, 0),  # coming back
        ("geo_mean", 0.5, -1.0, math.exp(-0.2), 0.0, 0, 1),
        # beta = 0.5 (LOSS_OPTIONS): slope -A + 0.5 log r.
        ("dro", math.e, 2.0, 0.25 - 0.0, -1.5, None, None),
        ("topr", 0.5, 2.0, 2 * (1 - math.log(0.5)), -2.0, 0, None),  # what went well has weight 1, however old
        ("topr", 0.5, -2.0, -(1 - math.log(0.5)), 1.0, 0, None),
        ("topr", math.e, -2.0, 0.0, 2.0, 1, None),
    ],
)
def test_a_loss_of_one_token(
    mode: str, ratio: float, advantage: float, loss: float, gradient: float, clipped: int | None, lower: int | None
) -> None:
    value, slope, found = one_token(mode, ratio, advantage)
    assert [value, slope] == pytest.approx([loss, gradient], rel=1e-6, abs=1e-9)
    counts = {"clip_frac": clipped, "clip_frac_lower": lower}
    expected = {name: count for name, count in counts.items() if count is not None}
    assert {name: found.sums[name].item() for name in found.sums if name != "ppo_kl"} == expected
    assert found.columns["ratio"].item() == pytest.approx(ratio)
    marked = found.columns.get("clipped")
    assert (None if marked is None else marked.item()) == (any(expected.values()) if expected else None)


def test_dppo_bounds_a_tokens_weight() -> None:
    found = one_token("dppo_tv", 5.0, -1.0)
    assert found[:2] == pytest.approx((3 * (-1 + math.log(5)), 3.0))
    assert found[2].sums["clip_frac_lower"].item() == 1


def test_topr_weighs_by_the_whole_sequence() -> None:
    # The second sequence's ratio is exp(-0.5 + 0.2); tool tokens do not count in it.
    old = torch.full((6,), -1.0)
    new = (old + torch.tensor([0.1, 0.3, 9.0, -0.5, 9.0, 0.2])).requires_grad_()
    mask, offsets = torch.tensor([True, True, False, True, False, True]), torch.tensor([0, 3, 6])
    found = micro_loss("topr", new, old, torch.tensor([1.0, 1, 0, -1, 0, -1]), mask, offsets)
    found.by_token.sum().backward()
    assert new.grad is not None
    low = math.exp(-0.3)
    assert new.grad.tolist() == pytest.approx([-1, -1, 0, low, 0, low])


def test_statistics_are_of_policy_tokens_with_advantage() -> None:
    old, new = torch.zeros(4), torch.tensor([5.0, 0.1, 0.3, -0.2])
    mask, offsets = torch.tensor([False, True, True, True]), torch.tensor([0, 4])
    found = micro_loss("vanilla", new, old, torch.tensor([1.0, 1.0, 0.0, 1.0]), mask, offsets)
    assert [found.tokens.item(), found.sums["ppo_kl"].item()] == pytest.approx([2, 0.1])


ADVANTAGE_ONLY = [mode for mode in POLICY_LOSSES.names() if declaration_of(POLICY_LOSSES.get(mode)).advantage_only]


def test_losses_that_teach_tokens_without_advantage() -> None:
    assert [mode for mode in POLICY_LOSSES.names() if mode not in ADVANTAGE_ONLY] == ["dro", "kl_cov"]


@pytest.mark.parametrize("mode", ADVANTAGE_ONLY)
def test_a_token_without_advantage_has_no_gradient_if_the_loss_declares_so(mode: str) -> None:
    new = torch.tensor([-1.0, -0.5, -2.0, -0.1], requires_grad=True)
    mask, advantages = torch.tensor([False, True, True, True]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    old, offsets, selected = torch.full((4,), -1.0), torch.tensor([0, 4]), torch.zeros_like(mask)
    micro_loss(mode, new, old, advantages, mask, offsets, selected=selected).by_token.sum().backward()
    assert new.grad is not None
    assert new.grad[[1, 3]].eq(0).all() and new.grad[2] != 0


# Policy tokens with log-probs -1, -3, -2, -2 and advantages 2, -2, 1, -1: the means are -2 and 0, the covariances
# 2, 2, 0 and 0. The tool token between them must not shift the means.
COV_LOGPROBS, COV_ADVANTAGES = [-1.0, 50.0, -3.0, -2.0, -2.0], [2.0, 99.0, -2.0, 1.0, -1.0]
COV_MASK = torch.tensor([True, False, True, True, True])


def covariance_loss(mode: str, change: list[float], **options: float) -> tuple[list[float], Tensor, MicroLoss]:
    """(loss by token, gradient, all of it) where log-probs went by `change` since the selection."""
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=mode, options=options))
    batch = batch_of(Row("10111"))
    batch = batch.with_fields(old_logprobs=torch.tensor(COV_LOGPROBS), advantages=torch.tensor(COV_ADVANTAGES))
    batch = batch.with_fields(rollout_logprobs=batch.old_logprobs)
    columns, _ = select_tokens(batch, config, 7)
    batch = batch.with_fields(**columns)
    new = (torch.tensor(COV_LOGPROBS) + torch.tensor(change)).requires_grad_()
    found = PolicyLoss.from_config(config)(batch, new)
    torch.where(COV_MASK, found.by_token, 0.0).sum().backward()
    assert new.grad is not None
    return found.by_token.tolist(), new.grad, found


def test_clip_cov_takes_the_gradient_from_tokens_of_high_covariance() -> None:
    # Both tokens with a covariance of 2 lie between 1 and 5; a half of four tokens are held back.
    _, slope, found = covariance_loss("clip_cov", [0.0] * 5, clip_cov_ratio=0.5)
    assert slope.tolist() == [0, 0, 0, -1, 1]
    assert [found.sums["cov_frac"].item(), found.sums["clip_frac"].item()] == [2, 0]
    _, slope, found = covariance_loss("clip_cov", [0.0] * 5, clip_cov_ratio=1e-6)
    assert found.sums["cov_frac"].item() == 1 and slope.count_nonzero() == 3, "one at least, drawn by the seed"
    _, slope, _ = covariance_loss("clip_cov", [0.0] * 5, clip_cov_ratio=0.5, clip_cov_lb=2.0)
    assert slope.tolist() == [-2, 0, 2, -1, 1], "bounds are exclusive"
    # What the ratio's clip holds keeps its value: -2 * 1.2.
    loss, _, found = covariance_loss("clip_cov", [1.0, 0, 0, 0, 0], clip_cov_ratio=0.5)
    assert loss[0] == pytest.approx(-2.4)
    assert [found.sums["cov_frac"].item(), found.sums["clip_frac"].item()] == [1, 1]


def test_kl_cov_holds_the_tokens_of_the_highest_covariance() -> None:
    loss, slope, found = covariance_loss("kl_cov", [0.1, 0, -0.1, 0.1, 0.1], kl_cov_ratio=0.5, ppo_kl_coef=3.0)
    up, down = math.exp(0.1), math.exp(-0.1)
    expected = [-2 * up + 0.3, 0, 2 * down + 0.3, -up, up]
    assert torch.tensor(loss)[COV_MASK].tolist() == pytest.approx([one for one in expected if one], rel=1e-5)
    assert slope.tolist() == pytest.approx([-2 * up + 3, 0, 2 * down - 3, -up, up], rel=1e-5)
    assert found.sums["cov_frac"].item() == 2


def test_kl_cov_does_not_pull_at_what_has_moved_by_rounding_alone() -> None:
    _, slope, _ = covariance_loss("kl_cov", [1e-6, 0, -1e-6, 0.1, 0.1], kl_cov_ratio=0.5, ppo_kl_coef=3.0)
    up = math.exp(0.1)
    assert slope.tolist() == pytest.approx([-2, 0, 2, -up, up], rel=1e-5)


def test_topr_counts_no_sequence_as_closer_for_rounding() -> None:
    old, mask, offsets = torch.full((4,), -1.0), torch.ones(4, dtype=torch.bool), torch.tensor([0, 2, 4])
    found = micro_loss("topr", old + torch.tensor([1e-6, 0, 0.01, 0]), old, torch.full((4,), -1.0), mask, offsets)
    assert found.sums["clip_frac"].item() == 2


@pytest.mark.parametrize(
    ("threshold", "left_out"),
    # (log r)^2 are 0.04, 0.01, 0.25, 0: means of the smallest are 0, 0.005, 0.0167, 0.075.
    [(0.08, []), (0.04, [2]), (0.0167, [2]), (0.016, [0, 2]), (0.001, [0, 1, 2])],
)
def test_m2po_leaves_out_the_largest_moments(threshold: float, left_out: list[int]) -> None:
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="m2po", options={"m2_threshold": threshold}))
    batch = batch_of(Row("11011"))
    engine = torch.tensor([-1.0, -1.0, 0.0, -1.0, -1.0])
    change = torch.tensor([0.2, -0.1, 30.0, 0.5, 0.0])
    batch = batch.with_fields(rollout_logprobs=engine, old_logprobs=engine + change)
    batch = batch.with_fields(advantages=torch.tensor([1.0, 1.0, 0.0, -1.0, 2.0]))
    columns, _ = select_tokens(batch, config, 0)
    new = (engine + change).requires_grad_()
    found = PolicyLoss.from_config(config)(batch.with_fields(**columns), new)
    torch.where(batch.mask, found.by_token, 0.0).sum().backward()
    assert new.grad is not None
    expected = [-math.exp(0.2), -math.exp(-0.1), math.exp(0.5), -2.0]
    kept = [0.0 if place in left_out else one for place, one in enumerate(expected)]
    assert new.grad[batch.mask].tolist() == pytest.approx(kept, rel=1e-6)
    assert found.sums["clip_frac"].item() == len(left_out)


def test_a_selection_for_other_tokens_ends_the_run() -> None:
    @declare(select=lambda columns, config, seed: columns.mask[1:])
    def own(columns: LossColumns, config: ActorConfig) -> TokenLoss:
        return TokenLoss(columns.logprobs)

    loss = PolicyLoss(ActorConfig(), declaration_of(own), own, RolloutCorrectionConfig())
    batch = batch_of(Row("011"))
    batch = batch.with_fields(advantages=torch.zeros(3))
    with naming(CodeError, "[3]", "found [2]"):
        loss.select(batch, torch.zeros(3), 0)


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (lambda columns: columns.logprobs[1:] * columns.mask, r"own\): RuntimeError: The size of tensor a \(2\) must"),
        (
            lambda columns: columns.logprobs,
            r"own\): expected a TokenLoss, found Tensor\. Return .*\n.*test_losses.py:\d+",
        ),
        (lambda columns: TokenLoss(columns.logprobs, {"size": 2.0}), "the sum 'size': expected a tensor of one number"),  # type: ignore[dict-item]
        (lambda columns: TokenLoss(columns.logprobs, {"size": columns.mask}), "the sum 'size': .* found tensor"),
        (
            lambda columns: TokenLoss(columns.logprobs.mean()),
            r"shape \[3\], one a token, found \[\].*\n.*test_losses.py:\d",
        ),
        (
            lambda columns: TokenLoss(columns.logprobs, {"kl_loss": columns.mask.sum()}),
            "the sum 'kl_loss'.*actor/kl_loss",
        ),
    ],
)
def test_a_users_loss_that_fails_is_named_with_its_place(result: Callable[[LossColumns], TokenLoss], says: str) -> None:
    def own(columns: LossColumns, config: ActorConfig) -> TokenLoss:
        return result(columns)

    loss = PolicyLoss(ActorConfig(), declaration_of(own), own, RolloutCorrectionConfig())
    batch = batch_of(Row("011")).with_fields(advantages=torch.zeros(3))
    with pytest.raises(CodeError, match=says):
        loss(batch, torch.zeros(3))


def of_advantages(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    return TokenLoss(-columns.advantages * columns.logprobs)


def with_a_kl(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    return TokenLoss(-columns.advantages * columns.logprobs + 0.1 * (columns.logprobs - columns.old_logprobs) ** 2)


def by_spread(columns: LossColumns, config: ActorConfig) -> TokenLoss:
    return TokenLoss(-columns.advantages / columns.advantages.std() * columns.logprobs)


@pytest.mark.parametrize(
    ("function", "declares", "says"),
    [
        (of_advantages, True, ""),
        (by_spread, True, ""),  # not a number with advantages of 0: no proof against it
        (with_a_kl, True, "declares advantage_only, .* gradient by logprobs is not 0"),
        (with_a_kl, False, ""),
    ],
)
def test_a_loss_is_tried_without_advantages_where_it_declares_to_need_them(
    function: Callable[[LossColumns, ActorConfig], TokenLoss], declares: bool, says: str
) -> None:
    """All advantages of the batch differ from 0: sequences whose are 0 would have been left out."""
    declared = declaration_of(declare(advantage_only=declares)(function))
    loss = PolicyLoss(ActorConfig(), declared, function, RolloutCorrectionConfig(), is_believed=False)
    batch = batch_of(Row("011"), Row("011")).with_fields(advantages=torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0, -1.0]))
    logprobs = torch.full((6,), -0.5, requires_grad=True)
    if says:
        with pytest.raises(CodeError, match=says):
            loss(batch, logprobs)
    else:
        loss(batch, logprobs).by_token.sum().backward()
        assert logprobs.grad is not None and loss.is_believed


def test_every_metric_of_an_update_is_a_name_that_no_loss_may_take() -> None:
    """By the documentation of `PolicyWorker.update`, which lists them next to the losses' own."""
    text = PolicyWorker.update.__doc__ or ""
    named = set(re.findall(r"actor/(\w+)", text))
    assert named and named <= REPORTED


def test_a_loss_without_a_gradient_ends_the_run() -> None:
    def own(columns: LossColumns, config: ActorConfig) -> TokenLoss:
        return TokenLoss(columns.old_logprobs)

    loss = PolicyLoss(ActorConfig(), declaration_of(own), own, RolloutCorrectionConfig())
    batch = batch_of(Row("011")).with_fields(advantages=torch.zeros(3))
    logprobs = torch.zeros(3, requires_grad=True)
    scored = Scored(batch, TokenScores(logprobs), logprobs)
    with naming(TrainingError, "loss_mode:", "column logprobs"):
        add_up([loss], scored, LossScale("token-mean", tokens=2, units=1), {})


def test_gspo_has_no_dual_clip() -> None:
    value, slope, found = one_token("gspo", 5.0, -1.0)
    assert [value, slope, found.sums["clip_frac_lower"].item()] == pytest.approx([5.0, 5.0, 0])


@pytest.mark.parametrize("mode", ["vanilla", "gspo"])
def test_a_log_ratio_beyond_20_is_clamped_before_exp(mode: str) -> None:
    assert one_token(mode, math.exp(100), -1.0, dual=1e12)[0] == pytest.approx(math.exp(20))
    assert one_token(mode, math.exp(-100), 1.0)[0] == pytest.approx(-math.exp(-20))


def test_the_losses_that_need_an_option_are_checked_with_the_config() -> None:
    """A built-in loss without options is not imported to check it, unless the registry knows that it needs one."""
    for mode in POLICY_LOSSES.names():
        model = options_model(POLICY_LOSSES.get(mode))
        if model is not None and any(field.is_required() for field in model.model_fields.values()):
            with pytest.raises(ConfigError, match=r"dro_beta"):
                POLICY_LOSSES.check(mode, {})
        else:
            POLICY_LOSSES.check(mode, {})


@pytest.mark.parametrize("mode", POLICY_LOSSES.names())
def test_masked_tokens_may_hold_anything(mode: str) -> None:
    nan = float("nan")
    old = torch.tensor([nan, -1.0, float("-inf"), -2.0])
    new = torch.tensor([nan, -1.1, float("-inf"), -1.9], requires_grad=True)
    mask, offsets = torch.tensor([False, True, False, True]), torch.tensor([0, 4])
    found = micro_loss(mode, new, old, torch.tensor([nan, 1.0, nan, -1.0]), mask, offsets)
    whole = found.by_token - 0.1 * new.exp()
    loss = aggregate(
        whole, mask, offsets, LossScale.from_policy_tokens(segment_sum(mask.double(), offsets), "seq-mean-token-mean")
    )
    loss.backward()
    assert math.isfinite(loss.item()) and all(math.isfinite(one.item()) for one in found.sums.values())
    assert new.grad is not None
    assert new.grad[~mask].nan_to_num().abs().sum() == 0 and new.grad[mask].isfinite().all()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("token-sum", 1 + 2 + 3 + 10),
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
    scale = LossScale.from_policy_tokens(segment_sum(mask.double(), offsets), mode, norm_length=50)
    assert (scale.tokens, scale.units) == (4, 2)
    total = aggregate(loss, mask, offsets, scale)
    assert total.item() == pytest.approx(expected)
    total.backward()
    assert loss.grad is not None
    assert (loss.grad[mask] > 0).all() and loss.grad[~mask].eq(0).all()


def test_a_constant_length_must_be_given() -> None:
    with pytest.raises(ValueError, match="norm_length"):
        LossScale.from_policy_tokens(torch.tensor([1]), "seq-mean-token-sum-norm")


def test_the_loss_of_no_policy_token_is_zero() -> None:
    mask, offsets = torch.zeros(2, dtype=torch.bool), torch.tensor([0, 2])
    for mode in ("token-mean", "seq-mean-token-mean"):
        scale = LossScale.from_policy_tokens(segment_sum(mask.double(), offsets), mode)
        assert aggregate(torch.ones(2), mask, offsets, scale).item() == 0.0


def test_terms_are_added_up_by_their_coefficients() -> None:
    """Advantages of 1 and 2 at a ratio of 1, entropies of 2 and 4, a KL (k1) of 3 and 1; one sequence succeeds."""
    logprobs = torch.tensor([0.0, -1.0, -1.0], requires_grad=True)
    mask, offsets = torch.tensor([False, True, True]), torch.tensor([0, 2, 3])
    batch = RaggedBatch.unsampled(offsets, torch.arange(3), mask, torch.arange(2), torch.arange(2)).with_fields(
        advantages=torch.tensor([0.0, 1.0, 2.0]),
        ref_logprobs=torch.tensor([0.0, -4.0, -2.0]),
        success=torch.tensor([True, False]),
        zero_advantage=torch.tensor([False, True]),
    )
    config = ActorConfig(
        entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.01, kl_loss_type="kl", success_nll_coef=0.5
    )
    terms = loss_terms(config, None, None, [])
    assert [term.name for term in terms] == ["pg_loss", None, "kl_loss", "success_nll"]
    scale = LossScale.from_policy_tokens(batch.policy_tokens, "token-mean")
    counts = {term.name: int(term.counts(batch).sum()) for term in terms}
    assert counts["success_nll"] == 1
    found = TokenScores(logprobs, entropy=torch.tensor([9.0, 2.0, 4.0]))
    scored = Scored(batch, found, torch.where(mask, logprobs, 0.0))
    total, sums, columns = add_up(terms, scored, scale, counts)
    assert add_up(terms[::-1], scored, scale, counts)[0].item() == pytest.approx(total.item()), "in any order"
    assert total.item() == pytest.approx(-1.5 - 0.1 * 3 + 0.01 * 2 + 0.5 * 1)
    expected = {"pg_loss": -1.5, "kl_loss": 2.0, "success_nll": 1.0, "tokens": 2.0}
    assert {name: sums[name].item() for name in expected} == pytest.approx(expected)
    assert columns["ratio"][mask].tolist() == [1.0, 1.0]
    total.backward()
    # of the policy -A / 2, of the KL 0.01 / 2, of the success -0.5 at its one token
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0.0, -0.5 + 0.005 - 0.5, -1 + 0.005])


def test_sequences_that_no_term_needs_are_left_out() -> None:
    tokens = torch.arange(3)
    batch = RaggedBatch.unsampled(torch.arange(4), tokens, torch.ones(3, dtype=torch.bool), tokens, tokens).with_fields(
        zero_advantage=torch.tensor([True, False, True]), success=torch.tensor([False, False, True])
    )

    def computed(**keys: Any) -> list[bool]:
        terms = loss_terms(ActorConfig(**keys), None, None, [])
        found: list[bool] = torch.stack([term.computes(batch) for term in terms]).any(0).tolist()
        return found

    assert computed() == [False, True, False]
    assert computed(success_nll_coef=0.5) == [False, True, True]
    assert computed(entropy_coeff=0.1) == computed(use_kl_loss=True) == [True, True, True]


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
