"""Call formats of further families; templates that count calls, take arguments as text, or mark answers."""

from __future__ import annotations

import pytest

from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.chat.formats.parsers import CallFormat, CallParser
from agentrl.chat.load import detect_format, make_format
from agentrl.config.registries import CALL_FORMATS
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.conversations import TOOLS, call
from tests.chat.synthetic import EVERY_TOKEN, M3
from tests.chat.vocabularies import TINY
from tests.naming import Names, assert_names

ACTION = "<|START_ACTION|>{}<|END_ACTION|>"
TOOL_LIST = "<|tools_prefix|>{}<|tools_suffix|>"
K3_CALL = "<|open|>call {}<|close|>call<|sep|>"
ATEM = " to={}<|message|><atem:function_calls>{}</atem:function_calls>"
INVOKE = '<atem:invoke name="now"></atem:invoke>'


def parser(name: str) -> CallParser:
    format = CALL_FORMATS.get(name)
    assert isinstance(format, CallFormat)
    return CallParser(TINY.codec(EVERY_TOKEN), format, starts_in_reasoning=False)


@pytest.mark.parametrize(
    ("format", "text", "error"),
    [
        ("jamba", '<tool_calls>[{"name": "now"}', "</tool_calls>"),
        ("jamba", '<tool_calls>{"name": "now"} x</tool_calls>', ("JSON", "Extra data")),
        ("granite", '<|tool_call|>[{"name": "now"', "JSON"),
        ("internlm", '<|action_start|>{"name": "now"}<|action_end|>', "<|plugin|>"),
        ("functionary", "<function=now</function>", "<function=name>{...}</function>"),
        ("functionary_3_2", "now\n{}x", ("JSON", "Extra data")),
        ("seed_oss", "<seed:tool_call>now</seed:tool_call>", ("<function=name>", "beginning")),
        ("cohere", ACTION.format('[{"name": "now"}]'), "['name']"),
        ("cohere", ACTION.format('[{"tool_call_id": "x", "tool_name": "now"}]'), ("tool_call_id", "action's")),
        (
            "cohere",
            ACTION.format('[{"tool_call_id": "1000", "tool_name": "now"}]'),
            ("tool_call_id", "action's"),
        ),
        ("apertus", TOOL_LIST.format('[{"now": {}, "then": {}}]'), "JSON"),
        ("minicpm", "<function name=\"now'></function>", "<function name="),
        ("function_gemma", "<start_function_call>now{}<end_function_call>", "call:name"),
        ("kimi_k3", K3_CALL.format('name="now"<|sep|>'), ("<|open|>call", "tool=")),
        ("kimi_k3", K3_CALL.format('tool="now"<|sep|>x'), ("'x'", "text")),
        ("kimi_k3", '<|open|>call tool="now"<|sep|>', ("<|close|>call<|sep|>", "closed")),
        ("muse", ATEM.format("then", INVOKE), ("'now'", "'then'")),
        ("muse", " to=now<|message|>{}", ("'now'", "<atem:function_calls>")),
        ("minimax_m3", f"{M3}<tool_call>{M3}<now>{M3}</now>{M3}</tool_call>", ("form", "a call")),
        (
            "minimax_m3",
            f'{M3}<tool_call>{M3}<invoke name="now">{M3}<x>1{M3}</invoke>{M3}</tool_call>',
            ("</invoke>", "cannot"),
        ),
    ],
)
def test_broken_calls_say_why(format: str, text: str, error: Names) -> None:
    (found,) = parser(format).parse(TINY.codec(EVERY_TOKEN).encode(text), TOOLS).calls
    assert_names(found.error, error)
    assert found.error, found
    assert found.arguments is None


def test_a_call_on_a_line_may_hold_other_ends_of_lines() -> None:
    text = '<tool_calls>{"name": "f", "arguments": {"a": "x\u2028y"}}\n{"name": "g", "arguments": {}}</tool_calls>'
    found = parser("jamba").parse(TINY.codec(EVERY_TOKEN).encode(text), TOOLS).calls
    assert [(one.name, one.error) for one in found] == [("f", None), ("g", None)]


