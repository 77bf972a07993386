"""Synthetic chat templates: every way in which real ones differ is a choice, and a template is one of each.

A template is written twice from the same choices: as Jinja, and in Python (`Synthetic.text`, `Synthetic.turn`), which
says what the transcript has to be.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import starmap

from agentrl.chat.codec import GUARD
from agentrl.system.json_value import JSON
from agentrl.tool import Schema, ToolSchema
from agentrl.trajectory import Message

EOS = "<|endoftext|>"
CONTROL = (
    *(EOS, "<|ended|>", "<|called|>", "<|turn|>", "<|closed|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
    *("<think>", "</think>", "<tool_response>", "</tool_response>"),
)
"""Tokens around turns, by the names that the choices below use."""
Arguments = dict[str, JSON]


def as_json(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_python(value: JSON) -> str:
    # `str` escapes what is not printable, in lists and objects.
    return value if isinstance(value, str) else str(value).replace(repr(GUARD)[1:-1], GUARD)


def text_or_json(value: JSON) -> str:
    return value if isinstance(value, str) else as_json(value)


def mixed(value: JSON) -> str:
    return as_json(value) if isinstance(value, dict | list) else as_python(value)


QUOTE = '<|"|>'


def quoted_by_tokens(value: JSON) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{quoted_by_tokens(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(quoted_by_tokens, value)) + "]"
    return QUOTE + value + QUOTE if isinstance(value, str) else as_json(value)


QUOTED_BY_TOKENS = "quoted(value)"
MACRO = (
    f"{{%- macro quoted(value) %}}{{%- if value is string %}}{{{{- '{QUOTE}' + value + '{QUOTE}' }}}}"
    "{%- elif value is mapping %}{{- '{' }}{%- for key, item in value.items() %}"
    "{{- (',' if not loop.first else '') + key + ':' + quoted(item) }}{%- endfor %}{{- '}' }}"
    "{%- elif value is sequence %}{{- '[' }}{%- for item in value %}"
    "{{- (',' if not loop.first else '') + quoted(item) }}{%- endfor %}{{- ']' }}"
    "{%- else %}{{- value | tojson }}{%- endif %}{%- endmacro %}"
)

VALUES: dict[str, Callable[[JSON], str]] = {
    "value if value is string else value | tojson": text_or_json,
    "value | string": as_python,
    "value | tojson if value is mapping or (value is sequence and value is not string) else value | string": mixed,
}
"""How templates write values without quotes, as Jinja and in Python."""
TEXT_OR_JSON, PYTHON, MIXED = VALUES
JSON_VALUE = "value | tojson"
IN_CDATA = "'<![CDATA[' + value + ']]>' if value is string and ('<' in value or '\\n' in value) else value | string"


def in_cdata(value: JSON) -> str:
    return f"<![CDATA[{value}]]>" if isinstance(value, str) and ("<" in value or "\n" in value) else as_python(value)


M3 = "]<]minimax[>["
ELEMENTS = "elements(value)"


def elements(value: JSON) -> str:
    if isinstance(value, dict | list):
        members = value.items() if isinstance(value, dict) else [("item", item) for item in value]
        return "".join(f"{M3}<{key}>{elements(item)}{M3}</{key}>" for key, item in members)
    return "" if value is None else text_or_json(value)


FORMS = {
    **VALUES,
    QUOTED_BY_TOKENS: quoted_by_tokens,
    IN_CDATA: in_cdata,
    ELEMENTS: elements,
    JSON_VALUE: as_json,
}


@dataclass(frozen=True)
class Calls:
    """One way to write calls: `PARTS` of Jinja and Python in turn, for a call's name, key and value."""

    format: str
    """Name of the parser."""
    head: str
    """Before the arguments, with NAME and INDEX in it."""
    tail: str
    value: str | None = None
    """How values are written, one of FORMS; None: all arguments as one JSON object."""
    before: str = ""
    """Before a parameter's value, with KEY in it."""
    after: str = ""
    comma: str = ""
    """Between parameters."""
    said: tuple[str, str] | None = None
    """What KIND in `before` becomes for text and for other values."""
    group: tuple[str, str] = ("", "")
    between: str = ""
    tokens: tuple[str, ...] = ()
    """Markers that a vocabulary may have as tokens."""
    single: bool = False
    alone: bool = False
    """A call is the whole message."""
    think: tuple[str, str] = ("<think>", "</think>")
    exact: bool = True
    """With `tokens` in the vocabulary, each value can be told from every marker."""

    @property
    def opening(self) -> tuple[str, ...]:
        """The tokens of `think`, without the text between and behind them."""
        return tuple(re.findall("<[^>]*>", "".join(self.think)))

    def write(self, calls: Sequence[tuple[str, Arguments]]) -> str:
        return self.group[0] + self.between.join(starmap(self._write, enumerate(calls))) + self.group[1]

    def _write(self, index: int, call: tuple[str, Arguments]) -> str:
        name, given = call
        if self.value is None:
            return self.call(name, as_json(given), index)
        parameters = [self.parameter(key, FORMS[self.value](value), type(value)) for key, value in given.items()]
        return self.call(name, self.comma.join(parameters), index)

    def call(self, name: str, inside: str, index: int = 0) -> str:
        """A call whose arguments are written as `inside`."""
        return self.head.replace("NAME", name).replace("INDEX", str(index)) + inside + self.tail

    def parameter(self, key: str, text: str, kind: type = str) -> str:
        """A parameter whose value of type `kind` is written as `text`."""
        before = self.before.replace("KEY", key)
        if self.said is not None:
            before = before.replace("KIND", self.said[kind is not str])
        return before + text + self.after.replace("KEY", key)

    @property
    def jinja(self) -> str:
        head = literal(self.head).replace("NAME", "' + call.function.name + '")
        head = head.replace("INDEX", "' + loop.index0 | string + '")
        if self.value is None:
            inside = "{{- call.function.arguments | tojson }}"
        else:
            before = literal(self.before).replace("KEY", "' + key + '")
            if self.said is not None:
                text, other = map(literal, self.said)
                before = before.replace("KIND", f"' + ({text} if value is string else {other}) + '")
            inside = (
                "{%- for key, value in call.function.arguments.items() %}"
                f"{{{{- {literal(self.comma)} if not loop.first else '' }}}}"
                f"{{{{- {before} }}}}{{{{- {self.value} }}}}{{{{- {literal(self.after)} }}}}{{%- endfor %}}"
            )
        refuse = "{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call a message') }}{%- endif %}"
        return (
            "{%- if message.tool_calls %}" + (refuse if self.single else "") + f"{{{{- {literal(self.group[0])} }}}}"
            f"{{%- for call in message.tool_calls %}}{{{{- {literal(self.between)} if not loop.first else '' }}}}"
            f"{{{{- {head} }}}}{inside}{{{{- {literal(self.tail)} }}}}{{%- endfor %}}"
            f"{{{{- {literal(self.group[1])} }}}}{{%- endif %}}"
        )


