"""Conversations with tool calls, as data sets write them, converted to OpenAI's messages.

Read are OpenAI's form ({"messages", "tools"}), ShareGPT's as `agentrl.data.row_formats.sharegpt` reads it, xLAM's
({"query", "tools", "answers"}, arXiv:2409.03215), ToolACE's ({"system", "conversations"}, with calls as Python writes
them, arXiv:2409.00920) and Glaive's function calling v2 ({"system", "chat"}). A fault that a form cannot show is left
for the check of `data_prep.tool_conversations` to find.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from agentrl.chat.message import parse_json
from agentrl.data.messages import Unfit, message_list, with_our_names, with_wrapped_tools
from agentrl.data.row_formats.sharegpt import ROLES, calling, read_sharegpt
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema

COLUMNS = ("messages", "tools", "functions", "conversations", "system", "chat", "query", "answers")
"""Members of records that are read."""
LOGGED = {"request", "response", "request_body", "response_body", "input", "output", "choices", "resourceSpans"}
"""Members that records of `data_prep.traces` have."""


class BadConversation(Exception):
    """Conversation that cannot be read. `reason` is one of a few, to be counted; `detail` says what was found."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation in OpenAI's form."""

    messages: list[dict[str, Any]]
    """Messages of the roles system, user, assistant, tool; calls as {"function": {"name", "arguments"}}, arguments as
    they were."""
    tools: list[ToolSchema]
    ends_with_calls: bool = False
    """True: the data set's conversations end with the calls, which nothing answers."""


def conversation(fields: Mapping[str, JSON]) -> Conversation:
    """Convert a record. Raises BadConversation."""
    try:
        return _converted(fields)
    except Unfit as bad:
        expected, opened, why = bad.expected.partition(" (")  # without the why, which differs by record
        raise BadConversation(f"expected {expected}", f"{bad.place}, found {bad.found}{opened}{why}") from None


def _converted(fields: Mapping[str, JSON]) -> Conversation:
    system = fields.get("system")
    if "messages" in fields:
        messages = [with_our_names(one) for one in message_list(fields["messages"], "`messages`")]
        return Conversation(messages, tools_of(fields.get("tools") or fields.get("functions")))
    if "conversations" in fields and isinstance(system, str) and TOOLACE in system:
        return toolace(fields, system)
    if "conversations" in fields:
        made = read_sharegpt(fields)
        messages = [with_our_names(one) for one in cast(list[dict[str, Any]], made.messages)]
        return Conversation(messages, tools_of(cast(JSON, made.tools)))
    if "chat" in fields:
        return glaive(fields)
    if "query" in fields and "answers" in fields:
        return xlam(fields)
    keys = ", ".join(sorted(map(str, fields)))
    hint = "; a log of calls or spans is read by python -m data_prep.traces" if LOGGED & fields.keys() else ""
    raise BadConversation("unknown form", f"no messages, conversations, chat, nor query with answers, but {keys}{hint}")


def chat_call(id: JSON, name: JSON, arguments: JSON) -> JSON:
    """Write a call as Chat Completions have it, its arguments as JSON text."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}


def tools_of(value: JSON) -> list[ToolSchema]:
    """Read the tools of a record, if it has any. Raises Unfit."""
    if value in (None, "", "[]", []):
        return []
    # Checked when calls are (tool_conversations.argument_check).
    return cast(list[ToolSchema], with_wrapped_tools(cast(JSON, message_list(value, "`tools`"))))


_TYPES = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "list": "array",
    "tuple": "array",
    "set": "array",
    "array": "array",
    "dict": "object",
    "object": "object",
}


def xlam(fields: Mapping[str, JSON]) -> Conversation:
    """Convert a conversation in xLAM's form. Raises Unfit."""
    if not isinstance(fields["query"], str):
        raise Unfit("`query`", "text", fields["query"])
    answers = message_list(fields["answers"], "`answers`")
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": fields["query"]},
        calling("", cast(list[JSON], answers)),
    ]
    tools = [xlam_tool(tool) for tool in message_list(fields["tools"], "`tools`")]
    return Conversation(messages, tools, ends_with_calls=True)


