"""The default path: tokenizers' own templates, of several shapes; test_families has what they share with families."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import ByT5Tokenizer

from agentrl.chat import Chat, Drift
from agentrl.chat.formats.template import MARK, TemplateFormat
from agentrl.errors import ConfigError, DataError
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.conftest import TEMPLATES
from tests.chat.conversations import GO_ON, TOOLS, answers, assistant, call, conversation, roll_out, sampled_turns
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import Names, naming

PLAIN = [name for name in TEMPLATES if name not in ("opens_reasoning", "history_without_reasoning")]


@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
def test_template_that_moves_the_tools_to_the_last_user_turn(make_chat: Callable[..., Chat], name: str) -> None:
    chat = make_chat(name)
    messages = conversation(assistant("", 2), assistant("", 1), assistant("So 5."))[1:]  # It has no system message.
    ids, mask = chat.render_training(messages, TOOLS)
    assert roll_out(chat, messages, sampled_turns(ids, mask)) == ids
    assert chat.drift(ids, messages, TOOLS) is Drift.CLEAN
    ids += chat.bridge(ids, [GO_ON], TOOLS)
    assert chat.decode(ids).count("[AVAILABLE_TOOLS]") == 2
    assert chat.drift(ids, [*messages, GO_ON], TOOLS) is Drift.FORK


def test_text_before_a_call_survives_the_round_trip(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    messages = conversation(assistant("I add them.", 2), assistant("So\n\n5. ", 0, "Now say it."))
    ids, mask = chat.render_training(messages, TOOLS)
    parsed = [chat.parse(turn, TOOLS) for turn in sampled_turns(ids, mask)]
    assert [message.text for message in parsed] == ["I add them.", "So\n\n5. "]
    assert parsed[1].reasoning == "Now say it."
    again = [*messages[:2], parsed[0].to_message(), *answers(2), parsed[1].to_message()]
    assert chat.drift(ids, again, TOOLS) is Drift.CLEAN


def test_reasoning_that_the_template_drops_is_a_fork(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("strips_reasoning")
    messages = conversation(assistant("", 1, "Add them."), assistant("So 5.", 0, "Now say it."))
    ids, mask = chat.render_training(messages, TOOLS)
    assert roll_out(chat, messages, sampled_turns(ids, mask)) == ids
    assert chat.drift(ids, messages, TOOLS) is Drift.FORK
    assert "Add them." in chat.decode(ids)


def test_reasoning_that_the_prompt_begins(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("opens_reasoning")
    messages = conversation(assistant("", 1, "Add them."), assistant("So 5.", 0, "Now say it."))
    ids, mask = chat.render_training(messages, TOOLS)
    turns = sampled_turns(ids, mask)
    assert chat.decode(turns[1]) == "Now say it.\n</think>\n\nSo 5.<|im_end|>"
    assert [chat.parse(turn, TOOLS).reasoning for turn in turns] == ["Add them.", "Now say it."]
    assert chat.drift(ids, messages, TOOLS) is Drift.CLEAN
    with pytest.raises(ConfigError, match="reasoning_content"):
        chat.render_training(conversation(assistant("So 5.")), TOOLS)


def test_newline_behind_the_end_of_turn_token_is_kept(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    ids, _ = chat.render_training(conversation(assistant("", 1)), TOOLS)
    assert chat.decode(chat.bridge(ids, answers(1), TOOLS)) == (
        "\n<|im_start|>user\n<tool_response>\nresult 0: 2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    "content",
    ["", "  ", " padded\n", "quote \" and \\ and é <b>&'", "[1]", "null", "\n\n", "AgentrlSlot0End", "x" * 500],
)
def test_learnt_shapes_write_what_the_template_writes(make_chat: Callable[..., Chat], name: str, content: str) -> None:
    chat = make_chat(name)
    format = chat.format
    assert isinstance(format, TemplateFormat)
    filled: list[list[Message]] = [[{**answer, "content": content} for answer in answers(count)] for count in (1, 2)]
    asked: Message = {**GO_ON, "content": content}
    for messages in (*filled, [asked]):
        for _ in range(3):  # Written, learnt, filled in.
            assert format._between(messages, None) == format._render_between(messages, None)
    assert all(shape is not None for _, shape in format._shapes._known.values())
    assert bool(format._shapes._known) or not content.strip()


ARGUMENTS_ONLY_AS_TEXT = templates.HERMES.replace(
    "call.function.arguments | tojson", "(call.function.arguments if call.function.arguments is string else '{}')"
)
"""Writes no arguments of the stand-in call, so that its mark is not found there."""


@pytest.mark.parametrize("template", [templates.HERMES, ARGUMENTS_ONLY_AS_TEXT, templates.MISTRAL_ARGS])
@pytest.mark.parametrize("text", ["before AgentrlTurnMark behind", f"before {MARK} behind", "AgentrlSlot0End"])
def test_a_text_that_spells_a_mark_is_kept(tmp_path: Path, template: str, text: str) -> None:
    saved = save_tokenizer(tmp_path, (*QWEN, "[TOOL_CALLS]", "[ARGS]", "</s>"), "<|im_end|>", template)
    chat = Chat.from_pretrained(saved, format="template:hermes")
    answer = answers(1)[0]
    following: list[Message] = [
        {**answer, "content": text},
        {**answer, "name": text},
        {"role": "user", "content": text},
    ]
    for message in following:
        for _ in range(3):
            bridge = chat.decode(chat.bridge([*chat.encode("a"), chat.stop_token_ids[0]], [message], TOOLS))
            assert str(message["content"]).replace("\ufdd0", "\ufffd") in bridge


def test_templates_that_treat_contents_in_another_way_are_rendered_each_time(tmp_path: Path) -> None:
    shouting = templates.HERMES.replace(
        "'<|im_start|>' + message.role + '\\n' + message.content", "message.content | upper"
    )
    chat = Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", shouting))
    ids, _ = chat.render_training([GO_ON, assistant("Yes.")])
    assert (
        chat.decode(chat.bridge(ids, [{"role": "user", "content": "be loud"}]))
        == "\nBE LOUD<|im_end|>\n<|im_start|>assistant\n"
    )


def test_another_stop_token_needs_no_close(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes_in_text")
    assert [chat.decode([id]) for id in chat.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    ids = [*chat.render([GO_ON]), *chat.encode("Yes."), chat._codec.added["<|endoftext|>"]]
    assert chat.decode(chat.bridge(ids, [GO_ON])).startswith("\n<|im_start|>user")


def test_calls_are_read_from_text_where_the_markers_are_no_tokens(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes_in_text")
    assert "<tool_call>" not in chat._codec.added
    ids, mask = chat.render_training(conversation(assistant("I add.", 2)), TOOLS)
    parsed = chat.parse(sampled_turns(ids, mask)[0], TOOLS)
    assert (parsed.text, [call.arguments for call in parsed.calls]) == (
        "I add.",
        [{"expression": "0 + 2", "digits": 0}, {"expression": "1 + 2", "digits": 1}],
    )


def test_tokenizer_written_in_python(tmp_path: Path) -> None:
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.add_tokens(list(QWEN))
    tokenizer.chat_template = templates.HERMES
    tokenizer.save_pretrained(tmp_path)
    chat = Chat.from_pretrained(str(tmp_path))
    messages = conversation(assistant("", 2), assistant("Bye <é>"))
    ids, mask = chat.render_training(messages, TOOLS)
    assert roll_out(chat, messages, sampled_turns(ids, mask)) == ids
    assert chat.drift(ids, messages, TOOLS) is Drift.CLEAN
    assert len(chat.parse(sampled_turns(ids, mask)[0], TOOLS).calls) == 2
    assert chat.decode(chat.encode("a<|im_end|> é")) == "a<|im_end|> é"


def test_fields_that_parquet_filled_with_none_are_dropped(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    clean = conversation(assistant("", 1), assistant("So 5."))
    filled: list[Any] = [
        {"name": None, "tool_call_id": None, "reasoning_content": None, "tool_calls": None, **message}
        for message in clean
    ]
    filled[2]["tool_calls"] = [{**call("call00000"), "function": {"name": "calculator", "arguments": None, "x": None}}]
    filled[2]["tool_calls"][0]["function"]["arguments"] = '{"expression": "0 + 2", "digits": 0}'
    filled[2]["content"] = None
    assert chat.render_training(filled, TOOLS) == chat.render_training(clean, TOOLS)


def test_content_in_text_parts_is_joined(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    parts: Message = {
        "role": "user",
        "content": [{"type": "text", "text": "Go"}, {"type": "text", "text": " on."}],
    }
    assert chat.render([parts]) == chat.render([GO_ON])


def test_bad_conversations_name_the_fault(make_chat: Callable[..., Chat]) -> None:
    with naming(ConfigError, "one call"):
        make_chat("llama").render(conversation(assistant("", 2), assistant("So 5.")), TOOLS)
    with naming(DataError, "no assistant turn"):
        make_chat("hermes").render_training([GO_ON])
    with naming(DataError, "message 2"):
        make_chat("hermes").render_training([GO_ON, assistant("a"), assistant("b")])
    with naming(ValueError, "sampled"):
        make_chat("hermes").bridge([1], [assistant("a")])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 999 + "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (ENDLESS, "67,108,864 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "maximum recursion"),
    ],
)
def test_a_template_without_end_is_an_error_in_words(tmp_path: Path, template: str, problem: Names) -> None:
    """Templates come with models."""
    with naming(ConfigError, problem):
        Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", template), format="none")
