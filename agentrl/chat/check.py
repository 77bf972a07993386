"""The start-up check: tools, parser and template must fit together before the first step, not by luck."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.chat.chat import Chat
from agentrl.errors import ConfigError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

SAMPLE_VALUES: dict[str, Any] = {
    "string": "text",
    "integer": 3,
    "number": 1.5,
    "boolean": True,
    "array": [1, 2],
    "object": {"key": "value"},
    "null": None,
}


def start_up_check(chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
    """Render one sample's prompt and return it as text, control tokens visible, for printing.

    Raises ConfigError when the policy could not end its turn; and, where tools are given, when the format has no tool
    parser, when the prompt does not name every tool, or when a call that the template writes is not read back.
    """
    where = f"the tokenizer at {chat.tokenizer.name_or_path} with the chat format {chat.format.name!r}"
    if not chat.stop_token_ids:
        raise ConfigError(f"{where} has no stop token: set eos_token in its tokenizer_config.json")
    text = chat.shown(chat.render(messages, tools))
    if not tools:
        return text
    if not chat.format.parses_tools:
        raise ConfigError(
            f"tools are configured, but {where} has no tool parser: set multi_turn.format, e.g. template:hermes"
        )
    missing = [name for tool in tools if (name := tool["function"]["name"]) not in text]
    if missing:
        raise ConfigError(
            f"{where} renders a prompt without the tools {missing}: its template ignores tools. Use another "
            f"multi_turn.format, a model.chat_template that writes tools, or agent_name react"
        )
    for tool in tools:
        _check_round_trip(chat, tool, tools, where)
    return text


def _check_round_trip(chat: Chat, tool: ToolSchema, tools: Sequence[ToolSchema], where: str) -> None:
    name, arguments = tool["function"]["name"], _sample_arguments(tool)
    function = {"name": name, "arguments": arguments}
    call: Message = {"role": "assistant", "tool_calls": [{"id": "call00000", "type": "function", "function": function}]}
    sampled = _sampled(chat, call, tools)
    parsed = chat.parse(sampled, tools)
    if [(found.name, found.arguments) for found in parsed.calls] != [(name, arguments)]:
        calls = [found.error or (found.name, found.arguments) for found in parsed.calls]
        raise ConfigError(
            f"{where} writes a call of {name} with {arguments} as {chat.decode(sampled)!r}, and reads it back as "
            f"{calls or 'no call'}: template and parser do not fit together; set multi_turn.format"
        )


def _sampled(chat: Chat, call: Message, tools: Sequence[ToolSchema]) -> list[int]:
    """The call as the policy would sample it, with reasoning where the generation prompt has begun some."""
    question: Message = {"role": "user", "content": "u"}
    try:
        ids, mask = chat.render_training([question, call], tools)
    except ConfigError:
        ids, mask = chat.render_training([question, {**call, "reasoning_content": "r"}], tools)
    return [id for id, trained in zip(ids, mask, strict=True) if trained]


def _sample_arguments(tool: ToolSchema) -> dict[str, Any]:
    """A value of the declared type for every parameter that has a plain one."""
    properties = (tool["function"].get("parameters") or {}).get("properties") or {}
    arguments = {}
    for name, schema in properties.items():
        if "enum" in schema:
            arguments[name] = schema["enum"][0]
        elif isinstance(schema.get("type"), str) and schema["type"] in SAMPLE_VALUES:
            arguments[name] = SAMPLE_VALUES[schema["type"]]
    return arguments
