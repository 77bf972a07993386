"""Calls of Llama 3, and of Llama 4 as JSON: a whole message that is a JSON object with a name."""

from __future__ import annotations

from agentrl.chat.formats.hermes import json_body
from agentrl.chat.formats.parsers import CallFormat


def is_call(message: str) -> bool:
    """Say whether a whole message, which has no markers, is or tries to be a call."""
    return message.startswith("{") and '"name"' in message


FORMAT = CallFormat("", "", json_body, is_call=is_call, signs=("ipython", '"parameters"'), families=("llama-3",))
"""`ipython` is the role of tool answers, with any tokens around roles."""
