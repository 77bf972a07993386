"""Calls as Python writes them, and formats that `auto` finds by the calls that a template writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.chat.formats.parsers import Found
from agentrl.chat.formats.phi4_mini import functools_body
from agentrl.chat.formats.pythonic import is_call, lines_body, list_body
from agentrl.errors import DataError
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.conversations import TOOLS, assistant, conversation, roll_out, sampled_turns
from tests.chat.vocabularies import LLAMA, QWEN, save_tokenizer

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
        ("search(x=1)", "the calls are not of the form [name(key=value, ...), ...]"),
        ("[]", "no name and bracket of a call at character 0"),
        ("[search(1)]", "the calls cannot be read: no key=value at character 7"),
        ("[search(x=y)]", "the calls cannot be read: no literal at character 9"),
        ("[search(x=1, x=2)]", "the calls cannot be read: the argument 'x' is given twice"),
        ("[search(x={'a': 1, 'a': 2})]", "the calls cannot be read: a key is given twice"),
        ("[search(x=1 y=2)]", "the calls cannot be read: neither a comma nor a bracket at character 10"),
        ("[search(x=1,)]", "the calls cannot be read: no key=value at character 11"),
        ("[search(x=__import__('os'))]", "the calls cannot be read: no literal at character 9"),
        ("[search(x=1) and now()]", "text after a call, at character 11"),
        ("[search(x=1), ]", "no name and bracket of a call at character 12"),
        ("[search(x=1]", "the calls cannot be read: neither a comma nor a bracket at character 10"),
        ("[search(x=1e999)]", "the calls cannot be read: 1e999 is too large a number"),
        ("[search(x=" + "[" * 100_000 + ")]", "the calls cannot be read: no separator before character"),
    ],
)
def test_broken_calls_say_why(text: str, error: str) -> None:
    (found,) = list_body(text, [])
    assert found.arguments is None and found.error is not None
    assert found.error.startswith(error)


def test_a_text_is_another_value_only_where_the_schema_takes_no_text() -> None:
    """Llama 4's template puts every value between quotes."""
    (found,) = list_body("""[calculator(expression="3", digits="3")]""", TOOLS)
    assert found.arguments == {"expression": "3", "digits": 3}
    (found,) = list_body("""[calculator(digits="three")]""", TOOLS)
    assert found.arguments == {"digits": "three"}


def test_an_answer_is_no_call() -> None:
    assert is_call("[search(x=1)]") and is_call("[ search(") and not is_call("[1, 2]") and not is_call("See [f(x)].")


def test_functools() -> None:
    assert functools_body("""functools[{"name": "now", "arguments": {}}, {"name": "search"}]""", []) == [
        Found("now", {}),
        Found("search"),
    ]
    assert functools_body("""{"name": "search", "arguments": {'x': True}}""", []) == [Found("search", {"x": True})]
    (found,) = functools_body("""functools[{"name": "now"}] so""", [])
    assert found.error == "the calls are no list of objects: text after the list, at character 17"


@pytest.mark.parametrize(
    ("template", "tokens", "eos", "name"),
    [
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


def test_training_refuses_calls_that_a_rollout_would_not_read(tmp_path: Path) -> None:
    """The template writes one call of two, or text before a call that has to be the whole message."""
    first_only = templates.PYTHONIC.replace("in message.tool_calls %}", "in message.tool_calls[:1] %}")
    spoken = templates.PYTHONIC.replace("{{- '[' }}", "{{- message.content + '[' }}")
    for template, turn in ((first_only, assistant("", 2)), (spoken, assistant("I add.", 1))):
        chat = Chat.from_pretrained(save_tokenizer(tmp_path, LLAMA, "<|eot_id|>", template))
        chat.render_training(conversation(assistant("", 1), assistant("So 5.")), TOOLS)
        with pytest.raises(DataError, match=r"message 2 \(the first is 0\): expected a turn whose tool calls"):
            chat.render_training(conversation(turn, assistant("So 5.")), TOOLS)
