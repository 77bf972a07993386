"""No message vanishes: what a template leaves out is refused, and `developer` is `system` where it has no branch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.chat.coverage import AS_SYSTEM, BESIDE_CALLS, REASONING
from agentrl.errors import DataError
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.conversations import TOOLS, answers, assistant
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import naming

ANY_ROLE = "<|im_start|>system\nYou are helpful.<|im_end|>\n" + templates.IGNORES_TOOLS
"""A template that writes any role's name, and a system message of its own where it finds none at the beginning."""
ANY_ROLE = "{%- if messages[0].role != 'system' %}" + ANY_ROLE.replace("\n{%-", "\n{%- endif %}{%-", 1)
DOCUMENTED = ANY_ROLE.replace("You are helpful.", "You are helpful. The role `developer` comes first.")
"""Speaks of developers, and knows no more of them (GigaChat)."""
BRANCH = templates.IGNORES_TOOLS.replace(
    "message.role +", "('instructions' if message.role in ('system', 'developer') else message.role) +"
)
"""Has a branch for developers."""
FIRST_ONLY = templates.HERMES.replace("message.role == 'system' and not loop.first", "false")
"""Writes a system message at the beginning only."""
UNCASED = templates.IGNORES_TOOLS.replace("message.content", "message.content | trim | tojson")


@pytest.fixture
def chat_of(tmp_path: Path) -> Callable[[str], Chat]:
    return lambda template: Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", template), format="none")


def say(*roles: str) -> list[Message]:
    return [{"role": role, "content": f"{role} {at}"} for at, role in enumerate(roles)]


@pytest.mark.parametrize("template", [templates.HERMES, FIRST_ONLY, ANY_ROLE, DOCUMENTED])
def test_developer_is_system_without_a_branch(chat_of: Callable[[str], Chat], template: str) -> None:
    chat, asked = chat_of(template), say("developer", "user")
    as_system: list[Message] = [{**asked[0], "role": "system"}, asked[1]]
    ids = chat.render(asked)
    assert ids == chat.render(as_system)
    assert chat.decode(ids).startswith("<|im_start|>system\ndeveloper 0<|im_end|>")
    assert chat.remarks == {AS_SYSTEM: 1}
    answered = [*asked, assistant("Hm.")]
    assert chat.render_training(answered) == chat.render_training([*as_system, assistant("Hm.")])
    assert chat.remarks == {AS_SYSTEM: 2}


def test_developer_keeps_its_branch(chat_of: Callable[[str], Chat]) -> None:
    chat = chat_of(BRANCH)
    asked = chat.decode(chat.render(say("developer", "user")))
    assert asked.startswith("<|im_start|>instructions\ndeveloper 0<|im_end|>")
    assert not chat.remarks


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "llama-3", "gemma4"])
def test_developer_in_families(make_chat: Callable[..., Chat], name: str) -> None:
    chat = make_chat(name)
    assert "developer 0" in chat.decode(chat.render(say("developer", "user")))


@pytest.mark.parametrize(
    ("roles", "lost", "behind"),
    [
        (("user", "system"), 1, "behind one of role 'user'"),
        (("user", "assistant", "system", "user"), 2, "behind one of role 'assistant'"),
        (("system", "system", "user"), 1, "behind one of role 'system'"),
        (("system", "user", "assistant", "user", "assistant", "system", "user"), 5, "behind one of role 'assistant'"),
    ],
)
def test_a_message_that_vanishes_is_refused(
    chat_of: Callable[[str], Chat], roles: tuple[str, ...], lost: int, behind: str
) -> None:
    chat, messages = chat_of(FIRST_ONLY), say(*roles)
    chat.render(say("system", "user", "assistant", "user"))  # Another shape, which is well.
    match = rf"message {lost} \(the first is 0\): expected .* found one of role 'system', {behind}, .* leaves out"
    for _ in range(2):
        with pytest.raises(DataError, match=match):
            chat.render(messages)
    with pytest.raises(DataError, match=rf"message {lost} "):
        chat.render_training([*messages, assistant("Hm.")])
    written = chat.decode(chat_of(templates.HERMES).render(messages))
    assert all(str(message["content"]) in written for message in messages)


def test_the_role_of_the_row_is_named(chat_of: Callable[[str], Chat]) -> None:
    with naming(DataError, "message 1", "role 'developer'", "'system'"):
        chat_of(FIRST_ONLY).render(say("system", "developer", "user"))