def xlam_tool(tool: dict[str, Any]) -> ToolSchema:
    """Convert a tool with parameters {name: {type, description, default}} and Python's types: `List[int], optional`."""
    parameters = tool.get("parameters")
    if not isinstance(parameters, dict) or parameters.get("type") == "object":
        return _wrapped(tool)
    properties, required = {}, []
    for name, told in parameters.items():
        if not isinstance(told, dict):
            raise Unfit("`tools`", f"a schema as parameter {name}", told)
        written = str(told.get("type", ""))
        properties[name] = {
            **_json_type(written),
            **({"description": told["description"]} if isinstance(told.get("description"), str) else {}),
        }
        if "optional" not in written.lower() and "default" not in told:
            required.append(name)
    schema = {"type": "object", "properties": properties, "required": required}
    return _wrapped({**{key: tool[key] for key in ("name", "description") if key in tool}, "parameters": schema})


def _wrapped(function: dict[str, Any]) -> ToolSchema:
    return cast(list[ToolSchema], with_wrapped_tools([function]))[0]


def _json_type(written: str) -> dict[str, str]:
    """Return JSON Schema's `type` for Python's name of a type; empty where it has none."""
    kind = _TYPES.get(re.split(r"[\[,\s]", written.lower(), maxsplit=1)[0])
    return {"type": kind} if kind else {}


TOOLACE = "list of functions in JSON format that you can invoke"
"""Words of the system message in which ToolACE explains tools."""
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")


def toolace(fields: Mapping[str, JSON], system: str) -> Conversation:
    """Convert a conversation in ToolACE's form. Raises Unfit.

    The system message, which explains tools and how to call them, is left out: the chat template explains them in its
    own way. Names become names that servers take: `Market Trends API` is `Market_Trends_API`.
    """
    begin = system.find("[", system.find(TOOLACE))
    try:
        if begin < 0:
            raise ValueError("no list of tools in it")
        listed, _ = json.JSONDecoder().raw_decode(system, begin)
    except (ValueError, RecursionError) as error:
        raise Unfit("`system`", f"a list of functions in JSON ({error})", system[max(begin, 0) :]) from None
    tools = [_wrapped(_toolace_tool(tool)) for tool in message_list(listed, "`system`")]
    messages: list[dict[str, Any]] = []
    for number, turn in enumerate(message_list(fields["conversations"], "`conversations`")):
        role, value = ROLES.get(str(turn.get("from"))), turn.get("value")
        if role not in ("user", "assistant", "tool") or not isinstance(value, str):
            raise Unfit(f"turn {number}", "`from` user, assistant or tool, and a text as `value`", turn)
        waiting = len(messages[-1].get("tool_calls", ())) if messages else 0
        if role == "assistant" and value.lstrip().startswith("[") and value.rstrip().endswith(")]"):
            messages.append(calling("", python_calls(value, f"turn {number}")))
        elif role == "tool" and waiting > 1:
            messages += [{"role": "tool", "content": text} for text in _answers(value, waiting, f"turn {number}")]
        else:
            messages.append({"role": role, "content": value})
    return Conversation(messages, tools)


def _answers(value: str, calls: int, place: str) -> list[str]:
    """Split the answer to several calls, a list in JSON, into one for each. Raises Unfit."""
    try:
        found = parse_json(value)
    except ValueError:
        found = None
    if not isinstance(found, list) or len(found) != calls:
        raise Unfit(place, f"a JSON list with an answer to each of the {calls} calls", value)
    return [json.dumps(one, ensure_ascii=False) for one in found]


def _toolace_tool(tool: dict[str, Any]) -> dict[str, Any]:
    kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {
        **kept,
        "name": _NO_NAME.sub("_", str(kept.get("name", ""))),
        "parameters": _with_json_types(kept.get("parameters", {})),
    }


def _with_json_types(schema: JSON) -> JSON:
    """Replace Python's names of types in a schema. A member that is called `type` is no type."""
    if not isinstance(schema, dict):
        return schema
    made = {key: _with_json_types(value) if key == "items" else value for key, value in schema.items()}
    if isinstance(named := made.get("properties"), dict):
        made["properties"] = {name: _with_json_types(value) for name, value in named.items()}
    if isinstance(kind := made.pop("type", None), str):
        made.update(_json_type(kind))
    return made


