"""The one way in which losses by token, and the terms of a loss, become a scalar.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algorithms.ragged import masked_sum, segment_ids, segment_sum
from agentrl.errors import TrainingError

if TYPE_CHECKING:
    from agentrl.config.declaration import Score
    from agentrl.config.sections.algorithm import LossAggMode
    from agentrl.model.scores import Compare, TokenScores
    from agentrl.trajectory.batch import RaggedBatch, Sequences


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


@dataclass(frozen=True, slots=True)
class Scored:
    """A micro-batch and the result of its forward pass."""

    micro: RaggedBatch
    found: TokenScores
    logprobs: Tensor
    """[T] with gradient: `found.logprobs`, and 0 where mask is False."""


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch's part of a term."""

    value: Tensor
    """With gradient and without the coefficient: [T] of a term by token, else a scalar."""
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars without gradient, to be added up over the update."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[T] without gradient, for the record."""


class Term:
    """One term of the policy's loss."""

    name: str | None = None
    """Its sum, whose mean is the metric actor/<name>; None: it is not reported."""
    key: str
    """The key of the config that asks for it, for messages."""
    by_token: bool = True
    coef: float
    """Its factor in the loss."""
    columns: Sequence[str] = ()
    """Columns of the batch that it needs."""

    def share(self, scored: Scored, count: int) -> Share:
        """Compute the part of a micro-batch. count: the sum of `counts` over the mini-batch."""
        raise NotImplementedError

    def scores(self) -> Sequence[Score]:
        """List the scores of the forward pass that it needs in addition to log-probs."""
        return ()

    def counts(self, batch: Sequences) -> Tensor:
        """Count the tokens of each sequence that a term not by token is a mean over: [N] int64."""
        return torch.zeros(len(batch), dtype=torch.int64)

    def computes(self, batch: Sequences) -> Tensor:
        """Mark the sequences [N] bool that the term teaches the policy something by; the others have no gradient."""
        return torch.ones(len(batch), dtype=torch.bool)

    def reads(self) -> Callable[[RaggedBatch], Tensor] | None:
        """Return the function that marks the tokens [T] of a micro-batch whose log-probs it reads; None: the mask."""
        return None

    def comparison(self) -> Callable[[RaggedBatch], Compare] | None:
        """Return the function that makes a `Compare` of a micro-batch; None: it reads no distributions."""
        return None


def add_up(
    terms: Sequence[Term], scored: Scored, scale: LossScale, counts: Mapping[str | None, int]
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Compute (loss, a scalar with gradient; sums, scalars; columns [T]) of a micro-batch from at least one term.

    scale: denominators of the mini-batch. counts: by a term's name, the sum of its `counts` over the mini-batch. Terms
    by token are added and aggregated together, then the others are added. A term with a coefficient of 0 is reported,
    and adds no gradient. Raises TrainingError for a loss without a gradient.
    """
    mask, offsets = scored.micro.mask, scored.micro.offsets
    shares = [(term, term.share(scored, counts.get(term.name, 0))) for term in terms]
    sums: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    for term, share in shares:
        value = share.value.detach()
        if term.name is not None:
            sums[term.name] = aggregate(value, mask, offsets, scale) if term.by_token else value
        sums |= share.sums
        columns |= share.columns
    by_token: list[Tensor] = []
    scalars: list[Tensor] = []
    for term, share in [one for one in shares if one[0].coef != 0] or shares[:1]:
        weighed = share.value if term.coef == 1 else term.coef * share.value
        (by_token if term.by_token else scalars).append(weighed)
    if by_token:
        scalars.insert(0, aggregate(reduce(add, by_token), mask, offsets, scale))
    loss = reduce(add, scalars)
    if scored.logprobs.requires_grad and not loss.requires_grad:
        raise TrainingError(
            f"{terms[0].key}: the loss has no gradient; compute it from the column logprobs, which has one"
        )
    return loss, sums, columns
