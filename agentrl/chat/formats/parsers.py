"""Tool calls in sampled ids, for the call formats that several models share.

Ids are cut at their markers first, and every piece between is decoded once, so the time is linear in the ids whatever
the policy wrote. A marker that is one token of the vocabulary is matched by its id: the same characters spelled with
other tokens, inside a string argument say, are text. A marker that is no token is matched in the decoded text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from agentrl.chat.codec import Codec
from agentrl.chat.formats.arguments import read_argument
from agentrl.chat.message import AssistantMessage, ParsedCall, make_call, parse_json
from agentrl.tool import ToolSchema

THINK, THINK_END = "<think>", "</think>"


class Found(NamedTuple):
    """One call as it stands in the text, not yet judged."""

    name: Any = None
    arguments: Any = None
    error: str | None = None
    id: str | None = None


BodyParser = Callable[[str, Sequence[ToolSchema]], list[Found]]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes tool calls: the markers around a call, and what stands between them."""

    open: str
    """Empty: a call is the whole message."""
    close: str
    """Empty: a call ends where the message does."""
    body: BodyParser
    ignore: tuple[str, ...] = ()
    """Markers around a group of calls; they carry nothing."""

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for marker in (self.open, self.close, *self.ignore) if marker)


class CallParser:
    """Parses one assistant turn. `format` None: text and reasoning only."""

    def __init__(self, codec: Codec, format: CallFormat | None, *, starts_in_reasoning: bool) -> None:
        self._codec = codec
        self._format = format
        self._starts_in_reasoning = starts_in_reasoning
        markers = (*(format.markers if format else ()), THINK, THINK_END)
        self._tokens = {codec.added[marker]: marker for marker in markers if marker in codec.added}
        spelled = [re.escape(marker) for marker in markers if marker not in codec.added]
        self._spelled = re.compile(f"({'|'.join(spelled)})") if spelled else None

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None) -> AssistantMessage:
        """`ids`: the turn without its stop token."""
        pieces = list(self._lex(ids))
        reasoning, rest = self._split_reasoning(pieces)
        if self._format is None:
            return AssistantMessage(_joined(rest), reasoning)
        if not self._format.open:
            return self._whole_message(reasoning, _joined(rest), tools or ())
        texts, bodies = self._split_calls(rest)
        calls: list[ParsedCall] = []
        for body, closed in bodies:
            found = self._format.body(body, tools or ()) if closed else [Found(error=self._unclosed())]
            raw = body.strip()  # one text for all calls of it: there may be thousands
            calls += [make_call(len(calls) + n, raw, *call) for n, call in enumerate(found)]
        return AssistantMessage(_outside(texts) if calls else "".join(texts), reasoning, tuple(calls))

    def _lex(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """(marker, the text after it) in order; the first has an empty marker."""
        ids = list(ids)
        cuts = [index for index, id in enumerate(ids) if id in self._tokens]
        for cut, end in zip([-1, *cuts], [*cuts, len(ids)], strict=True):
            marker = self._tokens[ids[cut]] if cut >= 0 else ""
            text = self._codec.decode(ids[cut + 1 : end]) if end > cut + 1 else ""
            if self._spelled is None:
                yield marker, text
                continue
            first, *others = self._spelled.split(text)
            yield marker, first
            yield from zip(others[::2], others[1::2], strict=True)

    def _split_reasoning(self, pieces: list[tuple[str, str]]) -> tuple[str | None, list[tuple[str, str]]]:
        """The reasoning at the start, if any, and the pieces after it. What is never closed ends at the first call."""
        blank = not pieces[0][1].strip()
        explicit = blank and len(pieces) > 1 and pieces[1][0] == THINK
        if not (explicit or self._starts_in_reasoning):
            return None, pieces
        begin = 1 if explicit else 0
        markers = [marker for marker, _ in pieces]
        end = _index(markers, THINK_END, begin)
        closed = end is not None
        if end is None and self._format is not None and self._format.open:
            end = _index(markers, self._format.open, begin)
        inside = pieces[begin:end]
        text = (inside[0][1] + _joined(inside[1:])).strip("\n") if inside else ""
        if end is None:
            rest = [("", "")]
        elif closed:
            rest = [("", pieces[end][1].lstrip("\n")), *pieces[end + 1 :]]
        else:
            rest = [("", ""), *pieces[end:]]
        return text if text.strip() else None, rest

    def _split_calls(self, pieces: list[tuple[str, str]]) -> tuple[list[str], list[tuple[str, bool]]]:
        """Texts outside of calls, and the bodies of calls with whether they are closed."""
        assert self._format is not None
        texts: list[str] = []
        bodies: list[tuple[str, bool]] = []
        body: list[str] | None = None
        for marker, text in pieces:
            if body is not None and marker == self._format.close:
                bodies.append(("".join(body), True))
                body = None
                texts.append(text)
            elif body is not None:
                body += (marker, text)
            elif marker == self._format.open:
                body = [text]
            else:
                texts.append(text if marker in self._format.ignore else marker + text)
        if body is not None:
            bodies.append(("".join(body), not self._format.close))
        return texts, bodies

    def _whole_message(self, reasoning: str | None, text: str, tools: Sequence[ToolSchema]) -> AssistantMessage:
        """A message that is one JSON object with a name, or tries to be, is a call."""
        assert self._format is not None
        body = text.strip()
        if not (tools and body.startswith("{") and '"name"' in body):
            return AssistantMessage(text, reasoning)
        found = self._format.body(body, tools)
        return AssistantMessage("", reasoning, tuple(make_call(n, body, *call) for n, call in enumerate(found)))

    def _unclosed(self) -> str:
        assert self._format is not None
        return f"the call is not closed with {self._format.close}"


def _joined(pieces: Iterable[tuple[str, str]]) -> str:
    return "".join(marker + text for marker, text in pieces)


def _outside(texts: list[str]) -> str:
    """Text around calls, without the blanks that separate it from them."""
    first, *others = texts
    return "\n".join(part for part in (first.rstrip(), *(text.strip() for text in others)) if part)


def _index(markers: list[str], marker: str, start: int) -> int | None:
    return markers.index(marker, start) if marker in markers[start:] else None


def json_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Hermes, Qwen2.5 and Qwen3: `{"name": ..., "arguments": {...}}`; Llama 3 says `parameters`."""
    try:
        return [_json_call(parse_json(body.strip()))]
    except ValueError as fault:
        return [Found(error=f"the call is not valid JSON: {fault}")]


def json_list_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Mistral: a JSON array of calls."""
    try:
        value = parse_json(body.strip())
    except ValueError as fault:
        return [Found(error=f"the calls are not a valid JSON array: {fault}")]
    return [_json_call(item) for item in (value if isinstance(value, list) else [value])]


def _json_call(value: Any) -> Found:
    if not isinstance(value, dict):
        return Found(error=f"the call must be a JSON object, not {type(value).__name__}")
    id = value.get("id")
    arguments = value.get("arguments", value.get("parameters"))
    return Found(value.get("name"), arguments, id=id if isinstance(id, str) else None)


def tagged_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """Qwen3-Coder: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`."""
    start = body.find("<function=")
    name, end, rest = body[start + len("<function=") :].partition(">")
    if start < 0 or not end:
        return [Found(error="the call has no <function=name>")]
    return [_tagged_call(name, rest, ("<parameter=", ">", "\n"), tools)]


def invoke_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """MiniMax: `<invoke name="NAME"><parameter name="KEY">VALUE</parameter>...</invoke>`, any number of them."""
    found = []
    _, *calls = body.split('<invoke name="')
    for call in calls:
        name, quoted, rest = call.partition('">')
        inside, closed, _ = rest.partition("</invoke>")
        if quoted and closed:
            found.append(_tagged_call(name, inside, ('<parameter name="', '">', ""), tools))
        else:
            found.append(Found(error='a call is not of the form <invoke name="name">...</invoke>'))
    return found or [Found(error='the call has no <invoke name="name">')]


def _tagged_call(name: str, text: str, tags: tuple[str, str, str], tools: Sequence[ToolSchema]) -> Found:
    """`tags`: what stands before a key, behind it, and around a value, where a template writes it."""
    opening, opened, around = tags
    read = _Reader(name, tools)
    arguments: dict[str, Any] = {}
    at = 0
    while (at := text.find(opening, at)) >= 0:
        key_end = text.find(opened, at + len(opening))
        end = text.find("</parameter>", at)
        if not at < key_end < end:
            return Found(name, error=f"a parameter is not of the form {opening}name{opened}value</parameter>")
        key, value = text[at + len(opening) : key_end], text[key_end + len(opened) : end]
        arguments[key] = read(key, value.removeprefix(around).removesuffix(around))
        at = end
    return Found(name, arguments)


def keyed_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """GLM: `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`."""
    at = body.find("<arg_key>")
    name = (body if at < 0 else body[:at]).strip()
    read = _Reader(name, tools)
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


def fenced_body(body: str, tools: Sequence[ToolSchema]) -> list[Found]:
    """DeepSeek V3: `function<｜tool▁sep｜>NAME`, then the arguments in a fenced JSON block."""
    _, separator, rest = body.partition("<｜tool▁sep｜>")
    if not separator:
        return [Found(error="the call has no <｜tool▁sep｜>")]
    name, _, fenced = rest.strip().partition("\n")
    return [Found(name.strip(), fenced.strip().removeprefix("```json").removesuffix("```").strip())]


class _Reader:
    """Reads the unquoted arguments of one function's calls."""

    def __init__(self, name: str, tools: Sequence[ToolSchema]) -> None:
        functions = (tool.get("function", tool) for tool in tools)
        self._parameters = next((f.get("parameters") or {} for f in functions if f.get("name") == name), {})
        self._properties = self._parameters.get("properties") or {}

    def __call__(self, key: str, text: str) -> Any:
        schema = self._properties.get(key, self._parameters.get("additionalProperties"))
        return read_argument(text, schema, self._parameters)


CALL_FORMATS: dict[str, CallFormat | None] = {
    "hermes": CallFormat("<tool_call>", "</tool_call>", json_body),
    "qwen3_coder": CallFormat("<tool_call>", "</tool_call>", tagged_body),
    "glm": CallFormat("<tool_call>", "</tool_call>", keyed_body),
    "minimax": CallFormat("<minimax:tool_call>", "</minimax:tool_call>", invoke_body),
    "deepseek_v3": CallFormat(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        fenced_body,
        ignore=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    "mistral": CallFormat("[TOOL_CALLS]", "", json_list_body),
    "llama3_json": CallFormat("", "", json_body),
    "none": None,
}


def detect_format(template: str) -> str:
    """The call format that a chat template's own markers speak of; `none` when it speaks of none."""
    if "<tool_call>" in template:
        if "<function=" in template:
            return "qwen3_coder"
        return "glm" if "<arg_key>" in template else "hermes"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3"
    if "<minimax:tool_call>" in template:
        return "minimax"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return "llama3_json"
    return "none"
