"""From finished trajectories to the ragged batch that is trained on."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain, compress, groupby

import torch

from agentrl.config.columns import Column, column
from agentrl.errors import ConfigError
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory import COUNTED, Outline, Trajectory, Transcript, exclusion
from agentrl.trajectory.batch import RaggedBatch, TeacherPrompts, dtype_of
from agentrl.trajectory.beginnings import common_tokens, token_key
from agentrl.trajectory.images import Images

ROUNDING = 1e-9
"""Difference by which a sum of floats may miss another."""
NO_EXPERTS = torch.zeros(0, dtype=torch.uint8)
"""The experts of no token, which can be joined to any experts."""


def from_trajectories(
    trajectories: Sequence[Trajectory],
    *,
    turn_reward_coef: float,
    first: int = 0,
    columns: Collection[str] = (),
    experts: bool = False,
    privileged: bool = False,
) -> RaggedBatch:
    """Make a batch with one sequence for every transcript that holds policy tokens, in order; it may be empty.

    Left out, never trained on as a zero: trajectories that FAILED, have no score or no policy token (see `left_out`),
    trajectories that are a `baseline`, transcripts without policy tokens, and transcripts, or their ends, that a loop
    left out (`Transcript.trained_to`). `group` is the trajectory's, `trajectory`
    its position in `trajectories`, counted from `first`. `rewards` come from `token_rewards`, `turn` from
    `token_turns`, `version` from `token_versions`. With `experts`, they come from `token_experts`. With
    `privileged` there are the prompts of privileged teachers. `columns`: further ones to make, `state` from
    `token_states`, or a user's by its function.

    Raises ValueError when a record is unsound: a sampled token of no version or no assistant turn. Raises ConfigError
    when the engine reported no experts.
    """
    rows = list(_rows(trajectories, first, turn_reward_coef, "state" in columns))
    transcripts = [row.transcript for row in rows]
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(list(map(len, transcripts)), dtype=torch.int64), 0, out=offsets[1:])
    policies = tuple(dict.fromkeys(item.policy for item in transcripts))
    policy = torch.tensor([policies.index(item.policy) for item in transcripts], dtype=torch.int32)
    tokens = {
        "ids": _joined((item.ids for item in transcripts), torch.int64),
        "mask": _joined((item.mask for item in transcripts), torch.bool),
        "rollout_logprobs": _joined((item.logprobs for item in transcripts), torch.float32),
        "version": _joined((row.versions for row in rows), torch.int32),
        "turn": _joined((row.turns for row in rows), torch.int32),
        "rewards": _joined((row.rewards for row in rows), torch.float32),
    }
    if "state" in columns:
        tokens["state"] = _joined((row.states for row in rows), torch.int64)
    if experts:
        tokens["experts"] = _experts(transcripts)
    group = torch.tensor([row.group for row in rows], dtype=torch.int64)
    trajectory = torch.tensor([row.position for row in rows], dtype=torch.int64)
    own_tokens = torch.tensor(_own_tokens(rows), dtype=torch.int64)
    batch = RaggedBatch(
        offsets,
        tokens,
        {"group": group, "trajectory": trajectory, "policy": policy, "own_tokens": own_tokens},
        policies,
        Images.from_sequences(item.images for item in transcripts),
        TeacherPrompts.from_transcripts(transcripts) if privileged else None,
    )
    made = {name: _made(column(name), rows, trajectories, first) for name in columns if name != "state"}
    return batch.with_fields(**made) if made else batch


def _own_tokens(rows: Sequence[_Row]) -> list[int]:
    """Count the tokens of each row that no earlier row of its trajectory begins with. Their sum is the trajectory's."""
    found = []
    for _, several in groupby(rows, key=lambda row: row.position):
        first, *others = several
        found.append(len(first.transcript))
        earlier = [token_key(first.transcript.ids)] if others else []
        for row in others:
            own = token_key(row.transcript.ids)
            place = bisect_left(earlier, own)  # the nearest in this order have most in common
            near = earlier[max(0, place - 1) : place + 1]
            found.append(len(row.transcript) - max(common_tokens(own, other) for other in near))
            earlier.insert(place, own)
    return found


