"""Conversations with tool calls for SFT: `python -m data_prep.tool_conversations --source FILE.jsonl --out DIR`.

Reads the forms of `data_prep.conversation_formats` and writes sft.parquet for `python -m agentrl.sft`. A conversation
that would teach something wrong (a call of no listed tool, arguments against its schema, a call without an answer,
roles out of order) is left out and counted by its reason; `--strict` refuses the file instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from agentrl.chat.message import parse_json
from agentrl.data.messages import FurtherFields, Unfit, with_one_flag, without_flag
from agentrl.data.unread import UnreadColumns
from agentrl.errors import ConfigError, DataError, UserError
from agentrl.system.visible import complain, visible
from agentrl.tool.arguments import ArgumentCheck
from agentrl.trajectory import FunctionCall, Message, ToolCall
from data_prep.conversation_formats import COLUMNS, BadConversation, Conversation, conversation
from data_prep.files import Row, write_rows
from data_prep.left_out import LeftOuts
from data_prep.records import read_records

CALL = pa.struct(
    {
        "id": pa.string(),
        "type": pa.string(),
        "function": pa.struct({"name": pa.string(), "arguments": pa.string()}),
    }
)
MESSAGE = pa.struct(
    {
        "role": pa.string(),
        "content": pa.string(),
        "name": pa.string(),
        "reasoning_content": pa.string(),
        "tool_calls": pa.list_(CALL),
        "tool_call_id": pa.string(),
        "weight": pa.int64(),
    }
)
SCHEMA = pa.schema({"messages": pa.list_(MESSAGE), "tools": pa.string()})

FOLLOWS: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "tool": ("assistant",),
}
"""Roles that may come after each role of a data set, where no call waits for its answer."""
SERVED: dict[str | None, tuple[str, ...]] = {
    None: ("system", "user", "assistant"),
    **dict.fromkeys(("system", "user", "assistant", "tool"), ("system", "user", "assistant")),
}
"""The same of prompts that servers have answered: programs put instructions and questions where they like."""


LOGGED = {"feedback", "user_feedback", "score", "rating", "thumbs", "finish_reason", "stop_reason", "error"}
"""Members of records that only `data_prep.traces` reads: what became of an answer, and what people thought of it."""


@dataclass(slots=True)
class Conversations:
    """Good conversations of a file; what was left out is known when all are read."""

    source: Path
    strict: bool
    left_out: LeftOuts = field(default_factory=LeftOuts)
    further: FurtherFields = field(default_factory=FurtherFields)
    """Fields of messages that are not in the rows."""
    unread: UnreadColumns = field(default_factory=lambda: UnreadColumns(COLUMNS))
    logged: set[str] = field(default_factory=set)
    """Members that show that the file is a log."""

    def rows(self) -> Iterator[Row]:
        """Iterate over the rows. Raises DataError; with `strict` also for the first bad conversation."""
        for record in read_records(self.source):
            self.logged |= LOGGED & record.fields.keys()
            try:
                found = conversation(record.fields)
                messages = checked(found)
                self.unread.note_row(record.fields)
                self.further.note([{**one, "name": ""} for one in without_flag(cast(list[Message], found.messages))])
                yield {"messages": messages, "tools": json.dumps(found.tools) if found.tools else None}
            except BadConversation as error:
                if self.strict:
                    raise DataError(f"{record.where}: {error}. Mend it, or leave out --strict") from error
                self.left_out.add(error.reason, f"{record.where}: {error}")


@dataclass(slots=True)
class Calls:
    """Calls of a conversation, numbered as they come, and which of them wait for an answer."""

    checks: dict[str, ArgumentCheck]
    count: int = 0
    waiting: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)
    """Data set's own ids of the last message's calls, where it has any, to ours."""

    def made(self, message: Mapping[str, Any]) -> list[ToolCall]:
        """Number and check the calls of an assistant's message. Raises BadConversation."""
        made: list[ToolCall] = []
        self.given = {}
        for call in message.get("tool_calls") or ():
            function = called(call, self.checks)
            id_ = f"call{self.count:05d}"
            made.append({"id": id_, "type": "function", "function": function})
            if call.get("id"):
                self.given[str(call["id"])] = id_
            self.waiting.append(id_)
            self.count += 1
        return made

    def answered(self, message: Mapping[str, Any]) -> str:
        """Return our id of the call that a tool's message answers: by its id, else the first that waits."""
        id_ = message.get("tool_call_id")
        call = self.given.get(str(id_)) if id_ and self.given else self.waiting[0]
        if call not in self.waiting:
            raise BadConversation("an answer to no call", f"tool_call_id {id_!r}")
        self.waiting.remove(call)
        return call


