"""From finished trajectories to the ragged batch that is trained on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, compress

import torch

from agentrl.trajectory import Outline, Trajectory, exclusion
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.images import Images


def from_trajectories(trajectories: Sequence[Trajectory], *, turn_reward_coef: float, first: int = 0) -> RaggedBatch:
    """One sequence for every transcript that holds policy tokens, in order; empty when nothing is left.

    Left out, never trained on as a zero: trajectories that FAILED, have no score or no policy token (see `left_out`),
    and transcripts without policy tokens. `group` is the trajectory's, `trajectory` its position in `trajectories`,
    counted from `first`.
    `rewards` are those of `token_rewards`.
    """
    rows = [
        (position, trajectory, transcript, rewards)
        for position, trajectory in enumerate(trajectories, first)
        if exclusion(trajectory) is None
        for transcript, rewards in zip(trajectory.transcripts, token_rewards(trajectory, turn_reward_coef), strict=True)
        if transcript.sampled_length
    ]
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor([len(transcript) for _, _, transcript, _ in rows], dtype=torch.int64), 0, out=offsets[1:])
    transcripts = [transcript for _, _, transcript, _ in rows]
    return RaggedBatch(
        offsets=offsets,
        ids=torch.tensor(list(chain.from_iterable(item.ids for item in transcripts)), dtype=torch.int64),
        mask=torch.tensor(list(chain.from_iterable(item.mask for item in transcripts)), dtype=torch.bool),
        rollout_logprobs=torch.tensor(
            list(chain.from_iterable(item.logprobs for item in transcripts)), dtype=torch.float32
        ),
        rewards=torch.tensor(list(chain.from_iterable(rewards for _, _, _, rewards in rows)), dtype=torch.float32),
        group=torch.tensor([trajectory.group for _, trajectory, _, _ in rows], dtype=torch.int64),
        trajectory=torch.tensor([position for position, _, _, _ in rows], dtype=torch.int64),
        images=Images.of(item.images for item in transcripts),
    )


def left_out(trajectories: Sequence[Trajectory | Outline]) -> dict[str, int]:
    """How many trajectories `from_trajectories` leaves out, by cause: failed, unscored, no_policy_tokens."""
    counts = {"failed": 0, "unscored": 0, "no_policy_tokens": 0}
    for trajectory in trajectories:
        cause = exclusion(trajectory)
        if cause is not None:
            counts[cause] += 1
    return counts


def token_rewards(trajectory: Trajectory, turn_reward_coef: float) -> list[list[float]]:
    """A reward for every token of every transcript, each on a policy token. Their sum is `Outline.reward`.

    The score is on the trajectory's last policy token, not on a tool answer behind it. A turn's reward, times
    `turn_reward_coef`, is on the last policy token before that turn's end: an assistant turn's own, or that of the
    policy turn which an observed turn answers. One from before the policy wrote anything is on its first token. What
    the score counts of turn rewards lies on their turns, and is left out at the end.

    Raises ValueError when there is no score or no policy token.
    """
    policy = [
        (number, position)
        for number, transcript in enumerate(trajectory.transcripts)
        for position in compress(range(len(transcript)), transcript.mask)
    ]
    if trajectory.score is None or not policy:
        raise ValueError(f"trajectory {trajectory.uid} has no rewards: {exclusion(trajectory)}")
    rewards = [[0.0] * len(transcript) for transcript in trajectory.transcripts]
    number, position = policy[-1]
    rewards[number][position] += trajectory.score - turn_reward_coef * trajectory.counted_turn_reward
    for turn in trajectory.turns:
        if turn.reward is not None:
            number, position = policy[max(bisect_left(policy, (turn.transcript, turn.end)) - 1, 0)]
            rewards[number][position] += turn_reward_coef * turn.reward
    return rewards
