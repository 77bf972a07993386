"""A recorded trajectory with an edited text, continued from there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from agentrl.agent_loop.limits import LoopLimits, seed_of
from agentrl.agent_loop.stopping import CUT
from agentrl.agent_loop.tool_calls import FINAL_ANSWER_REQUEST, answer_to, record_calls, run_calls
from agentrl.chat import Chat
from agentrl.engines.contract import Generation, RolloutEngine, SamplingParams
from agentrl.errors import DataError
from agentrl.replay.again import beginning, params_at, placed_images, unscored
from agentrl.replay.recorded import Recorded, Stretch
from agentrl.tool.session import ToolSession
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message, Status, Trajectory, Transcript, Turn

NAME = "replay edited"
"""Name of the session that continues from an edit."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Another text in the place of a turn that the policy read."""

    turn: int
    text: str
    call: int | None = None
    """Number of the call whose answer it is, where one turn answers several; None: the text is all of the turn."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the run by which a trajectory continues."""

    engine: RolloutEngine
    version: int
    """Version of the engine's weights."""
    chat: Chat
    tools: ToolSet
    limits: LoopLimits


async def go_on(recorded: Recorded, edit: Edit, parts: Parts, told: Callable[[Turn], None]) -> Trajectory:
    """Make the edit, and continue from there by the policy and the run's tools; the context window alone is returned.

    told: called with each turn. Raises DataError where the edit cannot be made.
    """
    old, before = recorded.trajectory, sampled_before(recorded, edit.turn)
    turns = [replace(one, transcript=0) for one in old.turns[: edit.turn] if one.transcript == before.transcript]
    window = _edited(recorded, edit, before, parts)
    turns.append(Turn(old.turns[edit.turn].role, edit.text, 0, old.turns[edit.turn].start, len(window)))
    told(turns[-1])
    session = await parts.tools.open(f"replay {old.uid}", {})
    try:
        status = await _converse(recorded, before, window, turns, parts, session, told)
    finally:
        await session.close()
        await parts.engine.release(NAME)
    made = unscored(old, [window], turns)
    made.status = status
    return made


async def _converse(
    recorded: Recorded,
    before: Stretch,
    window: Transcript,
    turns: list[Turn],
    parts: Parts,
    session: ToolSession,
    told: Callable[[Turn], None],
) -> Status:
    """Append turns of the policy and of its tools until the trajectory ends, within the run's limits."""
    chat, limits = parts.chat, parts.limits
    end = min(limits.max_model_len, window.prompt_length + limits.max_response_tokens)
    # Where a turn begins at the same place as a recorded one, its random numbers are the same.
    mine = [one for one in recorded.trajectory.turns if one.transcript == before.transcript]
    seeds = {one.start: one.seed for one in mine if one.seed is not None}
    taken = sum(one.role == "assistant" for one in turns)
    for _ in range(taken, max(taken + 1, limits.max_assistant_turns)):
        if (most := min(end - len(window), limits.max_tokens_per_turn or end)) <= 0:
            return Status.LENGTH
        seed = seeds.get(len(window), seed_of(before.seed, len(window)))
        generated = await _sample(window, params_at(recorded, seed, most, chat), parts.engine)
        message, kind = await chat.read(generated.ids, parts.tools.schemas), generated.finish_reason.kind
        start = len(window)
        window.append_sampled(generated.ids, generated.logprobs, parts.version)
        turns.append(Turn("assistant", message.text, 0, start, len(window), finish_reason=kind, seed=seed))
        records = await run_calls(session, message.calls, limits.max_parallel_calls) if kind == "stop" else []
        record_calls(turns[-1], records)
        told(turns[-1])
        if not records:
            return CUT[kind] or Status.COMPLETED
        answers = [answer_to(call, record) for call, record in zip(message.calls, records, strict=True)]
        start = len(window)
        ids = chat.bridge(window.ids, answers, parts.tools.schemas)
        window.append_observed(ids, chat.images(ids, answers))
        turns.append(Turn("tool", "\n".join(record.response for record in records), 0, start, len(window)))
        told(turns[-1])
    return Status.TURN_LIMIT


