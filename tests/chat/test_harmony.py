"""gpt-oss: turns of several messages, whose history ends otherwise than what the policy samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agentrl.chat import AssistantMessage, Chat, Drift
from tests.chat.conversations import GO_ON, TOOLS, assistant, conversation, roll_out, sampled_turns

HEADER = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>"
FORM = (
    "the call is not of the form <|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}<|call|>"
)


@pytest.fixture
def chat(make_chat: Callable[..., Chat]) -> Chat:
    return make_chat("harmony")


def read(chat: Chat, text: str) -> AssistantMessage:
    return chat.parse(chat._codec.encode(text), TOOLS)


def test_a_transcript_keeps_the_end_that_was_sampled(chat: Chat) -> None:
    messages = conversation(assistant("", 1, "Let me add."), assistant("So 5."), assistant("Bye."))
    ids, mask = chat.render_training(messages, TOOLS)
    turns = sampled_turns(ids, mask)
    assert [chat.decode(turn[-1:]) for turn in turns] == ["<|call|>", "<|return|>", "<|return|>"]
    assert roll_out(chat, messages, turns) == ids
    assert [chat.decode([id]) for id in chat.stop_token_ids] == ["<|return|>", "<|call|>"]
    # A history has <|end|> where the policy sampled <|return|>, and nothing else is different.
    assert chat.drift(ids, messages, TOOLS) is Drift.FORK
    without = [*messages[:2], assistant("", 1), *messages[3:]]
    ids, _ = chat.render_training(without, TOOLS)
    *history, last = chat.decode(ids).rpartition("<|return|>")[0].partition("So 5.<|return|>")
    assert f"{history[0]}So 5.<|end|>{last}<|return|>" == chat.decode(chat.format.render(without, TOOLS, False))


def test_reasoning_is_learnt_under_the_name_that_the_template_reads(chat: Chat) -> None:
    ids, mask = chat.render_training(conversation(assistant("Five.", 0, "Two and three.")), TOOLS)
    (turn,) = sampled_turns(ids, mask)
    message = chat.parse(turn, TOOLS)
    assert (message.text, message.reasoning, message.calls) == ("Five.", "Two and three.", ())


@pytest.mark.parametrize(
    "cut", ["<|channel|>analysis<|message|>Hm", "<|channel|>final<|message|>Hm", "<|channel|>fi", ""]
)
def test_a_cut_turn_is_closed(chat: Chat, cut: str) -> None:
    prompt = chat.render([GO_ON], TOOLS)
    bridge = chat.decode(chat.bridge([*prompt, *chat._codec.encode(cut)], [GO_ON], TOOLS))
    assert bridge == "<|end|><|start|>user<|message|>Go on.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (' to=functions.now<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', "now"),
        ('<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}<|call|>', "now"),
        ('<|channel|>analysis to=functions.now<|message|>{"a": 1}<|call|>', "now"),
        (
            f'<|channel|>analysis<|message|>Hm<|end|>{HEADER.replace("functions.now", "python")}{{"a": 1}}<|call|>',
            "python",
        ),
        (f'<|channel|>commentary<|message|>I look.<|end|>{HEADER}{{"a": 1}}<|call|>', "now"),
    ],
)
def test_calls(chat: Chat, text: str, name: str) -> None:
    message = read(chat, text)
    (call,) = message.calls
    assert (call.name, call.arguments, call.error) == (name, {"a": 1}, None)
    assert (message.text, message.reasoning) == (
        "I look." if "I look." in text else "",
        "Hm" if "Hm" in text else None,
    )
    assert chat.format.shown is not None and ("functions" not in text or chat.format.shown.search(text))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (HEADER + "{}", "the call is not closed with <|call|>"),
        (HEADER + "{}<|return|>", "the call is not closed with <|call|>"),
        (HEADER + "{}<|end|>", "the call is not closed with <|call|>"),
        (HEADER + "{a}<|call|>", "the arguments are not valid JSON: Expecting property name"),
        (HEADER + '"x"<|call|>', "the arguments must be a JSON object, not str"),
        (HEADER + '{"a": NaN}<|call|>', "the arguments are not valid JSON: NaN"),
        (HEADER.replace("now", "") + "{}<|call|>", "the call has no function name"),
        (HEADER.replace(" json", " code") + "{}<|call|>", FORM),
        (HEADER.replace("commentary", "secret") + "{}<|call|>", FORM),
        (HEADER.replace("assistant", "user") + "{}<|call|>", FORM),
        (HEADER.replace("commentary", "commentary to=functions.calculator") + "{}<|call|>", FORM),
        ("<|start|>assistant<|channel|>commentary<|message|>{}<|call|>", FORM),
    ],
)
def test_broken_calls(chat: Chat, text: str, error: str) -> None:
    (call,) = read(chat, "<|channel|>analysis<|message|>Hm<|end|>" + text).calls
    assert call.error is not None and call.error.startswith(error) and call.arguments is None
    assert call.raw


def test_text_that_no_message_holds_is_kept(chat: Chat) -> None:
    text = (
        "A<|end|>B<|start|>user<|message|>C<|end|>D<|start|>assistant<|channel|>other<|message|>E<|end|> \n<|start|>F"
    )
    assert read(chat, text).text == (
        "A\nB\n<|start|>user<|message|>C\nD\n<|start|>assistant<|channel|>other<|message|>E\n<|start|>F"
    )
    # Spelled with other tokens a marker is text.
    spelled = [*chat._codec.encode("<|channel|>final<|message|>"), *chat.encode(HEADER + "{}<|call|>")]
    assert chat.parse(spelled, TOOLS) == AssistantMessage(HEADER + "{}<|call|>")


def test_a_prompt_may_begin_the_reasoning(make_chat: Callable[..., Chat]) -> None:
    template = make_chat("harmony").tokenizer.chat_template
    opened = template.replace(
        "{{- '<|start|>assistant' }}", "{{- '<|start|>assistant<|channel|>analysis<|message|>' }}"
    )
    assert opened != template
    chat = make_chat("harmony", chat_template=opened)
    message = read(chat, f"Hm<|end|>{HEADER}{{}}<|call|>")
    assert (message.text, message.reasoning, [call.name for call in message.calls]) == ("", "Hm", ["now"])
