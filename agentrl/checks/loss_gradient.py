"""The loss's derivative by each token's log-prob in closed form, from the batch's columns and the config.

It shares no code with the loss: each formula was derived by hand from the loss of the same name. So it is compared with
the gradient that entered the backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.ragged import segment_ids
from agentrl.algorithms.rollout_correction import correct
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import LossAggMode, LossUnit, RolloutCorrectionConfig
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.observe.watch import Counts, Owner, owners_of
from agentrl.trajectory.batch import RaggedBatch

MOST = 20.0
"""Log-ratios are cut off at this on both sides, and have no gradient further out."""
EDGE = 1e-5
"""Tokens closer than this to a bound may lie on either side of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKeys:
    """Keys of the config that a loss depends on."""

    actor: ActorConfig
    correction: RolloutCorrectionConfig
    distillation: DistillationConfig | None
    """None: no teacher is in the loss."""
    norm_length: int | None


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the loss: `coef` times `slope` is its part of the derivative."""

    coef: float
    slope: Tensor  # [T] float64
    scale: Tensor  # [T] float64: the size of the numbers that were added up to the slope, for the rounding


@dataclass(frozen=True, slots=True)
class Slopes:
    """Derivatives of a micro-batch's share of the loss."""

    terms: Mapping[str, Term]
    """By log-prob. The policy's own term is `policy`."""
    entropy: Tensor  # [T] float64, by entropy
    unsure: Tensor  # [T] bool, tokens at a bound


def slopes(micro: RaggedBatch, logprobs: Tensor, counts: Counts, keys: LossKeys) -> Slopes | None:
    """Compute the derivatives; None where the policy loss has no closed form here. logprobs [T] float32."""
    actor, mask = keys.actor, micro.mask
    weight = token_weights(micro, actor.loss_agg_mode, actor.loss_unit, counts, keys.norm_length)
    p = torch.where(mask, logprobs, 0.0)
    tokens = _tokens(micro, p, keys)
    derived = policy_slope(tokens, actor)
    if derived is None:
        return None
    slope, unsure = derived
    share = 1.0 if keys.distillation is None else keys.distillation.policy_loss_coef
    by_engine = _correction(micro, p, tokens, keys.correction)
    weighed = weight * by_engine
    size = torch.maximum(slope.abs(), tokens.advantages.abs())
    if actor.policy_loss.loss_mode == "dro":  # the log-ratio itself is in it, which log-probs round, as in a KL's slope
        size = size + 0.01 * float(actor.policy_loss.options["dro_beta"])
    terms = {"policy": Term(share, weighed * slope, weighed * size)}
    if actor.use_kl_loss and actor.kl_loss_coef:
        assert micro.ref_logprobs is not None
        k = kl_slope(p.double() - micro.ref_logprobs.double(), actor.kl_loss_type)
        terms["kl"] = Term(actor.kl_loss_coef, weight * k, weight * (k.abs() + 0.01))
    if keys.distillation is not None and keys.distillation.scope == "sampled":
        terms["teacher"] = _teacher(micro, p, weight, keys.distillation)
    if actor.success_nll_coef:
        assert micro.success is not None
        of_success = torch.where(mask & micro.success[tokens.owner], -1.0 / max(counts.successful, 1), 0.0).double()
        terms["success"] = Term(actor.success_nll_coef, of_success, of_success.abs())
    if actor.observation_nll_coef:
        after = mask.long().cumsum(0)
        begun = after - (after - mask.long())[micro.offsets[:-1]][tokens.owner]
        read = torch.where(~mask & (begun > 0), -1.0 / max(counts.read, 1), 0.0).double()
        terms["observation"] = Term(actor.observation_nll_coef, read, read.abs())
    return Slopes(terms, -counts.entropy_coeff * weight, unsure & mask)


