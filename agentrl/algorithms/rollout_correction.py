"""Correction for tokens that another policy sampled than the one whose gradient is taken.

The engine's kernels differ from the trainer's, and with rollouts that overlap updates the engine has older weights.
Decoupled PPO (arXiv:2110.00641) keeps two ratios apart. The loss's own ratio compares the trained policy with a
*proximal* one; the importance weight compares the proximal policy with the policy that sampled.

    L_t = w_t * loss_t(log p - log p_proximal),   w_t = f(log p_proximal - log p_engine)

Where the two log-probs are equal w is exactly 1. Everything here is by token on whole sequences, without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.policy_losses.ratio import LOG_RATIO_LIMIT
from agentrl.algorithms.ragged import segment_ids, segment_max, segment_sum

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import Criterion, RolloutCorrectionConfig

AGES = 8
"""Staleness is counted separately up to AGES - 2; all larger values count together."""
LEAST_ESS = 0.9
"""Effective sample size, a part of the policy tokens, down to which `tempered` weighs by more than the token."""
HALVINGS = 12
"""Steps in which `tempered` finds its strength."""
COUNTS = ("tokens", "weight", "weight_squared", "clipped", "masked", "gap_abs", "gap_k3")
"""Sums over the tokens of one staleness."""


@dataclass(frozen=True, slots=True)
class Corrected:
    """The correction of each token."""

    weight: Tensor  # [T] float, factor of the token's loss; 0: rejected, or masked; 0 where mask is False
    clipped: Tensor  # [T] bool, the weight is the bound


def correct(log_ratio: Tensor, mask: Tensor, offsets: Tensor, config: RolloutCorrectionConfig) -> Corrected:
    """Weigh and reject tokens by `log_ratio` [T] float, of a policy's log-probs to the engine's.

    mask [T] bool, offsets [N + 1] int64.
    """
    log_ratio = torch.where(mask, log_ratio.detach(), 0.0)
    weight, clipped = torch.ones_like(log_ratio), torch.zeros_like(mask)
    if config.rollout_is == "tempered":
        weight, clipped = _tempered(log_ratio, mask, offsets, config)
    elif config.rollout_is is not None:
        level = {"sequence": "seq_sum", "geometric": "seq_mean"}.get(config.rollout_is, "token")
        compared = _over(log_ratio, level, mask, offsets).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        weight, clipped = _bounded(compared.exp(), mask, config)
    if config.normalizes:
        by_sequence = config.rollout_is in ("sequence", "geometric")
        weight = weight / _mean_weight(weight, mask, offsets, by_sequence=by_sequence)
    if config.reject:
        weight = torch.where(kept(log_ratio, mask, offsets, config.reject), weight, 0.0)
    return Corrected(torch.where(mask, weight, 0.0), clipped)


def kept(
    log_ratio: Tensor, mask: Tensor, offsets: Tensor, reject: Mapping[Criterion, float | tuple[float, float]]
) -> Tensor:
    """Find the tokens that keep all bounds of `reject`, [T] bool; log_ratio [T] float, 0 where mask [T] bool is False.

    With l the log-ratio, clamped to +-20: `token` bounds exp(l), `sequence` exp(sum of l), `geometric` exp(mean of l),
    each over the policy tokens of the sequence. `veto` is the least value of exp(l) that any of them may have. k2 = l^2
    / 2 and k3 = exp(l) - 1 - l bound the token, or their sum, mean or maximum over the sequence's policy tokens. All
    bounds are inclusive.
    """
    change = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    divergence: dict[str, Callable[[], Tensor]] = {
        "k2": lambda: change.square() / 2,
        "k3": lambda: change.exp() - 1 - change,
    }
    keep = torch.ones_like(mask)
    for name, bounds in reject.items():
        if isinstance(bounds, tuple):
            level = {"sequence": "seq_sum", "geometric": "seq_mean"}.get(name, name)
            found = _over(change, level, mask, offsets)
            keep &= (found >= math.log(bounds[0])) & (found <= math.log(bounds[1]))
        elif name == "veto":
            keep &= -_over(-change, "seq_max", mask, offsets) >= math.log(bounds)
        else:
            level, kind = name.rsplit("_", 1)
            keep &= _over(divergence[kind](), level, mask, offsets) <= bounds
    return keep


def ages(version: Tensor, current: int) -> Tensor:
    """Return each token's staleness in the update that starts from `current`: [T] int64, 0 without a version."""
    return torch.where(version >= 0, current - version, 0).long()


def interpolated(logprobs: Tensor, rollout_logprobs: Tensor, staleness: Tensor) -> Tensor:
    """Estimate the proximal policy's log-probs [T] between the log-probs of the engine and of the trained policy.

    log p_engine + s / (s + 1) (log p - log p_engine). A token that is s versions stale was sampled s + 1 versions
    before the update's result. The proximal policy is one version before that result. staleness [T] int64.
    """
    part = (staleness / (staleness + 1)).to(logprobs.dtype)
    return rollout_logprobs + part * (logprobs.detach() - rollout_logprobs)