def _made(what: Column, rows: Sequence[_Row], trajectories: Sequence[Trajectory], first: int) -> torch.Tensor:
    """Make a user's column of all rows, by its function. Raises CodeError when that fails or returns something else."""
    make, dtype, where = what.make, dtype_of(what.name), f"the column {what.name}"
    assert make is not None, "registered with it"
    values = [torch.zeros(0, dtype=dtype)]
    for row in rows:
        count = 1 if what.per == "sequence" else len(row.whole)
        trajectory = trajectories[row.position - first]
        with user_code(where, make):
            found = make(trajectory, row.whole)
            given = None if found is None else torch.as_tensor(found).detach().cpu().reshape(-1)
        numbers = torch.full((count,), what.default, dtype=dtype) if given is None else given.to(dtype)
        if len(numbers) != count:
            asked = "one number" if what.per == "sequence" else f"a number for each of the transcript's {count} tokens"
            raise contract_error(where, make, f"expected {asked}, found {len(numbers)} ({trajectory.uid})")
        if given is not None and not dtype.is_floating_point and not torch.equal(numbers.to(given.dtype), given):
            raise contract_error(where, make, f"expected {what.dtype}, found other numbers ({trajectory.uid})")
        if what.per == "token":
            numbers = numbers[: len(row.transcript)]
            numbers = torch.where(torch.tensor(row.transcript.mask) == 1, numbers, what.default).to(dtype)
        values.append(numbers)
    return torch.cat(values)


def _experts(transcripts: Sequence[Transcript]) -> torch.Tensor:
    """Join the experts of all tokens, [T, layers, k]; [0] of no transcript."""
    return torch.cat([token_experts(item) for item in transcripts] or [NO_EXPERTS])


@dataclass(frozen=True, slots=True)
class _Row:
    """One sequence of the batch; the lists have an entry for each of its tokens."""

    position: int
    group: int
    whole: Transcript
    """The transcript as it is recorded."""
    transcript: Transcript
    """The part of it that is trained on."""
    rewards: list[float]
    turns: list[int]
    versions: list[int]
    states: list[int]

    def cut(self, end: int) -> _Row:
        """Leave out the lists' entries from `end` on."""
        rewards, turns, versions = self.rewards[:end], self.turns[:end], self.versions[:end]
        return replace(self, rewards=rewards, turns=turns, versions=versions, states=self.states[:end])


def _rows(trajectories: Sequence[Trajectory], first: int, turn_reward_coef: float, with_states: bool) -> Iterator[_Row]:
    for position, trajectory in enumerate(trajectories, first):
        if trajectory.baseline or exclusion(trajectory) is not None:
            continue
        by_transcript = zip(
            trajectory.transcripts,
            token_rewards(trajectory, turn_reward_coef),
            token_turns(trajectory),
            token_versions(trajectory),
            token_states(trajectory) if with_states else ([] for _ in trajectory.transcripts),
            strict=True,
        )
        for transcript, rewards, turns, versions, states in by_transcript:
            part = transcript.trained_part()
            if part is not None:
                row = _Row(position, trajectory.group, transcript, part, rewards, turns, versions, states)
                yield row if part is transcript else row.cut(len(part))


