"""A trajectory as pieces of text that are safe to show on a terminal, marked by their writer.

The pieces come from the transcript's mask and turn spans, so they show exactly the trained text. No control character,
terminal escape or invisible character of a model or a tool reaches the output as itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from agentrl.system.visible import visible
from agentrl.trajectory import Trajectory, Transcript, Turn

Decode = Callable[[Sequence[int]], str]
Kind = Literal["prompt", "policy", "call", "tool", "user", "template"]


@dataclass(frozen=True, slots=True)
class Reading:
    """How the tokens of a run's trajectories are read for people."""

    decode: Decode
    """Token ids to text, e.g. `chat.shown`."""
    calls: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    """Tool calls in decoded text, by agent loop; other calls are found by the tool's name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a trajectory's text that one side wrote."""

    kind: Kind
    text: str


def pieces(trajectory: Trajectory, index: int, reading: Reading) -> list[Piece]:
    """The text of transcript `index` in order. Sampled tokens give `policy` and `call`, the others the rest."""
    transcript = trajectory.transcripts[index]
    calls = reading.calls.get(trajectory.agent_name)
    found: list[Piece] = []
    for start, end, turn in _stretches(transcript, [turn for turn in trajectory.turns if turn.transcript == index]):
        text = visible(reading.decode(transcript.ids[start:end]))
        if transcript.mask[start]:
            found.extend(_split_calls(text, turn, calls))
        elif start < transcript.prompt_length:
            found.append(Piece("prompt", text))
        elif turn is None:
            found.append(Piece("template", text))
        else:
            found.append(Piece("tool" if turn.role == "tool" else "user", text))
    return found


def _stretches(transcript: Transcript, turns: Sequence[Turn]) -> Iterator[tuple[int, int, Turn | None]]:
    """Spans [start, end) in which mask and turn do not change; the first prompt is a span of its own."""
    owner: list[int | None] = [None] * len(transcript)
    for number, turn in enumerate(turns):
        owner[turn.start : turn.end] = [number] * (turn.end - turn.start)
    labels = (
        (place < transcript.prompt_length, mask, number)
        for place, (mask, number) in enumerate(zip(transcript.mask, owner, strict=True))
    )
    start = 0
    for (_, _, owned), run in groupby(labels):
        end = start + sum(1 for _ in run)
        yield start, end, None if owned is None else turns[owned]
        start = end


def _split_calls(text: str, turn: Turn | None, calls: re.Pattern[str] | None) -> list[Piece]:
    """The policy's text with its tool calls as pieces of their own."""
    spans = [] if calls is None else [match.span() for match in calls.finditer(text)]
    if not spans and turn is not None and turn.calls:
        at = text.find(turn.calls[0].name) if turn.calls[0].name else -1
        spans = [(text.rfind("\n", 0, at) + 1, len(text))] if at >= 0 else []
    found: list[Piece] = []
    done = 0
    for start, end in spans:
        found.extend((Piece("policy", text[done:start]), Piece("call", text[start:end])))
        done = end
    found.append(Piece("policy", text[done:]))
    return [piece for piece in found if piece.text]


def headline(trajectory: Trajectory) -> str:
    """Sum up in one line how the trajectory ended."""
    parts = [trajectory.data_source, trajectory.agent_name, str(trajectory.status)]
    if trajectory.failure:
        parts.append(trajectory.failure)
    if trajectory.score is not None:
        parts.append(f"score {trajectory.score:g}")
    if trajectory.turn_rewards:
        parts.append(f"turn rewards {trajectory.turn_reward:g}")
    turns = sum(turn.role == "assistant" for turn in trajectory.turns)
    calls = len(trajectory.tool_calls)
    parts.extend((f"turns {turns}", f"calls {calls}", f"{trajectory.num_sampled} tokens sampled"))
    return visible(" · ".join(parts)).replace("\n", " ")


def cut(lines: list[str], limit: int, unit: str = "lines") -> list[str]:
    """At most `limit` lines: the middle is replaced by one line that counts the lines left out."""
    if len(lines) <= limit:
        return lines
    head, tail = limit // 2, limit - limit // 2 - 1
    hidden = len(lines) - head - tail
    return [*lines[:head], f"… {hidden} {unit} not shown …", *lines[len(lines) - tail :]]
