"""System turns in the middle: they stay where the template writes them, else a user's text has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.system_turns import placed_turns
from agentrl.trajectory import Message
from tests.chat import templates
from tests.chat.test_coverage import BRANCH, FIRST_ONLY
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.openai_api.conftest import Open, scripted
from tests.openai_api.test_record import recorded, said

REFUSES = FIRST_ONLY.replace(
    "{%- for message in messages %}",
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}"
    "{{- raise_exception('A system message comes first.') }}{%- endif %}",
)
"""Raises for a system message in the middle (Qwen3.5)."""
GATHERS = (
    "{%- for message in messages if message.role == 'system' %}{{- '<|im_start|>system\\n' + message.content }}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    + templates.HERMES.replace("message.role == 'system' and not loop.first", "false")
)
"""Writes all system messages at the beginning."""
FOLDING = {"first_only": FIRST_ONLY, "refuses": REFUSES, "gathers": GATHERS}


def chat_of(path: Path, template: str) -> Chat:
    return Chat.from_pretrained(save_tokenizer(path, QWEN, "<|im_end|>", template), format="none")


def talk(*turns: tuple[str, str]) -> list[Message]:
    return [{"role": role, "content": text} for role, text in turns]


@pytest.mark.parametrize("template", [templates.HERMES, BRANCH, templates.OPENS_REASONING])
def test_turns_stay_where_the_template_writes_them(tmp_path: Path, template: str) -> None:
    chat = chat_of(tmp_path, template)
    messages = talk(("system", "a"), ("user", "b"), ("system", "c"), ("assistant", "d"), ("developer", "e"))
    assert placed_turns(messages, chat) == (messages, False)


@pytest.mark.parametrize("template", FOLDING.values(), ids=FOLDING)
def test_turns_become_a_users_text_where_it_does_not(tmp_path: Path, template: str) -> None:
    """What stands for a turn does not depend on what comes behind the next answer."""
    chat = chat_of(tmp_path, template)
    messages = talk(
        ("system", "a"),
        ("developer", "b"),
        ("user", "c"),
        ("system", "d"),
        ("user", "e"),
        ("assistant", "f"),
        ("user", "g"),
        ("user", "h"),
        ("assistant", "i"),
        ("system", "j"),
    )
    reminder = "<system-reminder>\n{}\n</system-reminder>".format
    whole = talk(
        ("system", "a\n\nb"),
        ("user", f"c\n\n{reminder('d')}\n\ne"),
        ("assistant", "f"),
        ("user", "g"),
        ("user", "h"),
        ("assistant", "i"),
        ("user", reminder("j")),
    )
    assert placed_turns(messages, chat) == (whole, True)
    assert placed_turns(messages[:5], chat) == (whole[:2], True)
    assert placed_turns([messages[0], messages[2]], chat) == ([messages[0], messages[2]], False)
    chat.render(whole)  # No message vanishes.


@pytest.mark.parametrize("template", [templates.HERMES, *FOLDING.values()], ids=["writes", *FOLDING])
async def test_a_session_with_system_turns_is_one_transcript(tmp_path: Path, template: str) -> None:
    """Each prompt is what a server renders from the same requests."""
    chat = chat_of(tmp_path, template)
    async with scripted(chat, ["One.", "Two.", "Three."]) as (service, engine), service.session() as open:
        history: list[Any] = []
        for turns in (
            [("user", "Hi"), ("system", "Notes.")],
            [("system", "More."), ("user", "Go on.")],
            [("system", "x")],
        ):
            history += [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
            answer = await post(open, {"system": "Use tools.", "messages": history, "max_tokens": 99})
            history.append({"role": "assistant", "content": answer["content"]})
        (transcript,) = open.trajectory.transcripts
        assert recorded(open.trajectory) == said(engine)
        messages = [{"role": "system", "content": "Use tools."}, *history[:-1]]
        rendered = chat.render(placed_turns(texts(messages), chat)[0])
        assert transcript.ids[: len(rendered)] == rendered
        assert open.trajectory.metrics.get("openai_dropped_system_turns", 0) == (
            0 if template is templates.HERMES else 3
        )


def texts(messages: list[Any]) -> list[Any]:
    return [
        {**one, "content": one["content"] if isinstance(one["content"], str) else one["content"][0]["text"]}
        for one in messages
    ]


async def post(open: Open, body: dict[str, Any]) -> Any:
    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{open.base_url}/messages", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()
