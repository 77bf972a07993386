"""Policy and value losses by token, and the one way they become a scalar.

A loss function returns the loss of every token; `aggregate` adds the tokens up and divides by denominators counted
beforehand over the whole mini-batch. Each micro-batch therefore adds exactly its share, and the gradient does not
depend on how the mini-batch is cut into micro-batches (nor, once the two counts are summed over ranks, into ranks):

    scale = LossScale.of(mini.policy_tokens, config.loss_agg_mode, norm_length)   # once a mini-batch
    for micro in micro_batches:                                                        # whole sequences of `mini`
        logprobs, entropy = token_logprobs(model, micro.ids, micro.offsets, with_entropy=True)
        by_token, stats = policy_loss(
            "vanilla", logprobs, micro.old_logprobs, micro.advantages, micro.mask, micro.offsets, clip)
        by_token = actor_loss(by_token, entropy=entropy, entropy_coeff=0.01)
        aggregate(by_token, micro.mask, micro.offsets, scale).backward()               # no further division
        clipped += stats.clipped; tokens += stats.tokens                               # sums, divided at the end
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.ragged import masked_sum, segment_ids, segment_sum

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this on both sides before exp."""


@dataclass(frozen=True, slots=True)
class LossScale:
    """The denominators of one mini-batch; see `aggregate`. Over several ranks, add up `tokens` and `sequences`."""

    mode: Aggregation
    tokens: int
    """Policy tokens."""
    sequences: int
    """Sequences with at least one policy token."""
    norm_length: int = 1
    """Tokens; the constant of seq-mean-token-sum-norm, 1 in the other modes."""

    @classmethod
    def of(cls, policy_tokens: Tensor, mode: Aggregation, norm_length: int | None = None) -> LossScale:
        """Count over a mini-batch: policy_tokens [N] int64, those of each sequence.

        `norm_length` is needed by, and only used in, seq-mean-token-sum-norm: a number that stays the same over the
        whole run, as the longest response allowed. Raises ValueError when it is missing there.
        """
        if mode != "seq-mean-token-sum-norm":
            norm_length = 1
        elif norm_length is None:
            raise ValueError("seq-mean-token-sum-norm needs norm_length, e.g. data.max_response_length")
        return cls(mode, int(policy_tokens.sum()), int((policy_tokens > 0).sum()), norm_length)


def aggregate(loss: Tensor, mask: Tensor, offsets: Tensor, scale: LossScale) -> Tensor:
    """Scalar: the share that these sequences have in the loss of the mini-batch that `scale` was counted on.

    loss [T] float, mask [T] bool, offsets [N + 1]. Sequences without policy tokens count nowhere.
    - token-mean: every policy token weighs the same (DAPO, arXiv:2503.14476, eq. 12)
    - seq-mean-token-sum: the mean over sequences of the sum over tokens
    - seq-mean-token-mean: the mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300, eq. 3)
    - seq-mean-token-sum-norm: seq-mean-token-sum by a constant length (Dr. GRPO, arXiv:2503.20783, section 3.2)
    """
    if scale.mode == "token-mean":
        return masked_sum(loss, mask) / max(scale.tokens, 1)
    if scale.mode == "seq-mean-token-mean":
        counts = segment_sum(mask.to(loss.dtype), offsets).clamp(min=1)
        loss = loss / counts[segment_ids(offsets)]
    return masked_sum(loss, mask) / (max(scale.sequences, 1) * scale.norm_length)


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the importance ratio r: [1 - low, 1 + high], and r <= dual where the advantage is negative."""

    low: float = 0.2
    high: float = 0.2
    dual: float = 3.0


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Sums over the policy tokens whose advantage is not 0 (scalar tensors without gradient): add those of
    micro-batches, then divide by tokens.

    The others have no gradient that a clip could cut off, and whether sequences of such tokens alone are computed at
    all changes no number.
    """

    tokens: Tensor
    clipped: Tensor
    """Tokens whose gradient the clip bounds cut off."""
    dual_clipped: Tensor
    """Tokens whose gradient the dual clip cut off."""
    kl: Tensor
    """Of old - new log-prob: k1 of KL(old || new)."""
    ratio: Tensor
    ratio_max: Tensor
    """Not a sum: take the largest over micro-batches."""


