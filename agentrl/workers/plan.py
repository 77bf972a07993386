"""Plan which sequences are updated together: mini-batches (an optimizer step each), micro-batches (a forward each).

Both follow from the batch and a seed alone, so every rank makes the same plan and a resumed run repeats it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import torch

from agentrl.trajectory.batch import Sequences, split_by_tokens


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


def micro_batches(batch: Sequences, max_tokens: int) -> list[list[int]]:
    """Split sequences into micro-batches of at most `max_tokens` tokens; a longer sequence goes alone.

    The sequences of a prompt stay together where they fit, because their shared prefix is computed once.
    """
    lengths = batch.lengths.tolist()
    pieces: list[list[int]] = []
    for rows in _rows_by_group(batch.group).values():
        pieces += [[rows[i] for i in part] for part in split_by_tokens([lengths[row] for row in rows], max_tokens)]
    sizes = [sum(lengths[row] for row in piece) for piece in pieces]
    return [[row for i in part for row in pieces[i]] for part in split_by_tokens(sizes, max_tokens)]


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
