"""Forward passes without gradient over a rank's share, in micro-batches, in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from agentrl.parallel.collectives import all_max
from agentrl.runtime.ranks import join_tokens
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.plan import micro_batches


def forward_tokens(
    forward: Callable[[RaggedBatch], torch.Tensor],
    batch: RaggedBatch,
    max_tokens: int,
    device: torch.device,
    *,
    shares: bool,
) -> torch.Tensor:
    """Run `forward` ([tokens, ...] of a micro-batch) over all of `batch` without gradient: [T, ...] on the CPU.

    shares: its model computes common beginnings of sequences once (`shares_beginnings`), so that sessions of several
    transcripts are planned by their distinct tokens.
    """
    return forward_columns(lambda micro: [forward(micro)], batch, max_tokens, device, shares=shares)[0]


def forward_columns(
    forward: Callable[[RaggedBatch], Sequence[torch.Tensor]],
    batch: RaggedBatch,
    max_tokens: int,
    device: torch.device,
    *,
    shares: bool,
) -> list[torch.Tensor]:
    """Do as `forward_tokens` with a function that gives several columns [T, ...] of a micro-batch."""
    plan = micro_batches(batch, max_tokens, device if shares else None)
    rounds = max(1, all_max(len(plan), device))  # asked before, as every forward is a call of all ranks, too
    with torch.no_grad():
        results = [[one.cpu() for one in forward(to_device(batch.select(rows), device))] for rows in plan]
        # A rank with fewer micro-batches keeps step by fillers; a rank without micro-batches gets the result's shape
        # from a filler.
        for _ in range(rounds - len(plan)):
            of_nothing = [one[:0].cpu() for one in forward(to_device(filler(batch), device))]
    return [join_tokens(column, plan, batch) for column in zip(*results, strict=True)] if plan else of_nothing


def filler(like: RaggedBatch) -> RaggedBatch:
    """Make one token that the policy did not sample, with the columns of `like`.

    For a rank that has no more work than to keep step with the others.
    """

    tensors = {name: values.new_zeros(1, *values.shape[1:]) for name, values in like.tokens.items()}
    tensors |= {name: tensors[name] - 1 for name in ("version", "turn", "teacher") if name in tensors}
    sequences = {name: values.new_zeros(1) for name, values in like.sequences.items()}
    return RaggedBatch(torch.tensor([0, 1]), tensors, sequences, like.policies)


def to_device(batch: RaggedBatch, device: torch.device) -> RaggedBatch:
    """Copy every tensor of the batch to `device`; images go there when they are looked at."""
    if device.type == "cpu":
        return batch
    return batch.mapped(lambda values: values.to(device))
