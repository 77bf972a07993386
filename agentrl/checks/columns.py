"""Checks that the update goes over the sequences, and the numbers, that the estimate gave it: once in each epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from agentrl.algorithms.ragged import segment_ids
from agentrl.checks.finding import Finding
from agentrl.trajectory.batch import RaggedBatch

SEALED = ("ids", "advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs", "correction", "staleness", "success")
"""Columns whose values an update must not change."""
_MULTIPLIERS = (0x7FB5D329728EA185, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85)
NAMED = 5
"""Sequences that are named at most."""

Seal = tuple[int, ...]
"""Trajectory of a sequence, then a hash of each of SEALED over its policy tokens."""


def seal(batch: RaggedBatch) -> Tensor:
    """Hash the policy tokens of each sequence, their places and their values bit for bit: a `Seal` a row, int64."""
    place = torch.arange(batch.num_tokens, device=batch.ids.device)
    owner = segment_ids(batch.offsets)
    place = place - batch.offsets[:-1][owner]
    found = [batch.trajectory]
    for name in SEALED:
        column: Tensor | None = getattr(batch, name)
        if column is None:
            found.append(torch.zeros_like(batch.trajectory))
            continue
        column = column[owner] if name in batch.sequences else column
        bits = column.contiguous().view(torch.int32) if column.is_floating_point() else column
        mixed = (bits.long() + place * _MULTIPLIERS[0]) * _MULTIPLIERS[1]
        mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIERS[2]
        mixed = torch.where(batch.mask, mixed ^ (mixed >> 32), 0)
        found.append(torch.zeros_like(batch.trajectory).index_add_(0, owner, mixed))
    return torch.stack(found, dim=1)


def check_trained(
    estimated: Tensor, trained: Sequence[Seal], epochs: int, optional: Collection[int], name: Callable[[int], str]
) -> Iterator[Finding]:
    """Compare the sequences of the estimate with the sequences that the loss was computed of.

    trained: one for each time. optional: indices of sequences that need not be computed. name: of a trajectory.
    """
    wanted = [tuple(one) for one in estimated.tolist()]
    seen, told = Counter(trained), 0
    strange = [one for one in seen if one not in set(wanted)]
    by_ids = {one[:2]: one for one in strange}
    needed = Counter(one for row, one in enumerate(wanted) if row not in optional)
    for one, copies in Counter(wanted).items():
        least, most = needed[one] * epochs, copies * epochs
        if least <= seen[one] <= most or not one[1] or told >= NAMED:
            continue
        told += 1
        other = by_ids.pop(one[:2], None)
        if other is not None:
            changed = [column for column, a, b in zip(SEALED, one[1:], other[1:], strict=True) if a != b]
            what = f"the update's {', '.join(changed)} of a sequence are not those of the estimate"
        else:
            what = f"the update went {seen[one]} times over a sequence in {epochs} epochs"
        yield Finding("update", what, name(one[0]))
    for one in list(by_ids.values())[: NAMED - told]:
        yield Finding(
            "update", "the update went over a sequence with tokens that the estimate does not know", name(one[0])
        )
