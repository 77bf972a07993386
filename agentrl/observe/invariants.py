"""Invariants of every trajectory, as a check of a finished record (docs/architecture.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from agentrl.tool import ErrorKind
from agentrl.trajectory import FROZEN, Status, Trajectory, Transcript, Turn

LOGPROB_SLACK = 1e-5
"""A log-prob of a certain token may be this much above 0, by rounding of float32."""


def check_trajectory(trajectory: Trajectory, vocab_size: int) -> list[str]:
    """Every violation found, one sentence each; empty when the record is sound. It does not raise."""
    violations = list(_check_ending(trajectory))
    for index, transcript in enumerate(trajectory.transcripts):
        where = f"transcript {index}"
        violations += (f"{where}: {text}" for text in _check_tokens(transcript, vocab_size))
        if len(transcript.ids) == len(transcript.mask) == len(transcript.logprobs):
            turns = [turn for turn in trajectory.turns if turn.transcript == index]
            sampled = {place for place, is_sampled in enumerate(transcript.mask) if is_sampled}
            violations += (f"{where}: {text}" for text in _check_versions(transcript, sampled))
            violations += (f"{where}: {text}" for text in _check_turns(transcript, turns, sampled))
    for position, turn in enumerate(trajectory.turns):
        violations += (f"turn {position}: {text}" for text in _check_turn(turn, len(trajectory.transcripts)))
    return [f"{trajectory.uid}: {text}" for text in violations]


def _check_ending(trajectory: Trajectory) -> Iterator[str]:
    if trajectory.status is Status.FAILED:
        if trajectory.score is not None:
            yield f"it failed and yet has the score {trajectory.score}"
        if not trajectory.failure:
            yield "it failed without a cause"
    elif trajectory.status is Status.COMPLETED and not trajectory.transcripts:
        yield "it is completed and has no transcript"
    elif (trajectory.status is Status.COMPLETED and _has_assistant_turn(trajectory)) and not any(
        one.sampled_length for one in trajectory.transcripts
    ):
        # Without such a turn, the loop has masked all that the policy sampled, as it may: nothing is trained on it.
        yield "it is completed, and no token of its assistant turns is sampled"
    if trajectory.status is Status.TIMEOUT and trajectory.score is not None:
        yield f"its time was up and yet it has the score {trajectory.score}"
    if trajectory.failure and trajectory.score is not None:
        yield f"it has the score {trajectory.score} and yet the failure {trajectory.failure!r:.100}"
    if trajectory.score is not None and not math.isfinite(trajectory.score):
        yield f"its score is {trajectory.score}"


def _has_assistant_turn(trajectory: Trajectory) -> bool:
    return any(turn.role == "assistant" for turn in trajectory.turns)


def _check_tokens(transcript: Transcript, vocab_size: int) -> Iterator[str]:
    ids, mask, logprobs = transcript.ids, transcript.mask, transcript.logprobs
    if not len(ids) == len(mask) == len(logprobs):
        yield f"{len(ids)} ids, {len(mask)} mask entries and {len(logprobs)} log-probs"
        return
    if not 0 < transcript.prompt_length <= len(ids):
        yield f"prompt length {transcript.prompt_length} of {len(ids)} tokens"
    if any(mask[: max(0, transcript.prompt_length)]):
        yield "the mask is 1 in the prompt"
    for index, (token, sampled, logprob) in enumerate(zip(ids, mask, logprobs, strict=True)):
        if not 0 <= token < vocab_size:
            yield f"token {index} has the id {token}, outside the vocabulary of {vocab_size}"
        if sampled not in (0, 1):
            yield f"token {index} has the mask {sampled}"
        elif sampled and not (math.isfinite(logprob) and logprob <= LOGPROB_SLACK):
            yield f"sampled token {index} has the log-prob {logprob}"
        elif not sampled and logprob != 0:
            yield f"observed token {index} has the log-prob {logprob}"


def _check_versions(transcript: Transcript, sampled: set[int]) -> Iterator[str]:
    end = 0
    for span in transcript.versions:
        if not end <= span.start < span.end <= len(transcript.ids):
            yield f"version span [{span.start}, {span.end}) is empty, out of order or outside the transcript"
            return
        end = span.end
    covered = {index for span in transcript.versions for index in range(span.start, span.end)}
    wrong = covered ^ sampled
    if wrong:
        yield f"version spans and sampled tokens disagree on token {min(wrong)}"


def _check_turns(transcript: Transcript, turns: Sequence[Turn], sampled: set[int]) -> Iterator[str]:
    end = 0
    for turn in turns:
        if not end <= turn.start <= turn.end <= len(transcript.ids):
            yield f"{turn.role} turn [{turn.start}, {turn.end}) is out of order or outside the transcript"
            return
        end = turn.end
    said = {index for turn in turns if turn.role == "assistant" for index in range(turn.start, turn.end)}
    wrong = said ^ sampled
    if wrong:
        yield f"assistant turns and sampled tokens disagree on token {min(wrong)}"


def _check_turn(turn: Turn, transcripts: int) -> Iterator[str]:
    if not 0 <= turn.transcript < transcripts:
        yield f"it stands in transcript {turn.transcript} of {transcripts}"
    if turn.calls and turn.role not in ("assistant", FROZEN):
        yield f"a {turn.role} turn has tool calls"
    for call in turn.calls:
        if call.error is not None and call.error not in list(ErrorKind):
            yield f"a call of {call.name!r} has the unknown error kind {call.error!r}"
    if turn.reward is not None and not math.isfinite(turn.reward):
        yield f"its reward is {turn.reward}"
