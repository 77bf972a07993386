"""Plan which sequences are updated together: mini-batches (an optimizer step each), micro-batches (a forward each).

Both follow from the batch and a seed alone, so every rank makes the same plan and a resumed run repeats it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from agentrl.model.packed import named_apart
from agentrl.model.tree_layout import MIN_SHARED, pays, sort_by_tokens
from agentrl.runtime.ranks import shares
from agentrl.trajectory.batch import RaggedBatch, Sequences, split_by_tokens


def update_plan(group: torch.Tensor, prompts: int, epochs: int, shuffle_key: str | None) -> list[tuple[str, list[int]]]:
    """Plan the optimizer steps of one update: (place, for messages; sequence indices) of each. `group` [N] int64.

    See `mini_batches`.
    """
    steps = []
    for epoch in range(1, epochs + 1):
        plan = mini_batches(group, prompts, None if shuffle_key is None else f"{shuffle_key}/{epoch}")
        for number, rows in enumerate(plan, start=1):
            steps.append((f"epoch {epoch} of {epochs}, mini-batch {number} of {len(plan)}", rows))
    return steps


def mini_batches(group: torch.Tensor, prompts: int, shuffle_key: str | None) -> list[list[int]]:
    """Split sequences into mini-batches, given as sequence indices; all sequences of a prompt go together.

    Args:
        group: [N] int64, the prompt of each sequence.
        prompts: the most prompts a mini-batch may hold. Their number is as even as possible over the mini-batches.
            So a batch from which prompts were left out does not end in a small and noisy step.
        shuffle_key: prompts are shuffled by this text, e.g. "<seed>/<step>/<epoch>"; None keeps their order.
    """
    order = torch.unique(group).tolist()
    if shuffle_key is not None:
        random.Random(shuffle_key).shuffle(order)
    count = -(-len(order) // prompts)
    bounds = [len(order) * i // count for i in range(count + 1)] if count else []
    rows = _rows_by_group(group)
    return [[row for prompt in order[start:end] for row in rows[prompt]] for start, end in itertools.pairwise(bounds)]


def micro_batches(batch: RaggedBatch, max_tokens: int, shared_on: torch.device | None = None) -> list[list[int]]:
    """Split sequences into micro-batches of at most `max_tokens` tokens; a longer sequence goes alone.

    The sequences of a prompt stay together where they fit, because their shared prefix is computed once.

    shared_on: the device of a model that computes common beginnings once. There, a prompt with a session of several
    transcripts is planned by the tokens that its tree stores (see `_runs`). A run of its transcripts may have as many
    tokens as the longest sequence, which is a micro-batch in any case. None: each sequence counts whole.
    """
    lengths = batch.lengths.tolist()
    of_sessions = _with_sessions(batch) if shared_on is not None and batch.images is None else set()
    most = max([max_tokens, *lengths]) if of_sessions else max_tokens
    pieces: list[list[int]] = []
    sizes: list[int] = []
    trees: list[list[int]] = []
    tree_sizes: list[int] = []
    for prompt, rows in _rows_by_group(batch.group).items():
        flat = rows
        if shared_on is not None and prompt in of_sessions:
            flat = []
            for run in _runs(batch, rows, most):
                if pays(run.flat, run.stored, on_gpu=shared_on.type == "cuda"):
                    trees.append(run.rows)
                    tree_sizes.append(run.stored)
                else:
                    flat += run.rows
        for part in split_by_tokens([lengths[row] for row in flat], max_tokens):
            pieces.append([flat[i] for i in part])
            sizes.append(sum(lengths[flat[i]] for i in part))
    return [
        [row for i in part for row in of_kind[i]]
        # Apart, as a device would share nothing of a micro-batch of both that saves too little.
        for of_kind, found in ((pieces, sizes), (trees, tree_sizes))
        for part in split_by_tokens(found, max_tokens)
    ]


def rank_shares(batch: Sequences, ranks: int, shared_on: torch.device | None = None) -> list[list[int]]:
    """Split sequences over ranks as `shares` does; return the indices of each rank, ascending.

    Where a model computes common beginnings once (`shared_on` as of `micro_batches`), a session's transcripts go to one
    rank, by the tokens that they store together, unless the fullest rank then has more tokens than with all apart.
    """
    lengths, own = batch.lengths.tolist(), batch.sequences.get("own_tokens")
    apart = shares(lengths, ranks)
    if ranks == 1 or shared_on is None or own is None or torch.equal(own, batch.lengths):
        return apart
    of_trajectory: dict[int, list[int]] = {}
    for row, trajectory in enumerate(batch.trajectory.tolist()):
        of_trajectory.setdefault(trajectory, []).append(row)
    units: list[list[int]] = []
    sizes: list[int] = []
    for rows in of_trajectory.values():
        flat, stored = sum(lengths[row] for row in rows), int(own[rows].sum())
        whole = pays(flat, stored, on_gpu=shared_on.type == "cuda")
        units += [rows] if whole else [[row] for row in rows]
        sizes += [stored] if whole else [lengths[row] for row in rows]
    together = shares(sizes, ranks)
    if max(sum(sizes[unit] for unit in part) for part in together) > max(
        sum(lengths[row] for row in part) for part in apart
    ):
        return apart
    return [sorted(row for unit in part for row in units[unit]) for part in together]


@dataclass(frozen=True, slots=True)
class _Run:
    """Sequences that follow each other in the order of their tokens."""

    rows: list[int]
    flat: int
    """Their tokens."""
    stored: int
    """Tokens that their tree stores, at most."""


def _with_sessions(batch: RaggedBatch) -> set[int]:
    """Find the prompts with a trajectory of several sequences."""
    trajectories, counts = torch.unique(batch.trajectory, return_counts=True)
    if len(trajectories) == len(batch):
        return set()
    several = torch.isin(batch.trajectory, trajectories[counts > 1])
    return set(batch.group[several].tolist())


def _runs(batch: RaggedBatch, rows: Sequence[int], most: int) -> list[_Run]:
    """Cut sequences, in the order of their tokens, into runs whose trees store at most `most` tokens each.

    A longer sequence goes alone. All runs together store as few tokens as such cuts allow; of several ways with as few,
    the one with fewest runs is taken.
    """
    names, bounds = batch.ids, batch.offsets.tolist()
    if batch.experts is not None and batch.experts.ndim > 1:
        names = named_apart(names, batch.experts)
    tokens = [names[bounds[row] : bounds[row + 1]].numpy() for row in rows]
    order, common = sort_by_tokens(tokens)
    lengths = [len(tokens[place]) for place in order]
    # A tree leaves out shared runs shorter than MIN_SHARED, at most one on each sequence's way to its own tokens.
    shared = [max(0, length - (MIN_SHARED - 1)) for length in common]
    best: list[tuple[int, int, int, int]] = [(0, 0, 0, 0)]  # stored by all runs; runs; the last run's start and tokens
    for end in range(1, len(order) + 1):
        stored, ways = 0, []
        for start in range(end - 1, -1, -1):
            stored += lengths[start] - (shared[start + 1] if start + 1 < end else 0)
            if stored > most and start < end - 1:
                break
            ways.append((best[start][0] + stored, best[start][1] + 1, start, stored))
        best.append(min(ways))
    runs, end = [], len(order)
    while end:
        _, _, start, stored = best[end]
        runs.append(_Run([rows[place] for place in order[start:end]], sum(lengths[start:end]), stored))
        end = start
    return runs[::-1]


def learns_by_parts(device: str, ranks: int, *, has_router_losses: bool) -> bool:
    """Say whether an update takes a micro-batch through the model's head in parts (see `head_parts`).

    Not on a CPU, where the gradient of a tied head would add up in another order, and so to other bits. Not on several
    ranks, whose weights FSDP gathers for one forward and one backward pass. Losses of routers read sums over all tokens
    of a pass.
    """
    return device == "cuda" and ranks == 1 and not has_router_losses


def head_parts(scored: Sequence[int], chunk: int) -> list[list[int]]:
    """Plan the parts of a micro-batch whose logits exist once: indices of its sequences, each once.

    scored: tokens of each sequence whose log-probs are needed. chunk: tokens whose logits may exist at once. Logits of
    a longer sequence are made chunk by chunk, and again in the backward pass. Such sequences are the first part.
    """
    long = [row for row, count in enumerate(scored) if count > chunk]
    short = [row for row, count in enumerate(scored) if count <= chunk]
    parts = [[short[i] for i in part] for part in split_by_tokens([scored[row] for row in short], chunk)]
    return [long, *parts] if long else parts


def with_policy_tokens(batch: Sequences) -> list[int]:
    """Return the indices of the sequences that have a policy token."""
    return batch.policy_tokens.nonzero()[:, 0].tolist()


def _rows_by_group(group: torch.Tensor) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(group.tolist()):
        rows.setdefault(prompt, []).append(row)
    return rows
