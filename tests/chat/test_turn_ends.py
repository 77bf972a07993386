"""Whatever a template ends turns with, no user's text is lost between them, in rollouts and in supervised training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import Chat
from agentrl.chat.check import start_up_check, training_check
from agentrl.errors import ConfigError
from agentrl.trajectory import Message
from tests.chat.conversations import TOOLS, answers, assistant, roll_out, sampled_turns
from tests.chat.turn_ends import (
    ENDINGS,
    EOS,
    REFUSED,
    SHARED_HEADER,
    TOKENS,
    UNMARKED,
    Ending,
    load_chat,
    save_chat,
)
from tests.naming import naming

CLOSED = [name for name in ENDINGS if not name.startswith(("header", "newline_only", *UNMARKED))]
"""Turns end with one token, which a bridge writes where a turn was cut."""
TEXT = st.text(alphabet="aZ 1\n.{é<|", max_size=6)
ASKED = st.one_of(TEXT, st.sampled_from(TOKENS), st.sampled_from(TOKENS).map(lambda token: f"x{token}\n"))
"""What a user may write: control tokens' spellings, too."""


@pytest.fixture(scope="module")
def chat_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Chat]:
    made: dict[str, Chat] = {}

    def make(name: str) -> Chat:
        if name not in made:
            made[name] = load_chat(tmp_path_factory.mktemp(name), ENDINGS[name])
        return made[name]

    return make


def check_against_renders(chat: Chat, messages: list[Message], *, unmarked: bool) -> None:
    """Every prompt of the conversation is a full render, and exactly what assistants said is learnt."""
    ids, mask = chat.render_training(messages, TOOLS)
    turns = sampled_turns(ids, mask)
    assert roll_out(chat, messages, turns) == ids
    for turn in turns:
        assert turn[-1] in chat.stop_token_ids
        assert not set(turn[:-1]) & set(chat.stop_token_ids)
    starts = [at for at in range(len(mask)) if mask[at] and not mask[at - 1]]
    asked = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for start, index in zip(starts, asked, strict=True):
        prompt, rendered = ids[:start], chat.render(messages[:index], TOOLS)
        if unmarked:
            assert chat.decode(prompt).replace(EOS, "") == chat.decode(rendered).replace(EOS, "")
        else:
            assert prompt == rendered


@pytest.mark.parametrize("name", ENDINGS)
@settings(max_examples=15, deadline=None)
@given(asked=st.lists(ASKED, min_size=1, max_size=4), said=st.lists(TEXT, min_size=4, max_size=4))
def test_user_turns(chat_of: Callable[[str], Chat], name: str, asked: list[str], said: list[str]) -> None:
    chat = chat_of(name)
    messages: list[Message] = []
    for question, reply in zip(asked, said, strict=False):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": f"{reply}."}]
    if name in UNMARKED:
        messages = [{**message, "content": str(message["content"]).replace(EOS, "")} for message in messages]
    check_against_renders(chat, messages, unmarked=name in UNMARKED)
    ids, mask = chat.render_training(messages, TOOLS)
    given_text = chat.decode([id for id, learnt in zip(ids, mask, strict=True) if not learnt])
    learnt = chat.decode([id for id, learnt in zip(ids, mask, strict=True) if learnt])
    for question, reply in zip(asked, said, strict=False):
        assert question.replace(EOS, "") in given_text.replace(EOS, "")
        assert f"{reply}." in learnt


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("calls", [1, 2])
def test_calls_and_users_in_turn(chat_of: Callable[[str], Chat], name: str, calls: int) -> None:
    chat = chat_of(name)
    turns = [assistant("", calls), assistant("I see."), assistant("So", 1), assistant("Bye.")]
    messages: list[Message] = [{"role": "user", "content": "What is 2 + 3?"}, turns[0], *answers(calls), turns[1]]
    messages += [{"role": "user", "content": "Again."}, turns[2], *answers(1), turns[3]]
    check_against_renders(chat, messages, unmarked=name in UNMARKED)
    assert "Bye." in start_up_check(chat, messages, TOOLS)
    assert start_up_check(chat, messages[:1], None)
    training_check(chat, None, calls=False)
    training_check(chat, TOOLS, calls=True)


@pytest.mark.parametrize("name", CLOSED)
def test_a_cut_turn_is_closed(chat_of: Callable[[str], Chat], name: str) -> None:
    chat = chat_of(name)
    question: Message = {"role": "user", "content": "u"}
    for turn, following in ((assistant("So"), [question]), (assistant("", 2), answers(2))):
        ids, _ = chat.render_training([question, turn], TOOLS)
        bridged = ids + chat.bridge(ids, following, TOOLS)
        assert ids[:-1] + chat.bridge(ids[:-1], following, TOOLS) == bridged


