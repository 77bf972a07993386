"""Calls as Python writes them, and formats that `auto` finds by the calls that a template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.chat.formats.llama3_json import LLAMA4
from agentrl.chat.formats.parsers import Found
from agentrl.chat.formats.phi4_mini import functools_body
from agentrl.chat.formats.pythonic import is_call, lines_body, list_body
from agentrl.chat.formats.template import TemplateFormat
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.conversations import TOOLS, assistant, conversation, roll_out, sampled_turns
from tests.chat.vocabularies import LLAMA, QWEN, save_tokenizer
from tests.naming import Names, assert_names

LFM2 = (
    templates.HERMES.replace("{{- '<tool_call>\\n' }}", "{{- '<|tool_call_start|>[' + call.function.name + '(' }}")
    .replace("{{- '\\n</tool_call>' }}", "{{- ')]<|tool_call_end|>' }}")
    .replace(
        templates.HERMES[templates.HERMES.index('{{- \'{"name"') : templates.HERMES.index("{{- '\\n</tool_call>")], ""
    )
)
LFM2 = LFM2.replace(
    "call.function.name + '(' }}",
    "call.function.name + '(' }}" + templates.ARGUMENTS.replace("call.", "call.function."),
)
LISTS_TOOLS = "{%- if tools %}{{- '<|im_start|>system\\nHINT' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}\n"
LISTS_TOOLS += templates.IGNORES_TOOLS
"""A template that writes tools, and no calls."""
UNQUOTED = templates.PYTHONIC.replace("value | tojson", "value | string")


def test_every_kind_of_literal_is_read() -> None:
    text = (
        """ [search(text='it\\'s "so" \\\\ (a=1), [b]\\n', count=-3, ratio=0.5e1, flag=True, maybe=None,"""
        """ list=[1, 'a', {"k": null}], tree={'a': [true]}) , tools.now( ) ] """
    )
    assert list_body(text, []) == [
        Found(
            "search",
            {
                "text": 'it\'s "so" \\ (a=1), [b]\n',
                "count": -3,
                "ratio": 5.0,
                "flag": True,
                "maybe": None,
                "list": [1, "a", {"k": None}],
                "tree": {"a": [True]},
            },
        ),
        Found("tools.now", {}),
    ]
    assert lines_body("now()\n\nsearch(x=1)\n", []) == [Found("now", {}), Found("search", {"x": 1})]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("search(x=1)", "[name(key=value, ...), ...]"),
        ("[]", "character 0"),
        ("[search(1)]", ("key=value", "character 7")),
        ("[search(x=y)]", "character 9"),
        ("[search(x=1, x=2)]", ("argument 'x'", "twice")),
        ("[search(x={'a': 1, 'a': 2})]", ("twice", "key")),
        ("[search(x=1 y=2)]", "character 10"),
        ("[search(x=1,)]", ("key=value", "character 11")),
        ("[search(x=__import__('os'))]", "character 9"),
        ("[search(x=1) and now()]", ("character 11", "text")),
        ("[search(x=1), ]", "character 12"),
        ("[search(x=1]", "character 10"),
        ("[search(x=1e999)]", "1e999"),
        ("[search(x=" + "[" * 100_000 + ")]", "separator"),
    ],
)
def test_broken_calls_say_why(text: str, error: Names) -> None:
    (found,) = list_body(text, [])
    assert found.arguments is None and found.error is not None
    assert_names(found.error, error)


def test_a_text_is_another_value_only_where_the_schema_takes_no_text() -> None:
    """Llama 4's template puts every value between quotes."""
    (found,) = list_body("""[calculator(expression="3", digits="3")]""", TOOLS)
    assert found.arguments == {"expression": "3", "digits": 3}
    (found,) = list_body("""[calculator(digits="three")]""", TOOLS)
    assert found.arguments == {"digits": "three"}


def test_an_answer_is_no_call() -> None:
    assert is_call("[search(x=1)]") and is_call("[f(x=1)]") and is_call("[ search(")
    assert not is_call("[1, 2]") and not is_call("See [f(x)].")


def test_functools() -> None:
    assert functools_body("""functools[{"name": "now", "arguments": {}}, {"name": "search"}]""", []) == [
        Found("now", {}),
        Found("search"),
    ]
    assert functools_body("""{"name": "search", "arguments": {'x': True}}""", []) == [Found("search", {"x": True})]
    (found,) = functools_body("""functools[{"name": "now"}] so""", [])
    assert_names(found.error, "character 17")


