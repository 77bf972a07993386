"""The one way in which losses by token, and the terms of a loss, become a scalar.

`aggregate` adds the tokens up and divides by denominators counted beforehand over the whole mini-batch. Each
micro-batch therefore adds exactly its share. The gradient does not depend on the cut into micro-batches or, once the
counts are summed over ranks, into ranks:

    mini = with_loss_units(mini, config.loss_unit)                                # once a mini-batch
    scale = LossScale.from_policy_tokens(mini.policy_tokens, config.loss_agg_mode, norm_length, mini.loss_unit)
    for micro in micro_batches:                                                   # whole sequences of `mini`
        by_token = ...                                                            # [T]
        aggregate(by_token, micro.mask, micro.offsets, scale, micro.unit_tokens).backward()   # no further division
    optimizer.step()

The mean of each `seq-mean-*` is over units: trajectories, however many sequences each has. Two columns by sequence name
a sequence's unit, and count the unit's policy tokens. So the sequences of a unit may lie in several micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from agentrl.algorithms.ragged import by_role, masked_sum, segment_ids, segment_sum, sum_by
from agentrl.errors import TrainingError

if TYPE_CHECKING:
    from agentrl.config.declaration import Score
    from agentrl.config.sections.algorithm import LossAggMode, LossUnit
    from agentrl.model.scores import Compare, TokenScores
    from agentrl.trajectory.batch import RaggedBatch, Sequences

Batch = TypeVar("Batch", bound="Sequences")


def with_loss_units(batch: Batch, unit: LossUnit) -> Batch:
    """Add the columns loss_unit and unit_tokens: the trajectory, and its role where there are roles, or the transcript.

    The unit is that of the advantage. So cutting a trajectory into other transcripts changes no weight of a token.
    """
    if unit == "transcript":
        units = torch.arange(len(batch))
    else:
        units = by_role(batch.trajectory, batch.sequences.get("role"))
    return batch.with_fields(loss_unit=units, unit_tokens=sum_by(units, batch.policy_tokens)[units])


@dataclass(frozen=True, slots=True)
class LossScale:
    """The denominators of one mini-batch; see `aggregate`. Over several ranks, add up `tokens` and `units`."""

    mode: LossAggMode
    tokens: int
    """Policy tokens."""
    units: int
    """Units of the mean by sequence with at least one policy token."""
    norm_length: int = 1
    """Tokens; the constant of seq-mean-token-sum-norm, 1 in the other modes."""

    @classmethod
    def from_policy_tokens(
        cls, policy_tokens: Tensor, mode: LossAggMode, norm_length: int | None = None, loss_unit: Tensor | None = None
    ) -> LossScale:
        """Count over a mini-batch: policy_tokens [N] int64, the policy tokens of each sequence.

        loss_unit: the column [N] int64; None: each sequence is a unit. `norm_length` is needed by, and only used in,
        seq-mean-token-sum-norm: a number that stays the same over the whole run, as the longest response allowed.
        Raises ValueError when it is missing there.
        """
        if mode != "seq-mean-token-sum-norm":
            norm_length = 1
        elif norm_length is None:
            raise ValueError("seq-mean-token-sum-norm needs norm_length, e.g. data.max_response_length")
        loss_unit = torch.arange(len(policy_tokens)) if loss_unit is None else loss_unit
        return cls(mode, int(policy_tokens.sum()), len(loss_unit[policy_tokens > 0].unique()), norm_length)


def aggregate(
    loss: Tensor, mask: Tensor, offsets: Tensor, scale: LossScale, unit_tokens: Tensor | None = None
) -> Tensor:
    """Scalar: the share that these sequences have in the loss of the mini-batch that `scale` was counted on.

    loss [T] float, mask [T] bool, offsets [N + 1], unit_tokens: the column [N] int64; None: each sequence is a unit.
    Sequences without policy tokens count nowhere.
    - token-mean: every policy token weighs the same (DAPO, arXiv:2503.14476, eq. 12)
    - token-sum: the sum over policy tokens; the gradient grows with the batch, so the learning rate has to fit it
    - seq-mean-token-sum: the mean over units of the sum over tokens
    - seq-mean-token-mean: the mean over units of the mean over tokens (GRPO, arXiv:2402.03300, eq. 3)
    - seq-mean-token-sum-norm: seq-mean-token-sum by a constant length (Dr. GRPO, arXiv:2503.20783, section 3.2)
    """
    if scale.mode == "token-sum":
        return masked_sum(loss, mask)
    if scale.mode == "token-mean":
        return masked_sum(loss, mask) / max(scale.tokens, 1)
    if scale.mode == "seq-mean-token-mean":
        counts = segment_sum(mask.to(loss.dtype), offsets) if unit_tokens is None else unit_tokens
        loss = loss / counts.clamp(min=1)[segment_ids(offsets, len(loss))]
    return masked_sum(loss, mask) / (max(scale.units, 1) * scale.norm_length)


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
    micro = scored.micro
    total = partial(aggregate, mask=micro.mask, offsets=micro.offsets, scale=scale, unit_tokens=micro.unit_tokens)
    shares = [(term, term.share(scored, counts.get(term.name, 0))) for term in terms]
    sums: dict[str, Tensor] = {}
    columns: dict[str, Tensor] = {}
    for term, share in shares:
        value = share.value.detach()
        if term.name is not None:
            sums[term.name] = total(value) if term.by_token else value
        sums |= share.sums
        columns |= share.columns
    by_token: list[Tensor] = []
    scalars: list[Tensor] = []
    for term, share in [one for one in shares if one[0].coef != 0] or shares[:1]:
        weighed = share.value if term.coef == 1 else term.coef * share.value
        (by_token if term.by_token else scalars).append(weighed)
    if by_token:
        scalars.insert(0, total(reduce(add, by_token)))
    loss = reduce(add, scalars)
    if scored.logprobs.requires_grad and not loss.requires_grad:
        raise TrainingError(
            f"{terms[0].key}: the loss has no gradient; compute it from the column logprobs, which has one"
        )
    return loss, sums, columns