def literal(text: str) -> str:
    """`text` as Jinja's and Python's string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


TOOL_CALL = ("<tool_call>", "</tool_call>")
ARG = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK = tuple(f"<｜tool▁{word}｜>" for word in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
HY3 = tuple(f"<{word}:opensource>" for word in ("tool_calls", "/tool_calls", "tool_call", "/tool_call", "tool_sep"))
HY3_ARG = tuple(f"<{word}:opensource>" for word in ("arg_key", "/arg_key", "arg_value", "/arg_value"))

KIMI = (
    *(f"<|tool_{word}|>" for word in ("calls_section_begin", "calls_section_end", "call_begin", "call_end")),
    "<|tool_call_argument_begin|>",
)
HARMONY = tuple(f"<|{word}|>" for word in ("start", "channel", "constrain", "message", "end", "call"))
LIST = ("<tool_calls>", "</tool_calls>")
PLUGIN = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
K3 = ("<|open|>", "<|close|>", "<|sep|>")
MUSE = ("<|start|>", "<|message|>", "<|eom|>")
INKLING = ("<|message_model|>", "<|content_invoke_tool_json|>", "<|end_message|>", "<|content_text|>")


def json_call(name: str, open: str = "", close: str = "", key: str = "arguments") -> tuple[str, str]:
    return f'{open}{{"name": "{name}", "{key}": ', f"}}{close}"


def tags(format: str, value: str) -> Calls:
    """Qwen3-Coder, MiniMax and GLM, each with one way to write values."""
    match format:
        case "qwen3_coder":
            head, tail = "<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>"
            ends = "<parameter=KEY>\n", "\n</parameter>\n"
            return Calls(format, head, tail, value, *ends, between="\n", tokens=TOOL_CALL, exact=False)
        case "minimax":
            group = "<minimax:tool_call>\n", "</minimax:tool_call>"
            ends = '<parameter name="KEY">', "</parameter>\n"
            return Calls(format, '<invoke name="NAME">\n', "</invoke>\n", value, *ends, group=group, exact=False)
        case _:
            ends = "<arg_key>KEY</arg_key><arg_value>", "</arg_value>"
            return Calls("glm", "<tool_call>NAME", "</tool_call>", value, *ends, tokens=(*TOOL_CALL, *ARG))


PYTHON_MARKS = "<|python_start|>", "<|python_end|>"


def python_calls(format: str, open: str, close: str, between: str = ", ") -> Calls:
    tokens = open.rstrip("["), close.lstrip("]")
    parts = "NAME(", ")", JSON_VALUE, "KEY="
    return Calls(format, *parts, comma=", ", group=(open, close), between=between, tokens=tokens)


CALLS: tuple[Calls, ...] = (
    Calls("hermes", *json_call("NAME", "<tool_call>\n", "\n</tool_call>"), between="\n", tokens=TOOL_CALL),
    *(tags(format, value) for format in ("qwen3_coder", "minimax", "glm") for value in VALUES),
    Calls("mistral", *json_call("NAME"), group=("[TOOL_CALLS] [", "]"), between=", ", tokens=("[TOOL_CALLS]",)),
    Calls("mistral", "[TOOL_CALLS]NAME[ARGS]", "", tokens=("[TOOL_CALLS]", "[ARGS]")),
    Calls("llama3_json", *json_call("NAME", key="parameters"), single=True, alone=True),
    Calls(
        *("llama4_json", *json_call("NAME", key="parameters")),
        group=("".join(PYTHON_MARKS), ""),
        alone=True,
        tokens=PYTHON_MARKS,
    ),
    Calls(
        *("deepseek_v3", f"{DEEPSEEK[2]}function{DEEPSEEK[4]}NAME\n```json\n", f"\n```{DEEPSEEK[3]}"),
        group=(DEEPSEEK[0], DEEPSEEK[1]),
        tokens=DEEPSEEK,
    ),
    Calls(
        "deepseek_v3", f"{DEEPSEEK[2]}NAME{DEEPSEEK[4]}", DEEPSEEK[3], group=(DEEPSEEK[0], DEEPSEEK[1]), tokens=DEEPSEEK
    ),
    Calls(
        *("hy3", f"{HY3[2]}NAME{HY3[4]}\n", HY3[3], TEXT_OR_JSON),
        *(f"{HY3_ARG[0]}KEY{HY3_ARG[1]}\n{HY3_ARG[2]}", f"{HY3_ARG[3]}\n"),
        group=(f"{HY3[0]}\n", HY3[1]),
        between="\n",
        tokens=(*HY3, *HY3_ARG),
        think=("<think:opensource>", "</think:opensource>"),
    ),
    Calls(
        *("deepseek_v4", '<｜DSML｜invoke name="NAME">\n', "</｜DSML｜invoke>\n", TEXT_OR_JSON),
        *('<｜DSML｜parameter name="KEY" string="KIND">', "</｜DSML｜parameter>\n"),
        said=("true", "false"),
        group=("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
        exact=False,
    ),
    Calls(*("kimi", f"{KIMI[2]}functions.NAME:INDEX{KIMI[4]}", KIMI[3]), group=(KIMI[0], KIMI[1]), tokens=KIMI),
    Calls(
        *("gemma", "<|tool_call>call:NAME{", "}<tool_call|>", QUOTED_BY_TOKENS, "KEY:"),
        comma=",",
        tokens=("<|tool_call>", "<tool_call|>", QUOTE),
        think=("<|channel>thought\n", "<channel|>"),
    ),
    Calls(
        *("inkling", *json_call("NAME", f"{INKLING[0]}NAME{INKLING[1]}", INKLING[2], "args")),
        tokens=INKLING,
        think=("<|content_thinking|>", INKLING[2]),
    ),
    Calls(
        *("harmony", f"{HARMONY[0]}assistant to=functions.NAME{HARMONY[1]}commentary {HARMONY[2]}json{HARMONY[3]}"),
        HARMONY[5],
        tokens=HARMONY,
        think=(f"{HARMONY[1]}analysis{HARMONY[3]}", HARMONY[4]),
    ),
    Calls("jamba", *json_call("NAME"), group=("<tool_calls>[", "]</tool_calls>"), between=", ", tokens=LIST),
    Calls("jamba", *json_call("NAME"), group=("<tool_calls>\n", "\n</tool_calls>"), between="\n", tokens=LIST),
    Calls("granite", *json_call("NAME"), group=("<|tool_call|>[", "]"), between=", ", tokens=("<|tool_call|>",)),
    Calls("granite_20b", *json_call("NAME", "<function_call> "), tokens=("<function_call>",)),
    Calls("gigachat", *json_call("NAME", "<|function_call|>"), tokens=("<|function_call|>",)),
    Calls("internlm", *json_call("NAME", f"{PLUGIN[0]}{PLUGIN[1]}\n", PLUGIN[2]), tokens=PLUGIN),
    Calls("functionary", "<function=NAME>", "</function>", tokens=("</function>",), exact=False),
    Calls(
        *("seed_oss", "<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>", PYTHON),
        *("<parameter=KEY>", "</parameter>\n"),
        between="\n",
        tokens=("<seed:tool_call>", "</seed:tool_call>"),
        think=("<seed:think>", "</seed:think>"),
        exact=False,
    ),
    Calls(
        *("cohere", '{"tool_call_id": "INDEX", "tool_name": "NAME", "parameters": ', "}"),
        group=("<|START_ACTION|>[", "]<|END_ACTION|>"),
        between=", ",
        tokens=("<|START_ACTION|>", "<|END_ACTION|>"),
        think=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    Calls(
        *("apertus", '{"NAME": ', "}"),
        group=("<|tools_prefix|>[", "]<|tools_suffix|>"),
        between=", ",
        tokens=("<|tools_prefix|>", "<|tools_suffix|>"),
        think=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    Calls(
        *("minicpm", '<function name="NAME">', "</function>", IN_CDATA, '<param name="KEY">', "</param>"),
        between="\n",
        exact=False,
    ),
    Calls(
        *("function_gemma", "<start_function_call>call:NAME{", "}<end_function_call>", PYTHON),
        *("KEY:<escape>", "<escape>", ","),
        tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Calls("functionary_3_2", ">>>NAME\n", "", exact=False),
    Calls(
        *("kimi_k3", f'{K3[0]}call tool="NAME" index="INDEX"{K3[2]}', f"{K3[1]}call{K3[2]}", TEXT_OR_JSON),
        *(f'{K3[0]}argument key="KEY" type="KIND"{K3[2]}', f"{K3[1]}argument{K3[2]}"),
        said=("string", "object"),
        group=(f"{K3[0]}tools{K3[2]}", f"{K3[1]}tools{K3[2]}"),
        tokens=K3,
        think=(f"{K3[0]}think{K3[2]}", f"{K3[1]}think{K3[2]}"),
    ),
    Calls(
        *("muse", f'{MUSE[0]}assistant to=NAME{MUSE[1]}<atem:function_calls>\n<atem:invoke name="NAME">\n'),
        *(f"</atem:invoke>\n</atem:function_calls>{MUSE[2]}", TEXT_OR_JSON),
        *('<atem:parameter name="KEY">', "</atem:parameter>\n"),
        tokens=MUSE,
        think=(f" to=self{MUSE[1]}", MUSE[2]),
        exact=False,
    ),
    Calls(
        *("deepseek_v32", '<｜DSML｜invoke name="NAME">\n', "</｜DSML｜invoke>\n", TEXT_OR_JSON),
        *('<｜DSML｜parameter name="KEY" string="KIND">', "</｜DSML｜parameter>\n"),
        said=("true", "false"),
        group=("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        exact=False,
    ),
    python_calls("lfm2", "<|tool_call_start|>[", "]<|tool_call_end|>"),
    python_calls("olmo3", "<function_calls>", "</function_calls>", between="\n"),
    replace(python_calls("pythonic", "[", "]"), tokens=(), alone=True),
    Calls("xlam", *json_call("NAME"), group=("[", "]"), between=", ", alone=True),
    Calls("phi4_mini", *json_call("NAME"), group=("functools[", "]"), between=", ", alone=True),
    Calls(
        *("nemotron_nano", *json_call("NAME")),
        group=("<TOOLCALL>[", "]</TOOLCALL>"),
        between=", ",
        tokens=("<TOOLCALL>", "</TOOLCALL>"),
    ),
)
NESTED = Calls(
    *("minimax_m3", f'{M3}<invoke name="NAME">', f"{M3}</invoke>\n", ELEMENTS, f"{M3}<KEY>", f"{M3}</KEY>"),
    group=(f"{M3}<tool_call>\n", f"{M3}</tool_call>"),
    exact=False,
)
"""Writes values without a sign of their type at any depth, so that only a schema of all of them says what they were."""
HEADERS: dict[str, dict[str, str]] = {
    "token": {role: f"<|{role}|>\n" for role in ("system", "user", "assistant", "tool")},
    "two tokens": {role: f"<|turn|><|{role}|>" for role in ("system", "user", "assistant", "tool")},
    "token and name": {role: f"<|turn|>{role}\n" for role in ("system", "user", "assistant", "tool")},
    "text": {role: f"\n{role}: " for role in ("system", "user", "assistant", "tool")},
    "none of the assistant's": {"system": "<|system|>", "user": "<|user|>", "assistant": "", "tool": "<|tool|>"},
}
THINK_TAGS = ("<think>", "</think>")
THINK = "<think>\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Synthetic:
    """A template: one choice of each kind."""

    calls: Calls
    header: str
    end: str
    last: str | None
    """The end of a turn that is the conversation's last; None: the usual one."""
    call_end: str | None
    """The end of a turn with calls; None: the usual one."""
    other_end: str | None
    """The end of turns of other roles; None: the usual one."""
    final: str
    """Behind a finished conversation."""
    standing: bool
    """A generation prompt ends every conversation."""
    preamble: str
    reasoning: str
    tools: str
    answers: str
    trims: bool
    """Contents of users, tools and assistants are stripped."""
    strict: bool
    """A user's turn behind a tool's answer is refused."""
    marked: bool
    """Markers of calls are tokens of the vocabulary."""
    names: tuple[tuple[str, str], ...] = ()
    """A vocabulary's own names of the tokens in CONTROL."""

    def named(self, text: str) -> str:
        for name, own in (*self.names, *zip(THINK_TAGS, self.calls.think, strict=True)):
            text = text.replace(name, own)
        return text

    @property
    def headers(self) -> Mapping[str, str]:
        return HEADERS[self.header]

    def ending(self, *, calls: bool) -> str:
        """What ends an assistant turn that others follow."""
        return self.call_end if calls and self.call_end is not None else self.end

    @property
    def generation(self) -> str:
        opened = {"opened": THINK, "opened, not in the history": THINK, "closed": EMPTY_THOUGHT}
        opened["closed, not in the history"] = EMPTY_THOUGHT
        return self.headers["assistant"] + opened.get(self.reasoning, "")

    @property
    def after_others(self) -> str:
        return self.end if self.other_end is None else self.other_end

    def text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """What follows an assistant turn's end: system, user and tool messages, and the generation prompt."""
        parts: list[str] = []
        last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for at, message in enumerate(messages):
            role, content = message["role"], str(message["content"])
            content = content.strip() if self.trims else content
            if at == last_user and tools and self.tools == "before the last user":
                parts.append(tools_text(tools))
            if role != "tool":
                parts.append(self.headers[role] + content + self.after_others)
            elif self.answers == "inside a user's turn":
                first = at == 0 or messages[at - 1]["role"] != "tool"
                final = at + 1 == len(messages) or messages[at + 1]["role"] != "tool"
                parts.append(self.headers["user"] if first else "")
                parts.append(f"\n<tool_response>\n{content}\n</tool_response>" + (self.after_others if final else ""))
            else:
                written = as_json(content) if self.answers == "as JSON" else content
                named = f"{message.get('name')}: " if self.answers == "with the name" else ""
                parts.append(self.headers["tool"] + named + written + self.after_others)
        return self.named("".join(parts) + self.generation)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """The first prompt."""
        listed = tools_text(tools) if tools and self.tools in ("first", "unasked") else ""
        return self.named(self.preamble) + listed + self.text(messages, tools)

    def turn(self, reasoning: str, content: str, calls: Sequence[tuple[str, Arguments]]) -> str:
        """What a policy samples, without its end."""
        if self.reasoning.startswith("opened"):
            thought = reasoning + self.named("\n</think>\n\n")
        else:
            thought = self.named(THINK) + reasoning + self.named("\n</think>\n\n") if reasoning else ""
        return thought + content + (self.calls.write(calls) if calls else "")

    @property
    def jinja(self) -> str:
        macro = MACRO if self.calls.value == QUOTED_BY_TOKENS else ""
        names = {role: self.named(header) for role, header in self.headers.items()}
        content = "message.content | trim" if self.trims else "message.content"
        listed = "{%- if tools %}" + f"{{{{- {TOOLS_TEXT} }}}}{{%- endif %}}"
        unasked = "{%- for tool in tools %}{%- endfor %}" if self.tools == "unasked" else ""
        other_end = literal(self.named(self.after_others))
        answer = f"{content} | tojson" if self.answers == "as JSON" else content
        if self.answers == "with the name":
            answer = f"message.name + ': ' + ({answer})"
        if self.answers == "inside a user's turn":
            tool = (
                "{%- if loop.first or loop.previtem.role != 'tool' %}{{- headers.user }}{%- endif %}"
                f"{{{{- '\\n<tool_response>\\n' + ({answer}) + '\\n</tool_response>' }}}}"
                f"{{%- if loop.last or loop.nextitem.role != 'tool' %}}{{{{- {other_end} }}}}{{%- endif %}}"
            )
        else:
            tool = f"{{{{- headers.tool + ({answer}) + {other_end} }}}}"
        strict = (
            "{%- if message.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool' %}"
            "{{- raise_exception('user after tool') }}{%- endif %}"
        )
        before_user = (
            "{%- if message.role == 'user' and (messages[loop.index:] | selectattr('role', 'equalto', 'user') | list "
            f"| length == 0) %}}{listed}{{%- endif %}}"
        )
        end, call_end = (literal(self.named(self.ending(calls=calls))) for calls in (False, True))
        last = "" if self.last is None else f"{literal(self.named(self.last))} if loop.last and not standing else "
        generation = literal(self.named(self.generation))
        return (
            f"{macro}{{%- set headers = {names!r} %}}{{%- set standing = add_generation_prompt or {self.standing} %}}"
            f"{{{{- {literal(self.named(self.preamble))} }}}}"
            + (unasked + listed if self.tools in ("first", "unasked") else "")
            + "{%- for message in messages %}"
            + (strict if self.strict else "")
            + (before_user if self.tools == "before the last user" else "")
            + "{%- if message.role == 'tool' %}"
            + tool
            + "{%- elif message.role == 'assistant' %}{{- headers.assistant }}"
            + self._thought()
            + f"{{{{- {content} }}}}{self.calls.jinja}"
            + f"{{{{- {last}({call_end} if message.tool_calls else {end}) }}}}"
            + f"{{%- else %}}{{{{- headers[message.role] + ({content}) + {other_end} }}}}{{%- endif %}}{{%- endfor %}}"
            + f"{{{{- {generation} if standing else {literal(self.named(self.final))} }}}}"
        )

    def _thought(self) -> str:
        write = self.named("{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}")
        match self.reasoning:
            case "always" | "opened":
                return "{%- if message.reasoning_content %}" + write + "{%- endif %}"
            case "of the last turn":
                return "{%- if message.reasoning_content and loop.last %}" + write + "{%- endif %}"
            case "closed":
                return self.named("{%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}")
        return ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """Added tokens of the vocabulary: those of CONTROL, too, so that their spelling in a text is always guarded."""
        own = (*dict(self.names).values(), *self.calls.opening, *(self.calls.tokens if self.marked else ()))
        return tuple(dict.fromkeys((*CONTROL, *own)))

    def __str__(self) -> str:
        return ", ".join(f"{one.name}={getattr(self, one.name)!r}" for one in fields(self))


