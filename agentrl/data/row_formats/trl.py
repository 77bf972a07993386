"""The types of data sets that TRL trains on: messages, text, and a prompt with its completion."""

from __future__ import annotations

import re

from agentrl.data.messages import Unfit, message_list
from agentrl.data.row_formats.format import Conversation, PlainText, Row, RowFormat

_MESSAGES = re.compile(r"\s*\[\s*\{\s*[\"'](role|content)[\"']")


def is_text(value: object) -> bool:
    """Check for a text other than a list of messages in JSON text, whole or broken."""
    return isinstance(value, str) and not _MESSAGES.match(value)


def text_of(row: Row, column: str) -> str:
    """Read a column of text. Raises Unfit."""
    value = row[column]
    if not isinstance(value, str) or not value:
        raise Unfit(f"column {column}", "text", value)
    return value


def _messages(row: Row) -> Conversation:
    return Conversation(row["messages"], row.get("tools") or row.get("functions"))


def _text(row: Row) -> PlainText:
    return PlainText(text_of(row, "text"))


def _prompt_completion(row: Row) -> Conversation | PlainText:
    prompt, completion = row["prompt"], row["completion"]
    if is_text(prompt) and is_text(completion):
        return PlainText(text_of(row, "completion"), text_of(row, "prompt"))
    texts = [column for column in ("prompt", "completion") if is_text(row[column])]
    if texts:
        expected = "messages, as the other column has them, or text in both columns"
        raise Unfit(f"column {texts[0]}", expected, row[texts[0]])
    begun = message_list(prompt, "column prompt")
    return Conversation([*begun, *message_list(completion, "column completion")], row.get("tools"), len(begun))


MESSAGES = RowFormat(("messages",), _messages, ("tools", "functions"))
TEXT = RowFormat(("text",), _text)
PROMPT_COMPLETION = RowFormat(("prompt", "completion"), _prompt_completion, ("tools",))