_PIECE = re.compile(r"\"(?:[^\"\\]|\\.?)*(?:\"|\Z)|'(?:[^'\\]|\\.?)*(?:'|\Z)|[^\"'()]+|[()]", re.DOTALL)
_NAMES = {"true": True, "false": False, "null": None}


def python_calls(text: str, place: str) -> list[JSON]:
    """Read calls as ToolACE writes them, `[Name of a tool(argument="value"), other(n=1)]`. Raises Unfit."""
    calls: list[JSON] = []
    name, arguments, depth = "", "", 0
    for piece in _PIECE.findall(text.strip().removeprefix("[").removesuffix("]")):
        depth -= piece == ")"
        if depth > 0:
            arguments += piece
        elif piece == ")":
            named = _NO_NAME.sub("_", name.strip(", \n"))
            calls.append({"name": named, "arguments": _arguments(arguments, place)})
            name = arguments = ""
        elif piece != "(":
            name += piece
        depth += piece == "("
    if depth or name.strip() or not calls:
        raise Unfit(place, "calls as in [name(argument=value)]", text)
    return calls


def _arguments(text: str, place: str) -> JSON:
    """Read the arguments of a call, each `name=value` with a value of Python's or JSON's. Raises Unfit."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
            raise ValueError("arguments without names")
        found = {str(one.arg): ast.literal_eval(_Constants().visit(one.value)) for one in call.keywords}
        value: JSON = parse_json(json.dumps(found, allow_nan=False))
        return value
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Unfit(place, f"arguments as in name=value ({error})", text) from None


class _Constants(ast.NodeTransformer):
    """Replaces JSON's names of constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_NAMES[node.id]) if node.id in _NAMES else node


_TURN = re.compile(r"(?:\A\s*|\n\n)(USER|ASSISTANT|FUNCTION RESPONSE):")
_FUNCTIONCALL = "<functioncall>"
_QUOTED = re.compile(r"(\"arguments\"\s*:\s*)'(.*)'(\s*\}\s*)\Z", re.DOTALL)


def glaive(fields: Mapping[str, JSON]) -> Conversation:
    """Convert a conversation in Glaive's form, where tools and turns are in two texts. Raises Unfit.

    A system message that lists functions is left out, as the chat template explains them in its own way.
    """
    system, chat = fields.get("system") or "", fields["chat"]
    if not isinstance(system, str) or not isinstance(chat, str):
        raise Unfit("`system` and `chat`", "two texts", system if isinstance(chat, str) else chat)
    tools = [_wrapped(tool) for tool in _objects(system)]
    messages: list[dict[str, Any]] = []
    words = system.removeprefix("SYSTEM:").strip()
    if words and not tools:
        messages.append({"role": "system", "content": words})
    before, *turns = _TURN.split(chat)
    if before.strip() or not turns:
        raise Unfit("`chat`", "turns that begin with USER:, ASSISTANT: or FUNCTION RESPONSE:", chat)
    for number, (who, text) in enumerate(zip(turns[::2], turns[1::2], strict=True)):
        said = text.replace("<|endoftext|>", "").strip()
        if who == "ASSISTANT" and _FUNCTIONCALL in said:
            spoken, _, written = said.partition(_FUNCTIONCALL)
            messages.append(calling(spoken.strip(), [_glaive_call(written.strip(), f"turn {number}")]))
        else:
            role = {"USER": "user", "ASSISTANT": "assistant"}.get(who, "tool")
            messages.append({"role": role, "content": said})
    return Conversation(messages, tools)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Yield the functions in a text, JSON objects one after another. Raises Unfit."""
    begin = text.find("{")
    while begin >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            raise Unfit("`system`", f"functions in JSON, one after another ({error})", text[begin:]) from None
        yield value
        begin = text.find("{", end)


def _glaive_call(text: str, place: str) -> JSON:
    """Read a call, whose arguments are JSON in single quotes. Raises Unfit."""

    def as_text(match: re.Match[str]) -> str:
        return f"{match[1]}{json.dumps(match[2].replace(chr(92) + chr(39), chr(39)))}{match[3]}"

    try:
        return parse_json(_QUOTED.sub(as_text, text))
    except ValueError as error:
        raise Unfit(place, f"a call in JSON ({error})", text) from None