TOOLS_TEXT = "'Tools: ' + tools | tojson + '\\n'"


def tools_text(tools: Sequence[ToolSchema]) -> str:
    return f"Tools: {json.dumps(tools, ensure_ascii=False)}\n"


CHOICES: dict[str, tuple[object, ...]] = {
    "calls": CALLS,
    "header": tuple(HEADERS),
    "end": ("<|ended|>", "<|ended|>\n", "\n<|ended|>\n", "<|closed|><|ended|>", "", EOS),
    "last": (None, None, None, "", EOS),
    "call_end": (None, None, "<|called|>", "<|called|>\n"),
    "other_end": (None, None, "<|ended|>", "\n", ""),
    "final": ("", "", EOS, "\n"),
    "standing": (False, False, False, True),
    "preamble": ("", EOS, "<|turn|><|system|>You help.<|ended|>"),
    "reasoning": (
        *("never", "always", "of the last turn", "opened", "opened, not in the history", "closed"),
        "closed, not in the history",
    ),
    "tools": ("first", "first", "unasked", "before the last user", "ignored"),
    "answers": ("own", "inside a user's turn", "as JSON", "with the name"),
    "trims": (False, True),
    "strict": (False, False, True),
    "marked": (True, True, False),
}


def draw_template(source: random.Random, names: tuple[tuple[str, str], ...] = ()) -> Synthetic:
    chosen = {kind: source.choice(options) for kind, options in CHOICES.items()}
    drawn = Synthetic(**chosen, names=names)  # type: ignore[arg-type]
    if drawn.calls.format in (
        "apertus",
        "harmony",
    ):  # With nothing behind it the closing marker of these calls ends turns itself.
        return replace(drawn, last=drawn.last or None, call_end=drawn.call_end or drawn.end or "<|called|>")
    if drawn.calls.format == "functionary_3_2":  # Its turns have no reasoning.
        return replace(drawn, reasoning="never")
    if drawn.calls.format == "kimi_k3" and drawn.reasoning.endswith("history"):  # Calls begin as reasoning does.
        return replace(drawn, reasoning="always")
    return drawn