def policy_loss(
    mode: Literal["vanilla", "gspo"],
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    clip: Clip,
) -> tuple[Tensor, PolicyStats]:
    """([T] loss by token, statistics). `logprobs` [T] carries the gradient; the rest is data. 0 where mask is False."""
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    advantages = torch.where(mask, advantages, 0.0)
    return POLICY_LOSSES[mode](log_ratio, advantages, mask, offsets, clip)


def _vanilla(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor, clip: Clip
) -> tuple[Tensor, PolicyStats]:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 10) and
    the dual clip for negative advantages (arXiv:1912.09729, "Dual-clip PPO").

    r = exp(clamp(log-ratio, +-20));  L = max(-A r, -A clip(r, 1 - low, 1 + high));  where A < 0: L = min(L, -A dual).
    """
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    loss, clipped = _clipped(ratio, advantages, clip)
    bound = -advantages * clip.dual
    dual_clipped = (advantages < 0) & (loss > bound)
    loss = torch.where(dual_clipped, bound, loss)
    return loss, _stats(mask & (advantages != 0), clipped, dual_clipped, log_ratio, ratio)


def _gspo(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, offsets: Tensor, clip: Clip
) -> tuple[Tensor, PolicyStats]:
    """GSPO with a ratio by sequence (arXiv:2507.18071, eq. 7), in its token form GSPO-token (eq. 13, 14).

    s_i = exp(mean of the log-ratio over the sequence's policy tokens);  s_{i,t} = sg[s_i] * p_t / sg[p_t], so every
    token has the sequence's ratio as its value and its own log-prob's gradient. No dual clip. The paper's objective
    is the one aggregated by seq-mean-token-mean, with clip bounds of about 3e-4.
    """
    counts = segment_sum(mask.to(log_ratio.dtype), offsets).clamp(min=1)
    mean = segment_sum(log_ratio.detach(), offsets) / counts
    by_sequence = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[segment_ids(offsets)]
    ratio = (by_sequence + log_ratio - log_ratio.detach()).exp()
    loss, clipped = _clipped(ratio, advantages, clip)
    return loss, _stats(mask & (advantages != 0), clipped, torch.zeros_like(clipped), log_ratio, ratio)


POLICY_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Clip], tuple[Tensor, PolicyStats]]] = {
    "vanilla": _vanilla,
    "gspo": _gspo,
}


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """([T] max of the free and the clipped loss, [T] bool where the clipped one is larger)."""
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip.low, 1 + clip.high)
    return torch.maximum(free, bounded), bounded > free


@torch.no_grad()
def _stats(taught: Tensor, clipped: Tensor, dual_clipped: Tensor, log_ratio: Tensor, ratio: Tensor) -> PolicyStats:
    """`taught` [T] bool: the tokens that count."""
    inside = torch.where(taught, ratio, 0.0)
    return PolicyStats(
        tokens=taught.sum(),
        clipped=clipped.sum(),
        dual_clipped=dual_clipped.sum(),
        kl=-masked_sum(log_ratio, taught),
        ratio=inside.sum(),
        ratio_max=inside.max() if inside.numel() else inside.sum(),
    )


def actor_loss(
    policy: Tensor,
    *,
    entropy: Tensor | None = None,
    entropy_coeff: float = 0.0,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """[T]: policy loss - entropy_coeff * entropy + kl_coef * kl, all [T] and aggregated alike.

    The entropy bonus is PPO's (arXiv:1707.06347, eq. 9), the KL to the reference GRPO's (arXiv:2402.03300, eq. 3).
    """
    loss = policy
    if entropy is not None and entropy_coeff != 0:
        loss = loss - entropy_coeff * entropy
    if kl is not None and kl_coef != 0:
        loss = loss + kl_coef * kl
    return loss


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float
) -> tuple[Tensor, Tensor]:
    """([T] loss by token, scalar count of clipped tokens); all inputs [T], `values` carries the gradient.

    0.5 * max((v - R)^2, (clip(v, v_old +- clip_range) - R)^2): PPO's clipped value loss (arXiv:2005.12729,
    section 3, with the maximum that implementations take). 0 where mask is False.
    """
    bounded = values.clamp(old_values - clip_range, old_values + clip_range)
    free_error = torch.where(mask, values - returns, 0.0).square()
    bounded_error = torch.where(mask, bounded - returns, 0.0).square()
    clipped = (bounded_error > free_error).sum()
    return 0.5 * torch.maximum(free_error, bounded_error), clipped
