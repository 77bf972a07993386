"""Batches of made-up sessions, whose transcripts begin alike."""

from __future__ import annotations

import random

import torch

from agentrl.trajectory.batch import RaggedBatch
from tests.trained import trained_batch


def session_batch(seed: int, *, vocab: int, prompts: int = 3, sessions: int = 2, most: int = 6) -> RaggedBatch:
    """Make prompts with sessions of up to `most` transcripts each.

    A transcript continues a cut of an earlier one at any token, is equal to it, or begins it. A token that one
    transcript has sampled is sampled in another one, too, or not. All sessions begin with one system message.
    """
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(3, vocab) for _ in range(draw.randint(low, high))]

    def turns(count: int) -> tuple[list[int], list[bool]]:
        ids: list[int] = []
        mask: list[bool] = []
        for place in range(2 * count):
            part = tokens(2, 9)
            ids += part
            mask += [place % 2 == 0] * len(part)
        return ids, mask

    system = tokens(12, 20)
    ids, mask, group, trajectory, lengths = [], [], [], [], []
    for session in range(prompts * sessions):
        known: list[tuple[list[int], list[bool]]] = []
        for _ in range(draw.randint(1, most)):
            way = draw.choice(["new", "fork", "fork", "equal", "beginning"]) if known else "new"
            if way == "new":
                more, sampled = turns(draw.randint(1, 4))
                start = [*system, *tokens(3, 6)]
                known.append((start + more, [False] * len(start) + sampled))
                continue
            base, before = draw.choice(known)
            cut = len(base) if way == "equal" else draw.randint(len(system) + 1, len(base))
            sampled = [one and draw.random() < 0.3 for one in before[:cut]]
            more, of_more = turns(draw.randint(1, 3)) if way == "fork" else ([], [])
            known.append((base[:cut] + more, sampled + of_more))
        for own, sampled in known:
            if not any(sampled):
                sampled = [*sampled[:-1], True]
            ids += own
            mask += sampled
            lengths.append(len(own))
            group.append(session // sessions)
            trajectory.append(session)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    noise = torch.Generator().manual_seed(seed)
    sampled_mask = torch.tensor(mask)
    advantages = torch.randn(len(ids), generator=noise) * sampled_mask
    return trained_batch(
        offsets,
        torch.tensor(ids),
        sampled_mask,
        torch.tensor(group),
        trajectory=torch.tensor(trajectory),
        advantages=advantages,
    )
