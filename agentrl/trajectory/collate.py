"""From finished trajectories to the ragged batch that is trained on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress

import torch

from agentrl.trajectory import Outline, Trajectory, Transcript, exclusion
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.images import Images


def from_trajectories(trajectories: Sequence[Trajectory], *, turn_reward_coef: float, first: int = 0) -> RaggedBatch:
    """Make a batch with one sequence for every transcript that holds policy tokens, in order; it may be empty.

    Left out, never trained on as a zero: trajectories that FAILED, have no score or no policy token (see `left_out`),
    and transcripts without policy tokens. `group` is the trajectory's, `trajectory` its position in `trajectories`,
    counted from `first`.
    `rewards` are those of `token_rewards`, `turn` those of `token_turns`, `version` those of `token_versions`.

    Raises ValueError when a record is unsound: a sampled token of no version or no assistant turn.
    """
    rows = [
        row
        for position, trajectory in enumerate(trajectories, first)
        if exclusion(trajectory) is None
        for row in _rows(position, trajectory, turn_reward_coef)
    ]
    transcripts = [row.transcript for row in rows]
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(list(map(len, transcripts)), dtype=torch.int64), 0, out=offsets[1:])
    policies = tuple(dict.fromkeys(item.policy for item in transcripts))
    return RaggedBatch(
        offsets=offsets,
        ids=torch.tensor(list(chain.from_iterable(item.ids for item in transcripts)), dtype=torch.int64),
        mask=torch.tensor(list(chain.from_iterable(item.mask for item in transcripts)), dtype=torch.bool),
        rollout_logprobs=torch.tensor(
            list(chain.from_iterable(item.logprobs for item in transcripts)), dtype=torch.float32
        ),
        version=torch.tensor(list(chain.from_iterable(row.versions for row in rows)), dtype=torch.int32),
        turn=torch.tensor(list(chain.from_iterable(row.turns for row in rows)), dtype=torch.int32),
        rewards=torch.tensor(list(chain.from_iterable(row.rewards for row in rows)), dtype=torch.float32),
        group=torch.tensor([row.group for row in rows], dtype=torch.int64),
        trajectory=torch.tensor([row.position for row in rows], dtype=torch.int64),
        policy=torch.tensor([policies.index(item.policy) for item in transcripts], dtype=torch.int32),
        policies=policies,
        images=Images.of(item.images for item in transcripts),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of the batch; the lists have an entry for each token of the transcript."""

    position: int
    group: int
    transcript: Transcript
    rewards: list[float]
    turns: list[int]
    versions: list[int]


def _rows(position: int, trajectory: Trajectory, turn_reward_coef: float) -> Iterator[_Row]:
    by_transcript = zip(
        trajectory.transcripts,
        token_rewards(trajectory, turn_reward_coef),
        token_turns(trajectory),
        token_versions(trajectory),
        strict=True,
    )
    for transcript, rewards, turns, versions in by_transcript:
        if transcript.sampled_length:
            yield _Row(position, trajectory.group, transcript, rewards, turns, versions)


def left_out(trajectories: Sequence[Trajectory | Outline]) -> dict[str, int]:
    """Count the trajectories that `from_trajectories` leaves out, by cause: failed, unscored, no_policy_tokens."""
    counts = {"failed": 0, "unscored": 0, "no_policy_tokens": 0}
    for trajectory in trajectories:
        cause = exclusion(trajectory)
        if cause is not None:
            counts[cause] += 1
    return counts


def token_rewards(trajectory: Trajectory, turn_reward_coef: float) -> list[list[float]]:
    """Give each token of every transcript its reward, 0 but on some policy tokens. Their sum is `Outline.reward`.

    The score is on the trajectory's last policy token, not on a tool answer behind it. A turn's reward, times
    `turn_reward_coef`, is on the last policy token before that turn's end: an assistant turn's own, or that of the
    policy turn which an observed turn answers. One from before the policy wrote anything is on its first token. Turn
    rewards that the score counts too lie on their turns, and are taken off at the end.

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


def token_turns(trajectory: Trajectory) -> list[list[int]]:
    """Give each token of every transcript the index in `trajectory.turns` of the assistant turn that sampled it.

    -1 where the policy did not sample. Raises ValueError when a sampled token is in no assistant turn.
    """
    turns = [[-1] * len(transcript) for transcript in trajectory.transcripts]
    for index, turn in enumerate(trajectory.turns):
        if turn.role == "assistant":
            mask = trajectory.transcripts[turn.transcript].mask[turn.start : turn.end]
            turns[turn.transcript][turn.start : turn.end] = [index if sampled else -1 for sampled in mask]
    _check_known(trajectory, turns, "in no assistant turn")
    return turns


def token_versions(trajectory: Trajectory) -> list[list[int]]:
    """Give each token of every transcript the version of the weights that sampled it, -1 where the policy did not.

    Raises ValueError when a sampled token is in no version span.
    """
    versions = [[-1] * len(transcript) for transcript in trajectory.transcripts]
    for known, transcript in zip(versions, trajectory.transcripts, strict=True):
        for span in transcript.versions:
            known[span.start : span.end] = [span.version] * (span.end - span.start)
    _check_known(trajectory, versions, "of no version")
    return versions


def _check_known(trajectory: Trajectory, known: list[list[int]], fault: str) -> None:
    """Raises ValueError when an entry is missing (-1) on a sampled token; credit and corrections would go astray."""
    for number, (values, transcript) in enumerate(zip(known, trajectory.transcripts, strict=True)):
        for position in compress(range(len(transcript)), transcript.mask):
            if values[position] < 0:
                raise ValueError(
                    f"trajectory {trajectory.uid}: sampled token {position} of transcript {number} is {fault}. Sample "
                    "by Episode.generate, which records both"
                )