def _joined(by_sequence: Iterable[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(list(chain.from_iterable(by_sequence)), dtype=dtype)


def token_experts(transcript: Transcript) -> torch.Tensor:
    """Return the experts of each token of a transcript, [T, L, k] uint8 or int16, which must hold a sampled one.

    No log-prob depends on the last sampled token and the tokens after it; they get the experts of the first token.
    Raises ConfigError when the engine did not report experts.
    """
    found = transcript.experts
    if found is None or not len(found):
        raise ConfigError(
            "actor_rollout_ref.actor.router_replay.mode=R3: a response came without the experts that its tokens were "
            "sent to. The embedded engine tells them, for mixtures of experts; an engine of yours has to "
            "(`Generation.experts`), and a loop of yours that records responses by itself. Or set mode=disabled"
        )
    known = torch.from_numpy(found.copy())
    return torch.cat([known, known[:1].expand(len(transcript) - len(known), *known.shape[1:])])


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

    The score, and the penalty for an overlong response, are on the trajectory's last policy token, not on a tool answer
    after it. A turn's reward, times `turn_reward_coef`, is on the last policy token before that turn's end. This token
    is in an assistant turn itself, or in the policy turn that an observed turn answers. A reward from before the policy
    wrote anything is on its first token. Turn rewards that the score counts too stay on their turns, and are subtracted
    at the end. Each role's score is on the role's last policy token, and only the rest of the trajectory's score on the
    last of all. Tokens that are left out (`Transcript.trained_to`) are no policy tokens here.

    Raises ValueError when there is no score or no policy token.
    """
    policy = [
        (number, position)
        for number, transcript in enumerate(trajectory.transcripts)
        for position in compress(range(transcript.trained_end), transcript.mask)
    ]
    if trajectory.score is None or not policy:
        raise ValueError(f"trajectory {trajectory.uid} has no rewards: {exclusion(trajectory)}")
    rewards = [[0.0] * len(transcript) for transcript in trajectory.transcripts]
    number, position = policy[-1]
    score = trajectory.score + trajectory.overlong_penalty
    paid = score - turn_reward_coef * trajectory.counted_turn_reward
    if by_role := trajectory.role_scores:
        paid -= _pay_roles(trajectory, by_role, turn_reward_coef, rewards)
        paid = 0.0 if math.isclose(paid, 0.0, abs_tol=ROUNDING) else paid
    rewards[number][position] += paid
    for turn in trajectory.turns:
        if turn.reward is not None:
            number, position = policy[max(bisect_left(policy, (turn.transcript, turn.end)) - 1, 0)]
            rewards[number][position] += turn_reward_coef * turn.reward
    return rewards


def _pay_roles(
    trajectory: Trajectory, by_role: Mapping[str, float], turn_reward_coef: float, rewards: list[list[float]]
) -> float:
    """Add each role's score, without its turn rewards that the score counts, to its last policy token; return the sum.

    Each role has a policy token.
    """
    transcripts, total = trajectory.transcripts, 0.0
    counts = COUNTED in trajectory.score_extra
    for role, score in by_role.items():
        own = [number for number, one in enumerate(transcripts) if one.role == role and one.trained_length]
        turns = [turn.reward for turn in trajectory.turns if transcripts[turn.transcript].role == role]
        paid = score - turn_reward_coef * sum(reward for reward in turns if reward is not None and counts)
        mask = transcripts[own[-1]].mask[: transcripts[own[-1]].trained_end]
        rewards[own[-1]][len(mask) - 1 - mask[::-1].index(1)] += paid
        total += paid
    return total


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


def token_states(trajectory: Trajectory) -> list[list[int]]:
    """Give each token of every transcript a hash of its turn's state, -1 for tokens that no turn sampled.

    The state is the turn's own (`Turn.state`), or else the text observed in the transcript since the assistant turn
    before. For the first turn of a transcript without such text it is the prompt.
    """
    states = [[-1] * len(transcript) for transcript in trajectory.transcripts]
    observed: dict[int, list[str]] = {}
    for turn in trajectory.turns:
        transcript = trajectory.transcripts[turn.transcript]
        if turn.role != "assistant":
            observed.setdefault(turn.transcript, []).append(turn.text)
            continue
        prompt = repr(transcript.ids[: transcript.prompt_length])
        seen = "\n".join(observed[turn.transcript]) if turn.transcript in observed else prompt
        observed[turn.transcript] = []
        state = (seen if turn.state is None else turn.state).encode(errors="surrogatepass")
        number = int.from_bytes(blake2b(state, digest_size=8).digest()) >> 1  # 63 bits, the same in every process
        mask = transcript.mask[turn.start : turn.end]
        states[turn.transcript][turn.start : turn.end] = [number if sampled else -1 for sampled in mask]
    return states


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
