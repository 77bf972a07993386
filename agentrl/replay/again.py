"""Sampling a recorded trajectory again, turn by turn from its own tokens, and comparing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.agent_loop.limits import LoopLimits, seed_of
from agentrl.agent_loop.tool_calls import answer_to, run_calls
from agentrl.chat import Chat
from agentrl.engines.contract import RolloutEngine, SamplingParams
from agentrl.errors import DataError
from agentrl.replay.recorded import Recorded, Stretch
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message, PlacedImage, Transcript, Turn
from agentrl.trajectory.picture import Picture

NAME = "replay edited"
"""Name of the session that goes on from an edit."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Tokens of one turn and version, sampled again."""

    stretch: Stretch
    first_difference: int | None
    """Place in the transcript of the first other token; None: all are the same."""
    recorded: str = ""
    """The token there, decoded."""
    sampled: str = ""
    same_logprobs: int = 0
    """Log-probs that are equal bit for bit, up to the first other token."""
    logprob_gap: float = 0.0
    """Largest difference of the others."""


def placed_images(recorded: Recorded, chat: Chat) -> list[list[PlacedImage]]:
    """Prepare the images of each transcript from their files. Raises DataError where one is missing or damaged."""
    found = []
    for places in recorded.images:
        mine = []
        for start, path in places:
            if chat.vision is None or not path.is_file():
                raise DataError(f"{recorded.trajectory.uid}: want its image {path}, which is not there (any more)")
            mine.append(PlacedImage(start, chat.vision.image(Picture(path.read_bytes()))))
        found.append(mine)
    return found


async def replay(recorded: Recorded, version: int | None, engine: RolloutEngine, chat: Chat) -> list[Comparison]:
    """Sample again what the engine's weights sampled, each stretch from the recorded tokens before it.

    version: of the stretches that are sampled; None: all. Raises DataError for what is not recorded.
    """
    images = placed_images(recorded, chat)
    stretches = [one for one in recorded.stretches() if version in (None, one.version)]
    return [await _compare(recorded, one, images[one.transcript], engine, chat) for one in stretches]


async def _compare(
    recorded: Recorded, stretch: Stretch, images: list[PlacedImage], engine: RolloutEngine, chat: Chat
) -> Comparison:
    transcript = recorded.trajectory.transcripts[stretch.transcript]
    ids = transcript.ids[stretch.start : stretch.end]
    params = params_at(recorded, stretch.seed, len(ids), chat)
    name = f"replay {stretch.turn} {stretch.start}"
    before = [one for one in images if one.start < stretch.start]
    given = {"images": before} if before else {}
    generated = await engine.generate(transcript.ids[: stretch.start], params, name, **given)
    await engine.release(name)
    pairs = zip(ids, generated.ids, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None and len(generated.ids) != len(ids):
        place = min(len(ids), len(generated.ids))
    same = len(ids) if place is None else place
    logprobs = np.array(transcript.logprobs[stretch.start :][:same], np.float32)
    gaps = np.abs(logprobs - np.array(generated.logprobs[:same], np.float32))
    return Comparison(
        stretch,
        first_difference=None if place is None else stretch.start + place,
        recorded="" if place is None else chat.decode(ids[place : place + 1]),
        sampled="" if place is None else chat.decode(generated.ids[place : place + 1]),
        same_logprobs=int((gaps == 0).sum()),
        logprob_gap=float(gaps.max(initial=0.0)),
    )


def params_at(recorded: Recorded, seed: int, most: int, chat: Chat) -> SamplingParams:
    """Return the parameters of a turn of at most so many tokens, with the seed of its request."""
    return replace(
        recorded.params, max_new_tokens=most, stop_token_ids=chat.stop_token_ids + chat.media_token_ids, seed=seed
    )


@dataclass(frozen=True, slots=True)
class Continuation:
    """Turns that follow an edit, as (role, text)."""

    turns: list[tuple[str, str]]


async def edit(
    recorded: Recorded, at: int, text: str, engine: RolloutEngine, chat: Chat, tools: ToolSet, limits: LoopLimits
) -> Continuation:
    """Put `text` in the place of the observed turn `at`, and go on from there by the policy and the run's tools.

    Raises DataError where `at` is no observed turn behind one of the policy's.
    """
    turn, ids = _edited(recorded, at, text, chat)
    seed = sampled_before(recorded, at).seed
    images = [one for one in placed_images(recorded, chat)[turn.transcript] if one.start < turn.start]
    given = {"images": images} if images else {}
    prompt = recorded.trajectory.transcripts[turn.transcript].prompt_length
    end = min(limits.max_model_len, prompt + limits.max_response_tokens)
    turns: list[tuple[str, str]] = [(turn.role, text)]
    session = await tools.open(f"replay {recorded.trajectory.uid}", {})
    try:
        for _ in range(limits.max_assistant_turns):
            if len(ids) >= end:
                turns.append(("note", "the response's length is used up"))
                break
            most = min(end - len(ids), limits.max_tokens_per_turn or end)
            generated = await engine.generate(
                ids, params_at(recorded, seed_of(seed, len(ids)), most, chat), NAME, **given
            )
            ids += generated.ids
            message = await chat.read(generated.ids)
            turns.append(("assistant", message.text))
            if not message.calls:
                break
            results = await run_calls(session, message.calls, limits.max_parallel_calls)
            answers = [answer_to(call, result) for call, result in zip(message.calls, results, strict=True)]
            turns += [("tool", str(answer["content"])) for answer in answers]
            ids += chat.bridge(ids, answers, tools.schemas)
    finally:
        await session.close()
        await engine.release(NAME)
    return Continuation(turns)


def sampled_before(recorded: Recorded, at: int) -> Stretch:
    """Return what was sampled last before turn `at`, in its transcript. Raises DataError where there is nothing."""
    turns = recorded.trajectory.turns
    mine = turns[at].transcript if 0 <= at < len(turns) else -1
    before = [one for one in recorded.stretches() if one.turn < at and one.transcript == mine]
    if not before:
        raise DataError(f"--turn {at}: want the number of a turn that the policy read after one of its own")
    return before[-1]


def _edited(recorded: Recorded, at: int, text: str, chat: Chat) -> tuple[Turn, list[int]]:
    """Return the turn that is edited, and the transcript's tokens up to its end with `text` in it."""
    turns = recorded.trajectory.turns
    places = [place for place, turn in enumerate(turns) if turn.role != "assistant" and turn.start > 0]
    if at not in places:
        raise DataError(
            f"--turn {at}: want the number of a turn that the policy read after one of its own, one of "
            f"{', '.join(map(str, places)) or 'none'}"
        )
    turn = turns[at]
    transcript: Transcript = recorded.trajectory.transcripts[turn.transcript]
    ids = transcript.ids[: turn.start]
    if transcript.ids[turn.start : turn.end] == chat.encode(turn.text):  # inside an assistant turn, as ReAct's
        return turn, ids + chat.encode(text)
    return turn, ids + chat.bridge(ids, _messages(turns, at, text))


def _messages(turns: Sequence[Turn], at: int, text: str) -> list[Message]:
    role = turns[at].role
    if role != "tool":
        return [{"role": role, "content": text}]
    calls = turns[at - 1].calls if at else []
    return [{"role": "tool", "content": text, "tool_call_id": "call_0", "name": calls[0].name if calls else "tool"}]