def tally(gap: Tensor, corrected: Corrected, mask: Tensor, staleness: Tensor) -> dict[str, Tensor]:
    """Add up over the policy tokens of each staleness: {"<staleness>/<name of COUNTS>": scalar float64}.

    gap [T] float: log-probs of the trainer less the engine's; gap_k3 estimates KL(engine || trainer), as the engine
    sampled. staleness [T] int64. The names are always the same, so that ranks can add theirs.
    """
    gap = torch.where(mask, gap.detach(), 0.0).double()
    weight = corrected.weight.double()
    k3 = kl_penalty(torch.zeros_like(gap), gap, "k3")
    rows = [mask, weight, weight.square(), corrected.clipped, mask & (weight == 0), gap.abs(), k3]
    values = torch.stack([row.double() for row in rows])
    sums = values.new_zeros(len(COUNTS), AGES).index_add_(1, staleness.clamp(0, AGES - 1), values)
    return {f"{age}/{name}": sums[row, age] for row, name in enumerate(COUNTS) for age in range(AGES)}


def correction_metrics(sums: Mapping[str, float], config: RolloutCorrectionConfig) -> dict[str, float]:
    """Reduce sums of `tally` to metrics: over all tokens, and by staleness under `<name>/staleness_<s>`.

    `rollout/logprob_gap_mean_abs` and `_kl` always. Where the loss is weighed or tokens are rejected, also the
    correction's weight_mean, ess ((sum of w)^2 / (n sum of w^2), a part of the n tokens), clipped_frac and masked_frac.
    """
    found: dict[str, float] = {}
    parts = {"": [str(age) for age in range(AGES)]} | {f"/staleness_{age}": [str(age)] for age in range(AGES)}
    for suffix, chosen in parts.items():
        total = {name: math.fsum(sums[f"{age}/{name}"] for age in chosen) for name in COUNTS}
        tokens = total["tokens"]
        if not tokens:
            continue
        found[f"rollout/logprob_gap_mean_abs{suffix}"] = total["gap_abs"] / tokens
        found[f"rollout/logprob_gap_kl{suffix}"] = total["gap_k3"] / tokens
        if config.changes_loss:
            found[f"correction/weight_mean{suffix}"] = total["weight"] / tokens
            squares = total["weight_squared"]
            found[f"correction/ess{suffix}"] = total["weight"] ** 2 / (tokens * squares) if squares else 0.0
            found[f"correction/clipped_frac{suffix}"] = total["clipped"] / tokens
            found[f"correction/masked_frac{suffix}"] = total["masked"] / tokens
    return found


def _tempered(
    log_ratio: Tensor, mask: Tensor, offsets: Tensor, config: RolloutCorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Return (weights [T], where they are a bound [T] bool): exp(l + a (S - l)), within the bounds of `config`.

    l is the token's log-ratio, S the sum over its sequence's policy tokens. The strength a, the same for all tokens, is
    the largest in [0, 1] that leaves an effective sample size of `LEAST_ESS`. 1 weighs by sequence, 0 by token; 0 is
    the fallback where every a leaves too little.
    """
    others = _over(log_ratio, "seq_sum", mask, offsets) - log_ratio

    def at(strength: float) -> tuple[Tensor, Tensor]:
        raw = (log_ratio + strength * others).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        return _bounded(raw, mask, config)

    def suffices(strength: float) -> bool:
        weight = at(strength)[0][mask].double()
        return bool(weight.sum().square() >= LEAST_ESS * len(weight) * weight.square().sum())

    low, high = 0.0, 1.0
    if suffices(high):
        return at(high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if suffices(middle) else (low, middle)
    return at(low)


def _bounded(raw: Tensor, mask: Tensor, config: RolloutCorrectionConfig) -> tuple[Tensor, Tensor]:
    """Return (weights [T], where they are a bound [T] bool)."""
    low, high = config.rollout_is_lower or 0.0, config.rollout_is_threshold
    outside = (raw < low) | (raw > high)
    if config.rollout_is_outside == "truncate":
        return raw.clamp(low, high), outside & mask
    return torch.where(outside, 0.0, raw), torch.zeros_like(mask)


def _over(values: Tensor, level: str, mask: Tensor, offsets: Tensor) -> Tensor:
    """Return `values` [T] for `token`, or their sum, mean or maximum over each sequence's policy tokens, by token."""
    if level == "token":
        return values
    if level == "seq_max":
        by_sequence = segment_max(torch.where(mask, values, -math.inf), offsets)
    else:
        by_sequence = segment_sum(torch.where(mask, values, 0.0), offsets)
        if level == "seq_mean":
            by_sequence = by_sequence / segment_sum(mask.to(values.dtype), offsets).clamp(min=1)
    return by_sequence[segment_ids(offsets, len(values))]


def _mean_weight(weight: Tensor, mask: Tensor, offsets: Tensor, *, by_sequence: bool) -> Tensor:
    """Average weights over policy tokens, or over sequences with one; scalar, 1 where all weights are 0."""
    weight, ones = torch.where(mask, weight, 0.0).double(), mask.double()
    if by_sequence:
        counts = segment_sum(ones, offsets)
        weight, ones = segment_sum(weight, offsets) / counts.clamp(min=1), (counts > 0).double()
    mean = weight.sum() / ones.sum().clamp(min=1)
    return torch.where(mean > 0, mean, 1.0)