@dataclass(frozen=True, slots=True)
class _Tokens:
    change: Tensor  # [T] float64, log p - log p of the proximal policy
    advantages: Tensor  # [T] float64
    mask: Tensor  # [T] bool
    owner: Tensor  # [T] int64, the sequence
    sequences: int
    p: Tensor  # [T] float64, log-probs
    old: Tensor  # [T] float64
    rollout: Tensor  # [T] float64, the engine's log-probs
    selected: Tensor  # [T] bool

    def total(self, values: Tensor) -> Tensor:
        """Add up over each token's sequence."""
        sums = values.new_zeros(self.sequences).index_add_(0, self.owner, torch.where(self.mask, values, 0.0))
        return sums[self.owner]


def _tokens(micro: RaggedBatch, p: Tensor, keys: LossKeys) -> _Tokens:
    mask = micro.mask
    advantages = micro.advantages
    assert advantages is not None
    rollout = torch.where(mask, micro.rollout_logprobs, 0.0).double()
    match keys.correction.proximal:
        case "rollout":
            old = rollout
        case "interpolated":
            assert micro.staleness is not None
            behind = micro.staleness.double()
            old = (rollout + behind * p.double()) / (1 + behind)
        case _:
            old = p.double() if micro.old_logprobs is None else micro.old_logprobs.double()
    old = torch.where(mask, old, 0.0)
    selected = torch.zeros_like(mask) if micro.selected is None else micro.selected & mask
    return _Tokens(
        change=p.double() - old,
        advantages=torch.where(mask, advantages, 0.0).double(),
        mask=mask,
        owner=segment_ids(micro.offsets, micro.num_tokens),
        sequences=len(micro),
        p=p.double(),
        old=old,
        rollout=rollout,
        selected=selected,
    )


def token_weights(
    micro: RaggedBatch, mode: LossAggMode, unit: LossUnit, counts: Counts, norm_length: int | None
) -> Tensor:
    """Compute the weight [T] float64 of each token in the loss of a mini-batch: 0 off the mask."""
    mask = micro.mask.double()
    if mode == "token-sum":
        return mask
    if mode == "token-mean":
        return mask / max(int(counts.policy_tokens.sum()), 1)
    owner, (of_sequence, units) = segment_ids(micro.offsets, micro.num_tokens), _units(micro, unit, counts)
    if mode == "seq-mean-token-sum":
        return mask / units
    if mode == "seq-mean-token-sum-norm":
        return mask / (units * float(norm_length or 1))
    return mask / (of_sequence[owner].clamp(min=1) * units)


def _units(micro: RaggedBatch, unit: LossUnit, counts: Counts) -> tuple[Tensor, int]:
    """Return (policy tokens of the unit of each of micro's sequences, [N] float64; units of the mini-batch)."""
    if unit == "transcript":
        mask = micro.mask.double()
        of_sequence = mask.new_zeros(len(micro)).index_add_(0, segment_ids(micro.offsets, micro.num_tokens), mask)
        return of_sequence, max(int((counts.policy_tokens > 0).sum()), 1)
    tokens: Counter[Owner] = Counter()
    for name, count in zip(counts.owners, counts.policy_tokens.tolist(), strict=True):
        tokens[name] += count
    own = [tokens[name] for name in owners_of(micro, range(len(micro)))]
    return torch.tensor(own, dtype=torch.float64, device=micro.mask.device), max(len(+tokens), 1)


def _correction(micro: RaggedBatch, p: Tensor, tokens: _Tokens, keys: RolloutCorrectionConfig) -> Tensor | float:
    """Return the factor of the policy's term, [T]."""
    if keys.needs_pass:
        return 1.0 if micro.correction is None else micro.correction.double()
    proximal = p if keys.proximal == "rollout" else tokens.old.to(p.dtype)
    gap = proximal - torch.where(micro.mask, micro.rollout_logprobs, 0.0)
    return correct(gap, micro.mask, micro.offsets, keys).weight.double()


def kl_slope(change: Tensor, kind: str) -> Tensor:
    """Differentiate an estimate of the KL by log p; change [T] float64: log p - log q."""
    if kind.endswith("+") or kind in ("mse", "k2"):
        return change
    if kind in ("kl", "k1"):
        return torch.ones_like(change)
    if kind == "abs":
        return change.sign()
    inside = (change.abs() < MOST) & (torch.expm1(-change.clamp(-MOST, MOST)) + change < 10)
    return torch.where(inside, -torch.expm1(-change.clamp(-MOST, MOST)), 0.0)


