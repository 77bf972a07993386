"""Turns that teach what no rollout should do: a chat template writes them, and nobody would see it."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.message import content_text, parse_json
from agentrl.data.messages import Unfit
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message


def check_teachable(messages: Sequence[Message], tools: Sequence[ToolSchema] | None, shown: int = 0) -> None:
    """Check the assistant turns that are learnt: all but the first `shown`, and but those with `weight` 0.

    Raises Unfit for a turn that says and calls nothing, and for a call whose arguments are no JSON. If the row has
    tools, the call's tool must be among them. Raises it also for a turn with two calls of one id, and for a turn whose
    calls are answered in part.
    """
    names = {tool["function"]["name"] for tool in tools or ()}
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for at in turns[shown:]:
        turn, place = messages[at], f"message {at}"
        if turn.get("weight") == 0:
            continue
        calls = turn.get("tool_calls") or []
        if not calls and not content_text(turn.get("content")).strip():
            raise Unfit(place, "an assistant turn with text or a call, or weight 0 where it is not learnt", turn)
        for number, call in enumerate(calls):
            function = call["function"]
            if not _is_whole(function.get("arguments")):
                raise Unfit(f"{place}, call {number}", "arguments in valid JSON", function.get("arguments"))
            if names and function["name"] not in names:
                listed = ", ".join(sorted(names))
                raise Unfit(f"{place}, call {number}", f"a call of one of the row's tools ({listed:.200})", function)
        ids = [call["id"] for call in calls if call.get("id")]
        if len({*ids}) < len(ids):
            raise Unfit(place, "another id for each call of a turn", ids)
        answers = next((n for n, one in enumerate(messages[at + 1 :]) if one["role"] != "tool"), len(messages) - at - 1)
        if calls and 0 < answers < len(calls):
            raise Unfit(place, f"an answer to each of the {len(calls)} calls of the turn, or to none", f"{answers}")


def _is_whole(arguments: object) -> bool:
    """Check that arguments, which may be a JSON text, can be read."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            parse_json(arguments)
        except ValueError:
            return False
    return True
