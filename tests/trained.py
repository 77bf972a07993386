"""Batches of sampled tokens, as an update takes them."""

from __future__ import annotations

from typing import Any

import torch

from agentrl.trajectory.batch import RaggedBatch


def trained_batch(
    offsets: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor, group: torch.Tensor, **columns: Any
) -> RaggedBatch:
    """Make a batch whose trajectories have one turn by version 0 each, and no reward; `columns` replace and add some.

    offsets [N + 1], ids and mask [T], group [N]; `rollout_logprobs` are 0.
    """
    count = len(group)
    basic: dict[str, Any] = {
        "rollout_logprobs": torch.zeros(len(ids)),
        "version": mask.int() - 1,
        "turn": mask.int() - 1,
        "rewards": torch.zeros(len(ids)),
        "trajectory": torch.arange(count),
        "policy": torch.zeros(count, dtype=torch.int32),
        "policies": ("policy",),
    }
    return RaggedBatch.from_columns(offsets=offsets, ids=ids, mask=mask, group=group, **(basic | columns))
