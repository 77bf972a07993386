"""What is added to a batch's rewards."""

from __future__ import annotations

import torch

from agentrl.algorithms.estimate import add_rewards
from agentrl.batch import RaggedBatch


def test_rewards_of_trajectories_go_to_their_last_policy_tokens() -> None:
    """Trajectory 3 has two sequences, and both trajectories end with a tool's token."""
    mask = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=torch.bool)
    batch = RaggedBatch(
        offsets=torch.tensor([0, 3, 7, 11]),
        ids=torch.arange(11),
        mask=mask,
        rollout_logprobs=torch.zeros(11),
        rewards=0.5 * mask,
        group=torch.tensor([0, 0, 1]),
        trajectory=torch.tensor([3, 3, 7]),
    )
    added = add_rewards(batch, {3: 2.0, 5: 100.0, 7: -1.0}) - batch.rewards
    assert added.tolist() == [0, 0, 0, 0, 0, 2, 0, 0, 0, -1, 0]
    assert torch.equal(add_rewards(batch, {}), batch.rewards)
    assert len(add_rewards(batch.select([]), {3: 2.0})) == 0
