"""Checks of whole trajectories where they were run: the invariants of the record, and the mask compared with the
tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol

from agentrl.observe.invariants import check_trajectory
from agentrl.observe.report import Finding
from agentrl.tool.truncation import BUDGET_MARKER
from agentrl.trajectory import Trajectory, Transcript, Turn

WINDOW = 4
"""Tokens of the sequences that are counted as repeated."""
LEAST = 64
"""Sampled tokens of a turn below which repetitions say nothing."""
WORD = re.compile(r"[A-Za-z0-9]{4,}")


class Reads(Protocol):
    """Part of `agentrl.chat.Chat` that the checks use."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...
    @property
    def media_token_ids(self) -> tuple[int, ...]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def check_record(trajectory: Trajectory, chat: Reads) -> list[Finding]:
    """Check one trajectory. It does not raise for any record."""
    found = [
        Finding("record", text.removeprefix(f"{trajectory.uid}: "), trajectory.uid)
        for text in check_trajectory(trajectory, chat.vocab_size)
    ]
    if found:  # what follows reads the record as a sound one
        return found
    for index, transcript in enumerate(trajectory.transcripts):
        turns = [turn for turn in trajectory.turns if turn.transcript == index]
        for turn in turns:
            check = _check_sampled if turn.role == "assistant" else _check_observed
            found += (Finding("mask", text, trajectory.uid) for text in check(transcript, turn, chat))
        length = transcript.prompt_length
        if turns and turns[0].role == "assistant" and turns[0].start != length:
            what = f"the first turn begins at token {turns[0].start}, and the prompt ends at {length}"
            found.append(Finding("mask", what, trajectory.uid))
    return found


def _check_observed(transcript: Transcript, turn: Turn, chat: Reads) -> Iterator[str]:
    """Compare an observed turn with the text that the policy is said to have read. No turn ends twice."""
    ids = transcript.ids
    for place in range(max(turn.start, 1), turn.end):
        if ids[place] == ids[place - 1] and ids[place] in chat.stop_token_ids:
            yield f"token {place} ends a turn that the token before it has ended"
    word = WORD.search(turn.text[:2000])
    has_images = any(turn.start <= one.start < turn.end for one in transcript.images)
    if word is None or has_images or turn.text.endswith(BUDGET_MARKER):  # cut to what fitted the response
        return
    if word[0] not in chat.decode(ids[turn.start : turn.end]):
        yield f"the {turn.role} turn at token {turn.start} does not hold what was observed, {word[0]!r} for one"


def _check_sampled(transcript: Transcript, turn: Turn, chat: Reads) -> Iterator[str]:
    """Compare the span of an assistant turn with its tokens: it ends with its stop token, and there only."""
    ids, stops = transcript.ids, {*chat.stop_token_ids, *chat.media_token_ids}
    inside = next((place for place in range(turn.start, turn.end - 1) if ids[place] in stops), None)
    if inside is not None:
        yield f"sampled token {inside} ends a turn, and tokens behind it are said to be sampled, too"
    ends = turn.end > turn.start and ids[turn.end - 1] in stops
    behind = turn.end < len(ids) and ids[turn.end] in stops and not transcript.mask[turn.end]
    if turn.finish_reason == "stop" and not ends and behind:
        yield f"the policy ended its turn with token {turn.end}, which is said to be observed"


def count_text(trajectory: Trajectory, chat: Reads) -> Counter[str]:
    """Count repeated sequences of tokens, and characters that are no text, in the policy's text.

    Names: `tokens`, and the `repeated` ones, which begin a sequence of WINDOW tokens that the turn had before;
    `characters`, and the `garbled` ones, which are replacement and control characters.
    """
    counts: Counter[str] = Counter()
    for turn in trajectory.turns:
        ids = trajectory.transcripts[turn.transcript].ids[turn.start : turn.end]
        if turn.role != "assistant" or len(ids) < LEAST:
            continue
        windows = list(zip(*(ids[start:] for start in range(WINDOW)), strict=False))
        text = chat.decode(ids)
        garbled = sum(one == "\ufffd" or (one < " " and one not in "\n\t\r") for one in text)
        counts.update(tokens=len(windows), repeated=len(windows) - len(set(windows)))
        counts.update(characters=len(text), garbled=garbled)
    return counts