async def _sample(window: Transcript, params: SamplingParams, engine: RolloutEngine) -> Generation:
    return await engine.generate(window.ids, params, NAME, window.images)


def sampled_before(recorded: Recorded, at: int) -> Stretch:
    """Return the last sampled stretch before turn `at`, in its transcript. Raises DataError where there is nothing."""
    turns, stretches = recorded.trajectory.turns, recorded.stretches()
    found: dict[int, Stretch] = {}
    for place, turn in enumerate(turns):
        before = [one for one in stretches if one.turn < place and one.transcript == turn.transcript]
        if turn.role != "assistant" and before:
            found[place] = before[-1]
    if at not in found:
        raise DataError(
            f"--turn {at}: want the number of a turn that the policy read after one of its own, one of "
            f"{', '.join(map(str, found)) or 'none'}"
        )
    return found[at]


def _edited(recorded: Recorded, edit: Edit, before: Stretch, parts: Parts) -> Transcript:
    """Return the transcript up to the end of the turn with the other text in it."""
    chat, schemas = parts.chat, parts.tools.schemas
    turn, old = recorded.trajectory.turns[edit.turn], recorded.trajectory.transcripts[before.transcript]
    window = beginning(old, turn.start, placed_images(recorded, chat)[before.transcript])
    answered = recorded.trajectory.turns[before.turn]
    if edit.call is not None and not 0 <= edit.call < len(answered.calls):
        raise DataError(
            f"--call {edit.call}: want the number of one of {len(answered.calls)} calls that turn {edit.turn} answers"
        )
    if old.ids[turn.start : turn.end] == chat.encode(turn.text):  # inside an assistant turn, as ReAct's
        response = "" if edit.call is None else answered.calls[edit.call].response
        window.append_observed(chat.encode(_replaced(turn.text, response, edit) if response else edit.text))
    else:
        asked = chat.parse(old.ids[answered.start : answered.end], schemas).calls
        names = [(call.id, call.name) for call in asked] or [("call_0", "tool")]
        window.append_observed(chat.bridge(window.ids, _messages(turn, answered, edit, names), schemas))
    return window


def _replaced(text: str, response: str, edit: Edit) -> str:
    """Put the other text into the layout that stands around an answer, which may itself spell the answer (`for`)."""
    found = list(re.finditer(re.escape(response), text))
    if len(found) > 1:
        found = list(re.finditer(rf"(?<![^\s>]){re.escape(response)}(?![^\s<])", text))
    if len(found) != 1:
        raise DataError(
            f"--call {edit.call}: want its answer once in the text of turn {edit.turn}, found it {len(found)} times. "
            "Leave --call out, and give the whole text of the turn"
        )
    return text[: found[0].start()] + edit.text + text[found[0].end() :]


def _messages(turn: Turn, answered: Turn, edit: Edit, names: list[tuple[str, str]]) -> list[Message]:
    """Write the turn's messages with the other text. names: id and name of each call that it answers."""
    if turn.role != "tool":
        return [{"role": turn.role, "content": edit.text}]
    responses = [call.response for call in answered.calls]
    if edit.call is None:
        id, name = names[0]
        return [{"role": "tool", "content": edit.text, "tool_call_id": id, "name": name}]
    if len(names) != len(responses):
        raise DataError(
            f"--call {edit.call}: the calls that turn {edit.turn} answers are not written as the chat's are"
        )
    texts = [edit.text if place == edit.call else response for place, response in enumerate(responses)]
    found: list[Message] = [
        {"role": "tool", "content": text, "tool_call_id": id, "name": name}
        for text, (id, name) in zip(texts, names, strict=True)
    ]
    if turn.text == "\n".join([*responses, FINAL_ANSWER_REQUEST]):
        found.append({"role": "user", "content": FINAL_ANSWER_REQUEST})
    return found