def test_kimi_k3_says_the_type_of_each_argument() -> None:
    argument = '<|open|>argument key="{}" type="{}"<|sep|>{}<|close|>argument<|sep|>'
    written = (("a", "string", "12"), ("b &amp; c", "number", "12"), ("d", "object", '{"x": [null]}'))
    text = "Hm.<|close|>think<|sep|><|open|>response<|sep|>I call.<|close|>response<|sep|><|open|>tools<|sep|>"
    text += K3_CALL.format('tool="f" index="1"<|sep|>' + "".join(argument.format(*one) for one in written))
    text += K3_CALL.format('tool="g" index="2"<|sep|><|open|>json type="object"<|sep|>{"y": 1}<|close|>json<|sep|>')
    message = parser("kimi_k3").parse(
        TINY.codec(EVERY_TOKEN).encode("<|open|>think<|sep|>" + text + "<|close|>tools<|sep|><|close|>message<|sep|>"),
        TOOLS,
    )
    assert (message.text, message.reasoning) == ("I call.", "Hm.")
    found: list[tuple[str, JSON]] = [(one.name, one.arguments) for one in message.calls]
    assert found == [("f", {"a": "12", "b & c": 12, "d": {"x": [None]}}), ("g", {"y": 1})]


def test_minimax_m3_values_take_types_from_the_schema() -> None:
    inner: JSON = {"type": "object", "properties": {"count": {"type": "integer"}, "text": {"type": "string"}}}
    properties: JSON = {"list": {"type": "array", "items": inner}, "none": {"type": "array"}, "one": {"type": "array"}}
    tool: ToolSchema = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    item = "<item>{0}<count>1{0}</count>{0}<text>2{0}</text>{0}</item>"
    text = (
        f'{{0}}<tool_call>{{0}}<invoke name="f">{{0}}<list>{{0}}{item}{{0}}{item}{{0}}</list>{{0}}<none>{{0}}</none>'
        "{0}<one>{0}<item>x{0}</item>{0}</one>{0}<free>{0}<item>3{0}</item>{0}</free>{0}</invoke>{0}</tool_call>"
    ).format(M3)
    (found,) = parser("minimax_m3").parse(TINY.codec(EVERY_TOKEN).encode(text), [tool]).calls
    members = {"count": 1, "text": "2"}
    assert found.arguments == {"list": [members, members], "none": [], "one": ["x"], "free": [3]}


def test_text_behind_functionarys_mark_is_a_call_only_with_a_name_and_a_newline() -> None:
    text = ">>>all\nI type >>> print(1) >>>now\n{}"
    message = parser("functionary_3_2").parse(TINY.codec(EVERY_TOKEN).encode(text), TOOLS)
    assert message.text == "I type >>> print(1) "
    assert [(one.name, one.arguments) for one in message.calls] == [("now", {})]


