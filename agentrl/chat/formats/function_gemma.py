"""Calls of FunctionGemma: Gemma 4's form with other marks, in which text may stand for any value."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.arguments import parameters_of, read_argument
from agentrl.chat.formats.gemma import read_call
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.system.json_value import as_object
from agentrl.tool import ToolSchema

QUOTE = "<escape>"


def call_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `call:NAME{KEY:<escape>VALUE<escape>,...}`."""
    return [_typed(call, tools) for call in read_call(body, QUOTE)]


def _typed(call: Found, tools: Sequence[ToolSchema]) -> Found:
    """Read the arguments that a call gives as text, as `read_argument` does."""
    if not (isinstance(call.name, str) and isinstance(call.arguments, dict)):
        return call
    root = parameters_of(call.name, tools)
    schemas, other = as_object(root.get("properties")), root.get("additionalProperties")
    read = {
        key: read_argument(value, schemas.get(key, other), root) if isinstance(value, str) else value
        for key, value in call.arguments.items()
    }
    return call._replace(arguments=read)


FORMAT = CallFormat(
    "<start_function_call>", "<end_function_call>", call_body, tags=(QUOTE,), signs=("<start_function_call>", QUOTE)
)
