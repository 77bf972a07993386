"""Tokens that were sampled from keys and values of older weights are not held against the trainer's log-probs."""

from __future__ import annotations

import torch

from agentrl.checks.batch import behind_a_change
from agentrl.trajectory.batch import RaggedBatch


def test_only_tokens_behind_a_change_in_their_own_turn_are_left_out() -> None:
    """Two sequences: of the first one the second turn, of the other one two turns go through changes."""
    rows = (  # (turn, version) of each token; -1: observed
        [(-1, -1), (0, 1), (0, 1), (-1, -1), (2, 1), (2, 2), (2, 3), (-1, -1), (4, 3)],
        [(-1, -1), (4, 2), (4, 3), (5, 3), (5, 3), (6, 3), (6, 4)],
    )
    tokens = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    batch = RaggedBatch.unsampled(
        torch.tensor([0, 9, 16]),
        torch.zeros(16, dtype=torch.int64),
        tokens[:, 0] >= 0,
        torch.tensor([0, 0]),
        torch.tensor([0, 1]),
    ).with_fields(turn=tokens[:, 0], version=tokens[:, 1])
    assert behind_a_change(batch).nonzero()[:, 0].tolist() == [5, 6, 11, 15]
