"""Learnt turns read back: a rollout would parse them to the conversation's own messages."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter

from agentrl.chat.chat import Chat
from agentrl.chat.formats.parsers import THINK, THINK_END
from agentrl.chat.formats.template import TemplateFormat
from agentrl.chat.message import ParsedCall, content_text, normalise
from agentrl.errors import ConfigError, DataError
from agentrl.system.json_value import as_object
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, ToolCall

STAND_INS: list[ToolSchema] = [{"type": "function", "function": {"name": "any"}}]
"""Tools of a row without any: some formats read calls only where there are tools."""
READ = frozenset(("role", "content", "reasoning_content", "tool_calls", "weight"))
"""Fields of an assistant message whose words are compared."""
ADVICE = "Give text and calls turns of their own, choose another chat template (model.chat_template), or leave it out"


def turns_of(ids: Sequence[int], mask: Sequence[int]) -> list[list[int]]:
    """Cut a transcript of `Chat.render_training` [T] into the ids of its assistant turns."""
    runs = groupby(zip(ids, mask, strict=True), itemgetter(1))
    return [[id for id, _ in run] for is_learnt, run in runs if is_learnt]


def check_read_back(
    chat: Chat,
    messages: Sequence[Message],
    turns: Sequence[Sequence[int]],
    tools: Sequence[ToolSchema] | None,
    *,
    mistaken: bool = False,
) -> None:
    """Check assistant turns as the template writes them. Parsing takes time linear in their tokens.

    Each learnt turn ends with its only stop token, and its calls are read with names and arguments as they are. Its
    text is read as it is, or as a part of it, where the template leaves some out. A turn without calls may have some in
    its text, if they are whole.

    Args:
        messages: a conversation; messages of the assistant that are not learnt have `weight` 0.
        turns: by `turns_of`, of all of them.
        mistaken: True for a conversation whose calls or text may be wrong on purpose: only ends of turns are checked.

    Raises DataError that names the message.
    """
    said = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if len(said) != len(turns):
        raise DataError(
            f"expected {len(said)} assistant turns with something between them, found {len(turns)}: the chat template "
            "writes nothing between two of them"
        )
    for at, turn in zip(said, turns, strict=True):
        if messages[at].get("weight") == 0:
            continue
        fault = _behind_stop(chat, turn) or (None if mistaken else _misread(chat, messages[at], turn, tools))
        if fault is not None:
            raise DataError(f"message {at} (the first is 0): {fault}. {ADVICE}")


def letters(text: str) -> str:
    """Reduce a text to the characters that tokenizers and templates keep."""
    return "".join(unicodedata.normalize("NFKC", text).split())


def reasoning_marks(chat: Chat) -> tuple[str, str]:
    """Return the marks around reasoning that the chat's format knows, without blanks."""
    opens, closes = chat.format.reasoning if isinstance(chat.format, TemplateFormat) else (THINK, THINK_END)
    return letters(opens), letters(closes)


def _behind_stop(chat: Chat, turn: Sequence[int]) -> str | None:
    """Say which text follows the first stop token of a turn; None: nothing."""
    stop = next((at for at, id in enumerate(turn) if id in chat.stop_token_ids), len(turn))
    if stop < len(turn) - 1:
        left = len(turn) - 1 - stop
        return (
            f"expected a turn whose first stop token is its last, found {chat.decode(turn[stop : stop + 1])!r} before "
            f"{left} more tokens, {chat.decode(turn[stop + 1 :])[:80]!r}: a policy stops there, and never writes them"
        )
    return None


def _misread(chat: Chat, message: Message, turn: Sequence[int], tools: Sequence[ToolSchema] | None) -> str | None:
    """Say the difference between a turn as it is read and its message; None: they are the same."""
    parsed = chat.parse(turn, tools or STAND_INS)
    calls = normalise([message])[0].get("tool_calls", [])
    if broken := next((call.error for call in parsed.calls if call.error and not calls), None):
        return f"expected text or whole calls, found {chat.decode(turn)[:200]!r}, which is read as an error: {broken}"
    if (calls and not chat.format.parses_tools) or (parsed.calls and not calls):
        return None  # Nobody reads the calls here; or they are in the text, as the row has it.
    wanted = [(call["function"]["name"], call["function"].get("arguments")) for call in calls]
    found = [(call.name, call.arguments) for call in parsed.calls]
    if found != wanted and not _alike(chat, message, calls, parsed.calls, turn, tools):
        read = [call.error or (call.name, call.arguments) for call in parsed.calls]
        return (
            f"expected a turn of which {chat.format.name} reads {len(wanted)} calls, {wanted!r:.200}, found "
            f"{chat.decode(turn)[:300]!r}, read as {len(read)} calls, {read!r:.300}"
        )
    if not _is_said(chat, message, parsed.text, parsed.reasoning or "", turn):
        text = content_text(message.get("content"))
        return f"expected a turn whose text is read as {text[:200]!r}, found {parsed.text[:200]!r}"
    return None


def _alike(
    chat: Chat,
    message: Message,
    calls: Sequence[ToolCall],
    found: Sequence[ParsedCall],
    turn: Sequence[int],
    tools: Sequence[ToolSchema] | None,
) -> bool:
    """Check that calls which are read with other values are written as the same tokens: texts do not show types."""
    if len(calls) != len(found) or not all(map(_has_shape, found, calls)):
        return False
    again: list[ToolCall] = [
        {**call, "function": {"name": one.name, "arguments": one.arguments or {}}}
        for call, one in zip(calls, found, strict=True)
    ]
    try:
        return list(turn) == chat.format.sampled(chat.prepared([{**message, "tool_calls": again}])[0], tools)
    except ConfigError:
        return False


def _has_shape(found: ParsedCall, call: ToolCall) -> bool:
    """Check a call's name and the names of its arguments; a template may leave out arguments that are null."""
    given = as_object(call["function"].get("arguments"))
    meant = {key for key, value in given.items() if value is not None}
    return found.name == call["function"]["name"] and meant <= {*(found.arguments or {})} <= {*given}


def _is_said(chat: Chat, message: Message, text: str, reasoning: str, turn: Sequence[int]) -> bool:
    """Check the text that is read, in which reasoning may stand between its marks, or apart from the text."""
    said, read = letters(content_text(message.get("content"))), letters(text)
    if read == said:
        return True
    for mark in reasoning_marks(chat):
        said, read = said.replace(mark, ""), read.replace(mark, "")
    thought, wanted = letters(reasoning), letters(message.get("reasoning_content") or "")
    if said in (read, thought) or thought + read in (said, wanted + said):
        return True
    if any(name not in READ and isinstance(value, str) and value.strip() for name, value in message.items()):
        return said in read  # The template may write another field, too.
    # The template leaves a part of it out, which is counted, and nothing else is read.
    return read in said and said not in letters(chat.decode(turn))
