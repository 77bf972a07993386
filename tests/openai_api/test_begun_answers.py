"""Answers that a client begins for the policy (Messages): the policy goes on, and what was begun is never learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from tests.chat import templates
from tests.chat.test_coverage import FIRST_ONLY
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import Names, assert_names
from tests.openai_api.conftest import Open, scripted
from tests.openai_api.programs import USER
from tests.openai_api.test_dialects import RESULT, USED
from tests.openai_api.test_record import recorded, said

BEGUN = {"role": "assistant", "content": "Once"}
BY_CAUSE = "openai_bad_requests_unsupported_value"
GO_ON = {"role": "user", "content": "Go on."}


async def post(open: Open, messages: list[Any], path: str = "messages", **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{open.base_url}/{path}", json={"messages": messages, "max_tokens": 99, **more})


def chat_of(path: Path, template: str, format: str = "none") -> Chat:
    return Chat.from_pretrained(save_tokenizer(path, QWEN, "<|im_end|>", template), format=format)


@pytest.mark.parametrize("template", [None, templates.HERMES, FIRST_ONLY])
async def test_the_policy_continues_what_was_begun(chat: Chat, tmp_path: Path, template: str | None) -> None:
    chat = chat if template is None else chat_of(tmp_path, template)
    async with scripted(chat, [" upon a time.", "They lived."]) as (service, engine), service.session() as open:
        counted = (await post(open, [USER, BEGUN], "messages/count_tokens")).json()["input_tokens"]
        answer = (await post(open, [USER, BEGUN])).json()
        assert answer["content"] == [{"type": "text", "text": " upon a time."}]
        whole = {"role": "assistant", "content": "Once upon a time."}
        assert (await post(open, [USER, whole, GO_ON])).status_code == 200
        (transcript,) = open.trajectory.transcripts
        assert recorded(open.trajectory) == said(engine)
        ((prompt, _),) = engine.prompts.values()
        assert prompt[: len(asked := chat.render([USER]))] == asked  # type: ignore[list-item]
        assert chat.decode(prompt[len(asked) :]) == "Once" and len(prompt) == counted
        assert not any(transcript.mask[: len(prompt)])


async def test_the_prompt_is_what_a_server_renders(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, templates.HERMES)
    async with scripted(chat, [" upon."]) as (service, engine), service.session() as open:
        await post(open, [USER, BEGUN])
        ((prompt,),) = engine.prompts.values()
    served = chat.tokenizer.apply_chat_template([USER, BEGUN], continue_final_message=True, tokenize=False)
    assert chat.decode(prompt) == served


async def test_no_other_call_continues_a_prompt_that_was_begun(chat: Chat) -> None:
    """The same conversation without a beginning, or with another one, has a prompt of its own."""
    async with scripted(chat, lambda session, turn: " ok") as (service, engine), service.session() as open:
        other = {"role": "assistant", "content": "Twice"}
        for messages in ([USER, BEGUN], [USER], [USER, other], [USER, BEGUN]):
            assert (await post(open, messages)).status_code == 200
        ends = [chat.decode(prompts[-1]).rpartition("assistant\n")[2] for prompts in engine.prompts.values()]
        assert ends == ["Once", "", "Twice", "Once"]
        assert recorded(open.trajectory) == said(engine)


async def test_a_format_holds_for_the_whole_answer(chat: Chat) -> None:
    schema = {"type": "object", "required": ["sum"]}
    asked: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    async with scripted(chat, ['": 1}', '"sum": 5}']) as (service, _), service.session() as open:
        answer = (await post(open, [USER, {"role": "assistant", "content": "{"}], **asked)).json()
        assert answer["content"][0]["text"] == '"sum": 5}' and open.trajectory.metrics["openai_asked_again"] == 1


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([USER, USED], "text alone"),
        ([USER, {"role": "assistant", "content": []}], "text alone"),
        ([USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}], "text alone"),
        ([USER, {"role": "assistant", "content": "Once "}], "no blank"),
        ([USER, USED, {"role": "user", "content": [RESULT]}, {"role": "assistant", "content": "\n"}], "no blank"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    chat: Chat, caplog: pytest.LogCaptureFixture, messages: list[Any], problem: Names
) -> None:
    async with scripted(chat, []) as (service, _), service.session() as open:
        for path in ("messages", "messages/count_tokens"):
            answer = await post(open, messages, path)
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert_names(message, problem, f"messages[{len(messages) - 1}].content")
        assert open.trajectory.metrics == dict.fromkeys(("openai_bad_requests", BY_CAUSE), 2)
    assert caplog.text.count("a request of an agent (POST v1/messages) was refused") == 1


async def test_a_template_that_opens_reasoning_says_that_it_begins_no_turn(tmp_path: Path) -> None:
    chat = chat_of(tmp_path, templates.OPENS_REASONING, "auto")
    async with scripted(chat, []) as (service, _), service.session() as open:
        answer = await post(open, [USER, BEGUN])
        assert answer.status_code == 400 and "no turn of the policy begins with 'Once'" in answer.text
        assert not open.trajectory.transcripts
