"""The one way in which losses by token become a scalar.

`aggregate` adds the tokens up and divides by denominators counted beforehand over the whole mini-batch. Each
micro-batch therefore adds exactly its share. The gradient does not depend on the cut into micro-batches or, once the
two counts are summed over ranks, into ranks:

    scale = LossScale.from_policy_tokens(mini.policy_tokens, config.loss_agg_mode, norm_length)   # once a mini-batch
    for micro in micro_batches:                                                   # whole sequences of `mini`
        by_token = ...                                                            # [T]
        aggregate(by_token, micro.mask, micro.offsets, scale).backward()          # no further division
    optimizer.step()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from agentrl.algorithms.ragged import masked_sum, segment_ids, segment_sum

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import LossAggMode


@dataclass(frozen=True, slots=True)
class LossScale:
    """The denominators of one mini-batch; see `aggregate`. Over several ranks, add up `tokens` and `sequences`."""

    mode: LossAggMode
    tokens: int
    """Policy tokens."""
    sequences: int
    """Sequences with at least one policy token."""
    norm_length: int = 1
    """Tokens; the constant of seq-mean-token-sum-norm, 1 in the other modes."""

    @classmethod
    def from_policy_tokens(cls, policy_tokens: Tensor, mode: LossAggMode, norm_length: int | None = None) -> LossScale:
        """Count over a mini-batch: policy_tokens [N] int64, the policy tokens of each sequence.

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
    - token-sum: the sum over policy tokens; the gradient grows with the batch, so the learning rate has to fit it
    - seq-mean-token-sum: the mean over sequences of the sum over tokens
    - seq-mean-token-mean: the mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300, eq. 3)
    - seq-mean-token-sum-norm: seq-mean-token-sum by a constant length (Dr. GRPO, arXiv:2503.20783, section 3.2)
    """
    if scale.mode == "token-sum":
        return masked_sum(loss, mask)
    if scale.mode == "token-mean":
        return masked_sum(loss, mask) / max(scale.tokens, 1)
    if scale.mode == "seq-mean-token-mean":
        counts = segment_sum(mask.to(loss.dtype), offsets).clamp(min=1)
        loss = loss / counts[segment_ids(offsets)]
    return masked_sum(loss, mask) / (max(scale.sequences, 1) * scale.norm_length)