COUNTS_CALLS = """\
{%- set count = namespace(next=0) %}
{%- macro number(id) %}{%- set seen = namespace(at=0) %}{%- for m in messages %}{%- for call in m.tool_calls or [] %}
    {%- if call.id == id %}{{- seen.at }}{%- endif %}{%- set seen.at = seen.at + 1 %}
{%- endfor %}{%- endfor %}{%- endmacro %}
{%- if tools %}{{- '<|system|>' + tools | tojson + '<|ended|>' }}{%- endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|assistant|><|START_ACTION|>[' }}
        {%- for call in message.tool_calls %}
            {{- ', ' if not loop.first else '' }}
            {{- '{"tool_call_id": "' ~ count.next ~ '", "tool_name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson + '}' }}{%- set count.next = count.next + 1 %}
        {%- endfor %}
        {{- ']<|END_ACTION|><|ended|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|tool|>' + number(message.tool_call_id) + ': ' + message.content + '<|ended|>' }}
    {%- else %}{{- '<|' + message.role + '|>' + message.content + '<|ended|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
TEXT_ARGUMENTS = templates.HERMES.replace("call.function.arguments | tojson", "call.function.arguments")
MARKED_WITH_TOOLS = templates.HERMES.replace(
    "{{- message.content }}", "{{- ('> ' if tools else '') + message.content }}"
)
PREAMBLE = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{%- endif %}" + templates.HERMES
)


def make_chat(template: str, format: str) -> Chat:
    codec = TINY.codec((*EVERY_TOKEN, "<|im_start|>", "<|im_end|>"))
    codec.tokenizer.chat_template = template
    return Chat(codec, make_format(codec, format, {}, own_template=True))


def chain(*ids: tuple[str, ...]) -> list[Message]:
    messages: list[Message] = [{"role": "user", "content": "Add."}]
    for turn in ids:
        messages.append({"role": "assistant", "content": "", "tool_calls": [call(id, expression=id) for id in turn]})
        messages += [{"role": "tool", "content": f"of {id}", "name": "calculator", "tool_call_id": id} for id in turn]
    return [*messages, {"role": "assistant", "content": "Done."}]


def test_calls_that_a_template_counts_over_the_conversation() -> None:
    chat = make_chat(COUNTS_CALLS, "cohere")
    start_up_check(chat, [{"role": "user", "content": "u"}], TOOLS)
    messages = chain(("a",), ("b", "c"), ("d",))
    ids, _ = chat.render_training(messages, TOOLS)
    whole = chat.tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert chat.decode(ids) == whole
    assert '<|tool|>1: of b<|ended|><|tool|>2: of c<|ended|><|assistant|><|START_ACTION|>[{"tool_call_id": "3"' in whole
    # A policy's ids are those numbers.
    asked = chat.parse(chat.encode_markup('<|START_ACTION|>[{"tool_call_id": "3", "tool_name": "now"}]<|END_ACTION|>'))
    answer: Message = {"role": "tool", "content": "of d", "name": "now", "tool_call_id": asked.calls[0].id}
    assert chat.decode(chat.bridge(ids, [answer], TOOLS)) == "<|tool|>3: of d<|ended|><|assistant|>"


def test_a_template_that_joins_arguments_to_text_is_given_text() -> None:
    chat = make_chat(TEXT_ARGUMENTS, "hermes")
    start_up_check(chat, [{"role": "user", "content": "u"}], TOOLS)
    messages = chain(("call00000",))
    ids, _ = chat.render_training(messages, TOOLS)
    assert '{"name": "calculator", "arguments": {"expression": "call00000"}}' in chat.decode(ids)
    given = make_chat(templates.HERMES, "hermes")
    assert given.render_training(messages, TOOLS)[0] == ids


def test_marks_that_a_template_writes_only_with_tools_are_taken_off() -> None:
    chat = make_chat(MARKED_WITH_TOOLS, "hermes")
    assert chat.parse(chat.encode("> Done."), TOOLS).text == "Done."
    assert chat.parse(chat.encode("> Done."), None).text == "> Done."


def test_text_that_only_a_generation_prompt_brings_is_no_part_of_the_turn() -> None:
    chat = make_chat(PREAMBLE, "hermes")
    ids, mask = chat.render_training(chain(("call00000",)), TOOLS)
    assert chat.decode(ids).startswith("<|im_start|>system\nBe good.<|im_end|>\n")
    learnt = chat.decode([id for id, one in zip(ids, mask, strict=True) if one])
    assert learnt.startswith("<tool_call>") and learnt.endswith("Done.<|im_end|>")


@pytest.mark.parametrize(
    ("text", "format"),
    [
        ("<tool_call> and <seed:tool_call><function=x><parameter=y>", "seed_oss"),
        ("<tool_call><function=x></function>", "qwen3_coder"),
        ("<function=x></function><|eom_id|>", "functionary"),
        ("{%- set mark = ':opensource' %}<tool_sep{}>", "hy3"),
        ("<|tool_call|>[", "granite"),
        ('<|START_ACTION|>[{"tool_name"', "cohere"),
        ("]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=", "minimax_m3"),
    ],
)
def test_formats_are_told_apart_by_their_signs(text: str, format: str) -> None:
    assert detect_format(text) == format