def _teacher(micro: RaggedBatch, p: Tensor, weight: Tensor, keys: DistillationConfig) -> Term:
    assert micro.teacher is not None and micro.teacher_scores is not None
    scores = micro.teacher_scores
    taught = micro.mask & (micro.teacher >= 0)
    change = torch.where(taught, p.double() - (scores[:, 0] if scores.ndim == 2 else scores).double(), 0.0)
    k = torch.where(taught, kl_slope(change, keys.estimator), 0.0)
    if keys.max_divergence is not None:
        value = {"k1": change, "k2": change.square() / 2, "k3": torch.expm1(-change.clamp(-MOST, MOST)) + change}
        k = torch.where(value[keys.estimator].abs() <= keys.max_divergence, k, 0.0)
    return Term(keys.coef, weight * k, weight * (k.abs() + 0.01))


def policy_slope(t: _Tokens, keys: ActorConfig) -> tuple[Tensor, Tensor] | None:
    """Return the policy loss's derivative by log p [T] and the tokens at a bound [T]; None for a loss not listed."""
    low, high, up, down = keys.clip_low, keys.clip_high, t.advantages > 0, t.advantages < 0
    change = t.change.clamp(-MOST, MOST)
    ratio, moves, options = change.exp(), (t.change.abs() < MOST).double(), keys.policy_loss.options
    nowhere = torch.zeros_like(t.mask)
    match keys.policy_loss.loss_mode:
        case "vanilla" | "clip_cov" as mode:
            cut = up & (ratio > 1 + high) | down & (ratio < 1 - low)
            edge = _near(ratio, 1 + high) | _near(ratio, 1 - low)
            if mode == "clip_cov":
                cut |= t.selected
            else:
                cut |= down & (ratio > keys.clip_ratio_c)
                edge |= _near(ratio, keys.clip_ratio_c)
            return torch.where(cut, 0.0, -t.advantages * ratio * moves), edge
        case "gspo":
            ratio = (t.total(t.change) / t.total(t.mask.double()).clamp(min=1)).clamp(-MOST, MOST).exp()
            cut = up & (ratio > 1 + high) | down & (ratio < 1 - low)
            return torch.where(cut, 0.0, -t.advantages * ratio), _near(ratio, 1 + high) | _near(ratio, 1 - low)
        case "geo_mean":
            over, under = up & (change > high), down & (change < -low)
            held = torch.where(over, high, torch.where(under, -low, change))
            mean = (t.total(held) / t.total(t.mask.double()).clamp(min=1)).clamp(-MOST, MOST).exp()
            slope = torch.where(over | under, 0.0, -t.advantages * mean * moves)
            return slope, _near(change, high) | _near(change, -low)
        case "cispo":
            return -t.advantages * ratio.clamp(1 - low, 1 + high), nowhere
        case "gpg":
            return -t.advantages, nowhere
        case "dro":
            return float(options["dro_beta"]) * change * moves - t.advantages, nowhere
        case "sapo":
            width = torch.where(up, float(options.get("tau_pos", 1.0)), float(options.get("tau_neg", 1.05)))
            gate = torch.sigmoid(width * (ratio - 1))
            return -4 * t.advantages * gate * (1 - gate) * ratio * moves, nowhere
        case "topr":
            return -t.advantages * torch.where(down, t.total(t.change).clamp(max=0.0).exp(), 1.0), nowhere
        case "m2po":
            since = t.p - t.rollout
            by_engine = since.clamp(-MOST, MOST).exp() * (since.abs() < MOST)
            return torch.where(t.selected, 0.0, -t.advantages * by_engine), nowhere
    return None


def _near(values: Tensor, bound: float) -> Tensor:
    return (values - bound).abs() < EDGE * max(abs(bound), 1.0)
