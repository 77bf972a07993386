"""Calls of GigaChat 3.1: `<|function_call|>` and a JSON object."""

from __future__ import annotations

from agentrl.chat.formats.hermes import json_body
from agentrl.chat.formats.parsers import CallFormat

FORMAT = CallFormat("<|function_call|>", "", json_body, signs=("<|function_call|>",))