def checked(found: Conversation, follows: Mapping[str | None, Sequence[str]] = FOLLOWS) -> list[Message]:
    """Check the messages and put ids on all calls and answers. Raises BadConversation.

    `follows`: roles that may come after each role.
    """
    calls = Calls(dict(argument_check(json.dumps(tool)) for tool in found.tools))
    messages: list[Message] = []
    previous = None
    for message in flagged(found):
        role, allowed = message.get("role"), ("tool",) if calls.waiting else follows.get(previous, ())
        if role not in allowed:
            what = "a call is not answered" if calls.waiting else "roles are out of order"
            raise BadConversation(what, f"{role} after {previous or 'the beginning'}, expected {' or '.join(allowed)}")
        messages.append(checked_message(message, calls))
        previous = role
    if previous != "assistant":
        raise BadConversation("it does not end with the assistant", f"but with {previous or 'nothing'}")
    if calls.waiting and not found.ends_with_calls:
        raise BadConversation("a call is not answered", "it is the end")
    return messages


def flagged(found: Conversation) -> list[Message]:
    """Return the messages, with `weight` 0 where one is not to be learnt. Raises BadConversation."""
    try:
        return with_one_flag(cast(list[Message], found.messages))
    except Unfit as bad:
        raise BadConversation("weight, train or loss is neither 0 nor 1", str(bad)) from None


def checked_message(message: Mapping[str, Any], calls: Calls) -> Message:
    """Check one message and put ids on its calls, or on its answer. Raises BadConversation."""
    text = text_of(message)
    made: Message = {"role": message["role"], "content": text}
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    if "weight" in message:
        made["weight"] = message["weight"]
    if made["role"] == "tool":
        made["tool_call_id"] = calls.answered(message)
    if made["role"] == "assistant":
        found = calls.made(message)
        if not text.strip() and not found:
            raise BadConversation("an assistant's turn is empty", "")
        if found:
            made["tool_calls"] = found
        if reasoning := message.get("reasoning_content"):
            if not isinstance(reasoning, str):
                raise BadConversation("reasoning_content is no text", repr(reasoning)[:80])
            made["reasoning_content"] = reasoning
    return made


def text_of(message: Mapping[str, Any]) -> str:
    """Return the content; parts of text are joined. Raises BadConversation."""
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part["text"] for part in content if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise BadConversation("a content is no text", repr(content)[:80])
    return content


def called(call: object, checks: dict[str, ArgumentCheck]) -> FunctionCall:
    """Check a call: its name and arguments, as JSON text. Raises BadConversation when they do not fit."""
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise BadConversation("a call without a name", repr(call)[:80])
    if name not in checks:
        raise BadConversation("a call of a tool that is not listed", f"{name!r}; listed: {', '.join(checks) or 'none'}")
    given = function.get("arguments") or {}
    try:
        arguments = parse_json(given) if isinstance(given, str) else given
    except ValueError as error:
        raise BadConversation("arguments are no JSON", f"{name}: {given[:80]!r} ({error})") from error
    if not isinstance(arguments, dict):
        raise BadConversation("arguments are no mapping", f"{name}: {arguments!r}"[:160])
    problem = checks[name](arguments)
    if problem is not None:
        raise BadConversation("arguments do not fit the tool's schema", f"{name}: {problem}")
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


@lru_cache(4096)
def argument_check(tool: str) -> tuple[str, ArgumentCheck]:
    """Compile the schema of a tool in JSON text: (name, check). Raises BadConversation.

    Cached, because conversations of a set share tools.
    """
    schema = json.loads(tool)
    try:
        return schema["function"]["name"], ArgumentCheck(schema)
    except (ConfigError, TypeError, LookupError) as error:
        raise BadConversation("a tool's schema", str(error)) from error


def main(arguments: list[str] | None = None) -> int:
    """Write the file and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m data_prep.tool_conversations", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--source", type=Path, required=True, help="JSON lines or a JSON array, may be gzipped")
    parser.add_argument("--out", type=Path, required=True, help="directory to write sft.parquet to")
    parser.add_argument("--strict", action="store_true", help="refuse a file with a bad conversation, naming the first")
    given = parser.parse_args(arguments)
    found = Conversations(given.source, given.strict)
    path = given.out / "sft.parquet"
    try:
        count = write_rows(path, found.rows(), SCHEMA)
        print(f"{path}: {count} conversations, {found.left_out.total} left out")
    except UserError as error:
        return complain(error)
    finally:
        for line in found.left_out.lines("left out"):
            print(line, flush=True)
        for name, number in sorted(found.further.counts.items()):
            print(visible(f"not read: the field {name} of messages, in {number} conversations"), flush=True)
        if columns := found.unread.told():
            print(visible(columns), flush=True)
        if found.logged:
            told = ", ".join(sorted(found.logged))
            print(f"warning: a log ({told}) is read by python -m data_prep.traces, which leaves cut answers out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