@pytest.mark.parametrize(
    ("template", "tokens", "eos", "name"),
    [
        (LISTS_TOOLS.replace("HINT", "List of tools: "), QWEN, "<|im_end|>", "lfm2"),
        (LISTS_TOOLS.replace("HINT", "Call in <tool_call>: "), QWEN, "<|im_end|>", "hermes"),
        (LISTS_TOOLS.replace("HINT", "Call after <|tool_call|>: "), QWEN, "<|im_end|>", "granite"),
        (UNQUOTED, LLAMA, "<|eot_id|>", "pythonic"),
        (templates.PYTHONIC, LLAMA, "<|eot_id|>", "pythonic"),
        (templates.JSON_ARRAY, LLAMA, "<|eot_id|>", "xlam"),
        (LFM2, (*QWEN, "<|tool_call_start|>", "<|tool_call_end|>"), "<|im_end|>", "lfm2"),
        (templates.HERMES.replace("tool_call>", "TOOLCALL>"), QWEN, "<|im_end|>", "nemotron_nano"),
    ],
)
def test_auto_takes_the_format_that_reads_the_templates_calls(
    tmp_path: Path, template: str, tokens: tuple[str, ...], eos: str, name: str
) -> None:
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, tokens, eos, template))
    assert chat.format.name == f"template:{name}"
    question: Message = {"role": "user", "content": "What is 2 + 3?"}
    start_up_check(chat, [question], TOOLS)
    messages = conversation(assistant("", 2), assistant("So 5."))
    ids, mask = chat.render_training(messages, TOOLS)
    turns = sampled_turns(ids, mask)
    assert roll_out(chat, messages, turns) == ids
    calls = [(call.name, call.arguments) for call in chat.parse(turns[0], TOOLS).calls]
    assert calls == [("calculator", {"expression": f"{n} + 2", "digits": n}) for n in range(2)]


@pytest.mark.parametrize(
    ("hint", "written"),
    [
        ("List of tools: ", """<|tool_call_start|>[calculator(expression='0 + 2', digits=0)]<|tool_call_end|>"""),
        (
            "Call in <tool_call>: ",
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "0 + 2", "digits": 0}}\n</tool_call>',
        ),
        ("<|tool_call|>", '<|tool_call|>[{"name": "calculator", "arguments": {"expression": "0 + 2", "digits": 0}}]'),
    ],
)
def test_calls_are_text_of_a_turn_where_the_template_writes_none(tmp_path: Path, hint: str, written: str) -> None:
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", LISTS_TOOLS.replace("HINT", hint)))
    ids, mask = chat.render_training(conversation(assistant("I add.", 1)), TOOLS)
    (turn,) = sampled_turns(ids, mask)
    assert chat.decode(turn) == f"I add.\n{written}<|im_end|>"
    assert chat.parse(turn, TOOLS).text == "I add."


def test_a_template_without_calls_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    build = TemplateFormat.__init__

    def counted(self: TemplateFormat, *given: Any) -> None:
        made.append(given[-1])
        build(self, *given)

    monkeypatch.setattr(TemplateFormat, "__init__", counted)
    Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", templates.IGNORES_TOOLS))
    assert made == ["none"]


def test_turns_that_begin_with_other_blanks_than_the_prompt_are_learnt_after_it(tmp_path: Path) -> None:
    """vLLM's template for Granite 20B writes a blank after its header for plain turns and prompts, not before calls."""
    template = templates.HERMES.replace("\\n' }}{%- endif %}\n", "\\n ' }}{%- endif %}\n")
    assert template != templates.HERMES
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", template))
    start_up_check(chat, [{"role": "user", "content": "u"}], TOOLS)
    ids, mask = chat.render_training(conversation(assistant("", 1), assistant("So 5.")), TOOLS)
    assert chat.decode(ids).count("<|im_start|>assistant\n ") == 2
    assert chat.decode(sampled_turns(ids, mask)[0]).startswith("<tool_call>")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('<|python_start|><|python_end|>{"name": "f", "parameters": {"x": 1}}{"name": "g"}', ["f", "g"]),
        ('<|python_start|>{"name": "f"}<|python_end|>', ["f"]),
        ('{"name": "f"}', ["f"]),
        (r'{"name": "\ud83d\ude00"}', ["😀"]),
        ('<|python_start|>So.<|python_end|>{"name": "f"}', "text before the calls: 'So.'"),
        ('{"name": "f"} so', "the calls are not valid JSON: no literal at character 13"),
    ],
)
def test_objects_of_llama_4(text: str, names: list[str] | str) -> None:
    assert LLAMA4.is_call(text)
    found = LLAMA4.body(text, [])
    assert [one.error for one in found] == [names] if isinstance(names, str) else [one.name for one in found] == names
