"""Completions as TRL's trainer hands them to reward functions: messages in the fields of its parser, or plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agentrl.trajectory import Message, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Completion = list[dict[str, object]]
THINKING = re.compile(r"\.thinking\b|['\"]thinking['\"]")
"""A template that reads reasoning by this name: the parser's field has it, too."""


def completion_of(
    trajectory: Trajectory, prompt: int, tokenizer: PreTrainedTokenizerBase, *, with_tools: bool
) -> Completion:
    """Make the messages after the first `prompt` ones: the policy's turns, and the answers of tools.

    Without tools a turn's content is its text as the tokenizer decodes it, reasoning included. A tokenizer with a
    `response_template` of its own parses it instead. With tools a turn has calls and reasoning as fields, and a turn
    with a call that cannot be read is plain text.
    """
    turns = iter([turn for turn in trajectory.trained_turns if turn.role == "assistant"])
    completion: Completion = []
    for message in trajectory.messages[prompt:]:
        if message["role"] != "assistant" or (turn := next(turns, None)) is None:
            completion.append({key: message[key] for key in ("role", "name", "content") if key in message})
            continue
        before = trajectory.transcripts[turn.transcript].ids
        ids = before[turn.start : turn.end]
        if with_tools:
            parsed = _with_fields(message, tokenizer)
        else:
            parsed = _parsed(ids, before[: turn.start], tokenizer)
        if parsed is None:
            parsed = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        completion.append(parsed)
    return completion


def _with_fields(message: Message, tokenizer: PreTrainedTokenizerBase) -> dict[str, object] | None:
    """Write a parsed turn in the fields of TRL's parser; None where a call cannot be read."""
    found: dict[str, object] = {"role": "assistant", "content": str(message.get("content") or "").strip()}
    if reasoning := str(message.get("reasoning_content") or "").strip():
        found["thinking" if THINKING.search(str(tokenizer.chat_template)) else "reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        if not all(isinstance(call["function"].get("arguments"), Mapping) for call in calls):
            return None
        found["tool_calls"] = [{"type": "function", "function": dict(call["function"])} for call in calls]
    return found


def _parsed(ids: Sequence[int], before: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, object] | None:
    """Parse a turn by the tokenizer's own `response_template`; None without one, or where it does not fit."""
    if getattr(tokenizer, "response_template", None) is None:
        return None
    try:
        found = tokenizer.parse_response(list(ids), prefix=list(before))
    except (ValueError, TypeError):
        return None
    if found is None:
        return None
    content = found.get("content") or ""
    return {**found, "content": content.removesuffix(str(tokenizer.eos_token)) if isinstance(content, str) else content}


def completion_ids_of(trajectory: Trajectory) -> list[int]:
    """Return the tokens after the prompt that are not left out of training, the answers of tools included."""
    kept = (one for one in trajectory.transcripts if one.trained_to != 0)
    return [id for one in kept for id in one.ids[one.prompt_length : one.trained_end]]