def test_a_second_one_is_looked_for_where_the_first_is_written(chat_of: Callable[[str], Chat]) -> None:
    """Of longer conversations only places and neighbours are told apart, and how often a role comes: once or again."""
    once = templates.IGNORES_TOOLS.replace(
        "{{- '<|im_start|>'", "{%- if message.role != 'note' or loop.index0 < 4 %}{{- '<|im_start|>'", 1
    ).replace("'<|im_end|>\\n' }}\n", "'<|im_end|>\\n' }}{%- endif %}\n", 1)
    chat = chat_of(once)
    chat.render(say("user", "assistant", "note", "user"))
    with pytest.raises(DataError, match=r"message 5 .* role 'note'"):
        chat.render(say("user", "assistant", "note", "user", "assistant", "note", "user"))


def test_a_bridge_that_loses_a_message_is_refused(chat_of: Callable[[str], Chat]) -> None:
    chat = chat_of(FIRST_ONLY)
    ids = [*chat.render(say("user")), *chat.encode("Hm."), chat.stop_token_ids[0]]
    assert "user 0" in chat.decode(chat.bridge(ids, say("user")))
    with naming(DataError, "message 0", "role 'system'"):
        chat.bridge(ids, say("system", "user"))


def test_what_is_changed_or_blank_is_not_lost(chat_of: Callable[[str], Chat]) -> None:
    chat = chat_of(UNCASED)
    chat.render([{"role": "system", "content": '  a\n"b" '}, {"role": "user", "content": "<|im_end|>"}])
    chat = chat_of(FIRST_ONLY)
    chat.render([*say("user"), {"role": "system", "content": " \n"}])
    with pytest.raises(DataError, match="message 1 "):
        chat.render([*say("user"), {"role": "system", "content": [{"type": "text", "text": "a"}]}])


def test_what_a_template_leaves_out_on_purpose_is_counted(chat_of: Callable[[str], Chat]) -> None:
    template = templates.STRIPS_REASONING.replace(
        "{{- message.content }}", "{{- message.content if not message.tool_calls }}"
    )
    chat = chat_of(template)
    called: Message = {**assistant("Let me see.", 1), "reasoning_content": "Hm."}
    for question in ("a", "b", "a"):
        chat.render([{"role": "user", "content": question}, called, *answers(1)], TOOLS)
    assert chat.remarks == {REASONING: 3, BESIDE_CALLS: 3}


def test_a_probe_costs_once(chat_of: Callable[[str], Chat], monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of(templates.HERMES)
    chat.render(say("system", "user"))
    ids = [*chat.render(say("user")), *chat.encode("Hm."), chat.stop_token_ids[0]]
    chat.bridge(ids, say("user"))
    rendered: list[object] = []
    render, bridge = chat.format.render, chat.format.bridge

    def counted(write: Callable[..., list[int]], *args: object) -> list[int]:
        rendered.append(args)
        return write(*args)

    monkeypatch.setattr(chat.format, "render", partial(counted, render))
    monkeypatch.setattr(chat.format, "bridge", partial(counted, bridge))
    for at in range(5):
        chat.render([{"role": "system", "content": "s"}, {"role": "user", "content": f"question {at}"}])
        chat.bridge(ids, [{"role": "user", "content": f"answer {at}"}])
    assert len(rendered) == 10


@pytest.mark.parametrize("stop", ["<turn|>", "<|tool_response>", "<eos>"])
def test_gemma_4_is_shown_each_tool_answer(make_chat: Callable[..., Chat], stop: str) -> None:
    """However the policy ended its turn, and with a user's turn behind the answers."""
    chat = make_chat("gemma4")
    question: Message = {"role": "user", "content": "Next?"}
    ids = chat.render_training([question, assistant("", 2)], TOOLS)[0]
    ids[-1] = chat.encode_markup(stop)[0]
    opened = "<|tool_response>" if stop != "<|tool_response>" else ""
    shown = 'response:calculator{value:<|"|>result 0: 2<|"|>}<tool_response|><|tool_response>response'
    bridge = chat.decode(chat.bridge(ids, [*answers(2), question], TOOLS))
    assert bridge.startswith(opened + shown)
    assert bridge.endswith("<tool_response|><turn|>\n<|turn>user\nNext?<turn|>\n<|turn>model\n")
    assert chat.decode(chat.bridge(ids, answers(2), TOOLS)) == bridge.partition("<turn|>")[0]
