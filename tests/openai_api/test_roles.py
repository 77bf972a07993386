"""Roles that a chat template has no branch for: written as another role, or refused in words, at the endpoint too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from agentrl.chat import Chat
from tests.chat import templates
from tests.chat.test_coverage import FIRST_ONLY, say
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import assert_names
from tests.openai_api.conftest import scripted


@pytest.fixture
def chat_of(tmp_path: Path) -> Callable[[str], Chat]:
    return lambda template: Chat.from_pretrained(save_tokenizer(tmp_path, QWEN, "<|im_end|>", template), format="none")


async def test_in_the_strict_manner_a_message_that_the_template_loses_is_a_400_that_names_role_and_place(
    chat_of: Callable[[str], Chat],
) -> None:
    chat = chat_of(FIRST_ONLY)
    async with (
        scripted(chat, ["ok", "fine"], strict=True) as (service, engine),
        service.session() as open,
        httpx.AsyncClient() as raw,
    ):
        url, talk = f"{open.base_url}/chat/completions", say("system", "user")
        for lost, found in ((say("user", "system"), "role 'system'"), (say("user", "developer"), "role 'developer'")):
            answer = await raw.post(url, json={"model": "m", "messages": lost})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "messages")
            assert_names(error["message"], "message 1", found)
            assert_names(error["message"], "role 'user'")
        assert engine.prompts == {} and open.trajectory.transcripts == []
        assert (await raw.post(url, json={"model": "m", "messages": talk})).status_code == 200
        went_on = [*talk, {"role": "assistant", "content": "ok"}, *say("system", "user")]
        answer = await raw.post(url, json={"model": "m", "messages": went_on})
        assert_names(answer.json()["error"]["message"], "message 3")
        assert answer.status_code == 400
        assert len(open.trajectory.transcripts) == 1


async def test_developer_is_system_where_the_template_has_no_branch(chat_of: Callable[[str], Chat]) -> None:
    chat = chat_of(templates.HERMES)
    async with scripted(chat, ["ok"]) as (service, _), service.session() as open:
        reply = await open.say(say("developer", "user"))
        assert reply.choices[0].message.content == "ok"
        (transcript,) = open.trajectory.transcripts
        written = chat.decode(transcript.ids)
        assert written.startswith("<|im_start|>system\ndeveloper 0<|im_end|>")