@pytest.mark.parametrize("name", ["end_of_conversation", "newline_end_of_conversation", "standing_prompt", "header"])
def test_tokens_that_eat_the_blanks_behind_them(tmp_path: Path, name: str) -> None:
    chat = load_chat(tmp_path, ENDINGS[name], rstrip=True)
    messages: list[Message] = []
    for n in range(3):
        messages += [{"role": "user", "content": f"Question {n}"}, assistant(f"Answer {n}")]
    check_against_renders(chat, messages, unmarked=False)
    start_up_check(chat, messages[:1], None)
    start_up_check(chat, messages[:1], TOOLS)


STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'user' and loop.previtem is defined and loop.previtem.role == 'tool' %}
        {{- raise_exception('user after tool') }}
    {%- endif %}
{%- endfor %}
"""


@pytest.mark.parametrize(
    "name", ["newline_end_of_conversation", "standing_prompt", "other_at_the_end", "header_end_of_conversation"]
)
def test_strict_templates_are_bridged_in_parts(tmp_path: Path, name: str) -> None:
    """Tool answers and a user's turn behind one another, where a template wants an assistant turn between."""
    lenient = load_chat(tmp_path, ENDINGS[name])
    template = write(tmp_path / "strict.jinja", STRICT + ENDINGS[name].template())
    strict = Chat.from_pretrained(str(tmp_path), format="hermes", chat_template=template)
    question: Message = {"role": "user", "content": "u"}
    ids, _ = lenient.render_training([question, assistant("", 2)], TOOLS)
    following = [*answers(2), question]
    with pytest.raises(ConfigError, match="user after tool"):
        strict.render([question, assistant("", 2), *following], TOOLS)
    assert strict.bridge(ids, following, TOOLS) == lenient.bridge(ids, following, TOOLS)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_stop_tokens(chat_of: Callable[[str], Chat]) -> None:
    wanted = {
        "end_of_conversation": ["<|end|>", EOS],
        "standing_prompt": ["<|end|>", EOS],
        "beginning_of_a_standing_prompt": ["<|end|>", EOS],
        "other_at_the_end": ["<|end|>", EOS],
        "calls_end_otherwise": ["<|end|>", "<|call|>", EOS],
        "header_end_of_conversation": ["<|user|>", "<|tool|>", EOS],
        "no_mark": [EOS],
    }
    for name, stops in wanted.items():
        chat = chat_of(name)
        assert [chat.decode([id]) for id in chat.stop_token_ids] == stops, name


def test_a_standing_instruction_is_no_end_of_a_turn(tmp_path: Path) -> None:
    """Command R+ ends every conversation with a system turn, whose header opens as a user's does."""
    ending = Ending(header=SHARED_HEADER, preamble="<|turn|><|system|>You help.<|end|>")
    standing = "{{- '<|turn|><|system|>Write calls.<|end|>' }}{%- if add_generation_prompt"
    template = ending.template().replace("{%- if add_generation_prompt or", f"{standing} or")
    save_chat(tmp_path, ending)
    chat = Chat.from_pretrained(str(tmp_path), format="none", chat_template=write(tmp_path / "c.jinja", template))
    assert [chat.decode([id]) for id in chat.stop_token_ids] == ["<|end|>", EOS]
    question: Message = {"role": "user", "content": "u"}
    ids = [*chat.render([question]), *chat.encode("a"), chat.stop_token_ids[0]]
    assert chat.decode(chat.bridge(ids, [question])) == (
        "<|turn|><|user|>u<|end|><|turn|><|system|>Write calls.<|end|><|turn|><|assistant|>"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_ends_that_no_policy_could_write_are_refused(tmp_path: Path, name: str) -> None:
    ending, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        load_chat(tmp_path, ending)


def test_calls_that_no_policy_could_end_are_refused_where_there_are_calls(tmp_path: Path) -> None:
    """A turn with calls ends with a token that stands between calls, too; plain turns are well."""
    ending = ENDINGS["end"].template().replace("}</tool_call>'", "}</tool_call><|call|>'")
    ending = ending.replace("elif message.tool_calls %}{{- '<|end|>'", "elif message.tool_calls %}{{- ''")
    ending = ending.replace("('<|end|>' if message.tool_calls", "('' if message.tool_calls")
    ending = ending.replace("'<|' + message.role + '|>\\n'", "'<|call|>' if message.role == 'tool' else '<|role|>'")
    load_chat(tmp_path, ENDINGS["end"])
    chat = Chat.from_pretrained(str(tmp_path), format="hermes", chat_template=write(tmp_path / "calls.jinja", ending))
    question: Message = {"role": "user", "content": "u"}
    start_up_check(chat, [question], None)
    training_check(chat, None, calls=False)
    ids = [*chat.render([question]), *chat.encode("a"), chat.stop_token_ids[-1]]
    assert chat.decode(ids[-1:] + chat.bridge(ids, [question])) == f"{EOS}<|role|>u<|end|><|role|>"
    for check in (lambda: start_up_check(chat, [question], TOOLS), lambda: training_check(chat, TOOLS, calls=True)):
        with naming(ConfigError, "<|call|>"):
            check()
