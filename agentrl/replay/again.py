"""Sampling a recorded trajectory again, turn by turn from its own tokens, and comparing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.agent_loop.limits import LoopLimits, seed_of
from agentrl.agent_loop.tool_calls import answer_to, run_calls
from agentrl.chat import AssistantMessage, Chat
from agentrl.engines.contract import RolloutEngine, SamplingParams
from agentrl.errors import DataError
from agentrl.replay.recorded import Recorded
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message, Transcript, Turn


@dataclass(frozen=True, slots=True)
class Comparison:
    """One assistant turn, sampled again."""

    turn: int
    tokens: int
    first_difference: int | None
    """Place in the transcript of the first other token; None: all are the same."""
    recorded: str = ""
    """The token there, decoded."""
    sampled: str = ""
    logprob_gap: float = 0.0
    """Largest difference of log-probs, up to the first other token."""


async def replay(recorded: Recorded, engine: RolloutEngine, chat: Chat) -> list[Comparison]:
    """Sample every assistant turn again, each from the recorded tokens before it.

    Raises DataError for a trajectory with images, which are not recorded.
    """
    found = []
    for index, turn in enumerate(recorded.trajectory.turns):
        if turn.role == "assistant" and turn.end > turn.start:
            found.append(await _compare(recorded, index, turn, engine, chat))
    return found


async def _compare(recorded: Recorded, index: int, turn: Turn, engine: RolloutEngine, chat: Chat) -> Comparison:
    transcript = recorded.trajectory.transcripts[turn.transcript]
    ids, logprobs = transcript.ids[turn.start : turn.end], transcript.logprobs[turn.start : turn.end]
    params = params_at(recorded, turn.transcript, turn.start, len(ids), chat)
    generated = await engine.generate(transcript.ids[: turn.start], params, f"replay {index}")
    await engine.release(f"replay {index}")
    pairs = zip(ids, generated.ids, strict=False)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is None and len(generated.ids) != len(ids):
        place = min(len(ids), len(generated.ids))
    same = len(ids) if place is None else place
    gaps = [abs(one - other) for one, other in zip(logprobs[:same], generated.logprobs[:same], strict=True)]
    return Comparison(
        turn=index,
        tokens=len(ids),
        first_difference=None if place is None else turn.start + place,
        recorded="" if place is None else chat.decode(ids[place : place + 1]),
        sampled="" if place is None else chat.decode(generated.ids[place : place + 1]),
        logprob_gap=max(gaps, default=0.0),
    )


def params_at(recorded: Recorded, transcript: int, place: int, most: int, chat: Chat) -> SamplingParams:
    """Return the parameters with which a turn that begins at a place of a transcript is sampled."""
    return replace(
        recorded.params,
        max_new_tokens=most,
        stop_token_ids=chat.stop_token_ids + chat.media_token_ids,
        seed=seed_of(recorded.seeds[transcript], place),
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
            message = await _say(recorded, turn.transcript, ids, most, engine, chat)
            turns.append(("assistant", message.text))
            if not message.calls:
                break
            results = await run_calls(session, message.calls, limits.max_parallel_calls)
            answers = [answer_to(call, result) for call, result in zip(message.calls, results, strict=True)]
            turns += [("tool", str(answer["content"])) for answer in answers]
            ids += chat.bridge(ids, answers, tools.schemas)
    finally:
        await session.close()
        await engine.release("replay edited")
    return Continuation(turns)


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


async def _say(
    recorded: Recorded, transcript: int, ids: list[int], most: int, engine: RolloutEngine, chat: Chat
) -> AssistantMessage:
    params = params_at(recorded, transcript, len(ids), most, chat)
    generated = await engine.generate(ids, params, "replay edited")
    ids += generated.ids
    return await chat.read(generated.ids)
