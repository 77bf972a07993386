"""Calls of GLM and Laguna: the name and pairs of `<arg_key>` and `<arg_value>` in `<tool_call>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.chat.formats.arguments import ArgumentReader
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.tool import ToolSchema


def keyed_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Read `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`."""
    at = body.find("<arg_key>")
    name = (body if at < 0 else body[:at]).strip()
    read = ArgumentReader(name, tools)
    arguments: dict[str, Any] = {}
    while at >= 0:
        key_end = body.find("</arg_key>", at)
        begin = body.find("<arg_value>", at)
        end = body.find("</arg_value>", at)
        if not at < key_end < begin < end:
            error = "an argument is not of the form <arg_key>name</arg_key><arg_value>value</arg_value>"
            return [Found(name, error=error)]
        key, value = body[at + len("<arg_key>") : key_end].strip(), body[begin + len("<arg_value>") : end]
        arguments[key] = read(key, value)
        at = body.find("<arg_key>", end)
    return [Found(name, arguments)]


FORMAT = CallFormat(
    "<tool_call>",
    "</tool_call>",
    keyed_body,
    signs=("<tool_call>", "<arg_key>"),
    families=(
        *("glm-4.5", "glm-5", "glm-5.1", "glm-5.3"),
        *("laguna-xs.2", "laguna-m.1", "laguna-xs-2.1", "laguna-s-2.1"),
    ),
)