PARAMETERS: Schema = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "more": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"type": ["string", "null"]},
        "list": {"type": "array"},
        "tree": {"type": "object"},
    },
}
TOOLS: list[ToolSchema] = [
    {"type": "function", "function": {"name": name, "description": "Look.", "parameters": PARAMETERS}}
    for name in ("search", "look_up")
]
PLAIN = ("x", "two words", " padded ", "line\n", "\n\n", "42", "True", "null", "é中😀", 'it\'s "so"', "\\n", "[1]", "")
MARKUP = (
    "</parameter>",
    "<arg_value>",
    "</tool_call>",
    "<think>",
    '"}',
    "</invoke>",
    "[ARGS]",
    "<|ended|>",
    "{",
    "```",
)


def draw_arguments(source: random.Random, *, markup: bool) -> Arguments:
    """Arguments that the schema of TOOLS allows; with `markup`, texts that spell pieces of calls, too."""

    def text() -> str:
        pool = PLAIN + MARKUP if markup else PLAIN
        return "".join(source.choice(pool) for _ in range(source.randint(1, 3)))

    def value(depth: int = 0) -> JSON:
        kind = source.randrange(8 if depth < 2 else 6)
        scalars: tuple[JSON, ...] = (None, True, False, source.randint(-9, 10**12), source.randint(-99, 99) / 8, text())
        if kind < 6:
            return scalars[kind]
        items = [value(depth + 1) for _ in range(source.randrange(3))]
        return items if kind == 6 else {f"k{at}": item for at, item in enumerate(items)}

    made: Arguments = {
        "text": text(),
        "more": text(),
        "count": source.randint(-(10**15), 10**15),
        "ratio": source.randint(-999, 999) / 8,
        "flag": source.random() < 0.5,
        # Told from null by its spelling alone where values have no quotes.
        "maybe": source.choice((None, "word")),
        "list": [value() for _ in range(source.randrange(3))],
        "tree": {f"k{at}": value() for at in range(source.randrange(3))},
    }
    keys = source.sample(sorted(made), source.randint(0, 4))
    return {key: made[key] for key in keys}


EVERY_TOKEN = tuple(dict.fromkeys([*CONTROL, *(token for calls in CALLS for token in (*calls.tokens, *calls.opening))]))
"""Of a vocabulary in which all calls have their markers as tokens."""
