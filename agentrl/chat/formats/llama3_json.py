"""Calls in JSON without markers: a whole message that is an object with a name (Llama 3 and 4) or an array (xLAM).

Nemotron Nano has the array in `<TOOLCALL>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.chat.formats.hermes import json_body
from agentrl.chat.formats.mistral import json_list
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def array_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read a JSON array of calls."""
    return json_list(body)


def is_call(message: str) -> bool:
    """Say whether a whole message, which has no markers, is or tries to be a call."""
    return message.startswith("{") and '"name"' in message


def is_array(message: str) -> bool:
    """Say whether a whole message, which has no markers, is or tries to be a list of calls."""
    return message.startswith("[") and '"name"' in message


FORMAT = CallFormat("", "", json_body, is_call=is_call, signs=("ipython", '"parameters"'), families=("llama-3",))
"""`ipython` is the role of tool answers, with any tokens around roles."""
XLAM = CallFormat("", "", array_body, is_call=is_array)
NEMOTRON_NANO = CallFormat("<TOOLCALL>", "</TOOLCALL>", array_body, signs=("<TOOLCALL>",))
