"""Requests of real clients that broke a rule of the endpoint once, as `benchmarks.rollouts.clients` recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from benchmarks.rollouts.clients import FORMS, LIMITS, TURNS
from tests.openai_api.conftest import Open, scripted
from tests.openai_api.test_record import recorded, said

FOLDER = Path(__file__).parent / "recorded" / "clients"
"""`--requests` of the benchmark writes such files."""
TOOL = {"name": "add", "description": "Add two numbers.", "input_schema": {"type": "object"}}


def spied(open: Open) -> list[str]:
    """Ids of the session's answers as they begin."""
    begin, ids = open.session.begin, list[str]()

    async def beginning(*given: Any) -> Any:
        begun = await begin(*given)
        ids.append(begun[1].begun.id)
        return begun

    open.session.begin = beginning  # type: ignore[method-assign]
    return ids


@pytest.mark.parametrize("name", sorted(file.stem for file in FOLDER.glob("*.json")))
async def test_a_session_is_exact_and_no_request_is_refused(chat: Chat, name: str) -> None:
    form, _, mode = name.rpartition("-")
    texts = iter(FORMS[form].says)
    async with scripted(chat, lambda session, turn: next(texts), **LIMITS) as (service, engine):
        async with service.session() as open, httpx.AsyncClient() as client:
            ids = spied(open)
            for one in json.loads((FOLDER / f"{name}.json").read_text()):
                body = json.dumps(one["body"])
                for number, id in enumerate(ids):
                    body = body.replace(f"<answer {number}>", id)
                url = f"{open.base_url.removesuffix('/v1')}/{one['path']}"
                answer = await client.post(url, content=body, timeout=60)
                assert answer.status_code == 200, answer.text
        assert recorded(open.trajectory) == said(engine)
        assert len(open.trajectory.transcripts) == FORMS[form].transcripts[FORMS[form].modes.index(mode)]


async def test_a_thread_goes_on_with_its_system_prompt_and_its_tools(chat: Chat) -> None:
    """Also from an earlier answer; an id that is not known is an error that clients answer with all messages."""
    texts = [TURNS[0], TURNS[2], "Yes.", "No."]
    async with (
        scripted(chat, texts, **LIMITS) as (service, engine),
        service.session() as open,
        httpx.AsyncClient() as client,
    ):
        ids = spied(open)

        async def ask(status: int = 200, thread: dict[str, str] | None = None, **body: Any) -> Any:
            body = {"max_tokens": 500, "thread": thread or {"type": "create"}, **body}
            answer = await client.post(f"{open.base_url}/messages", json=body, timeout=60)
            assert answer.status_code == status, answer.text
            return answer.json()

        def after(number: int) -> dict[str, str]:
            return {"type": "continue", "previous_message_id": f"msg_{ids[number]}"}

        user = {"role": "user", "content": "What is 2 + 3?"}
        reply = await ask(messages=[user], system="Use tools.", tools=[TOOL])
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "5"}
            for block in reply["content"]
            if block["type"] == "tool_use"
        ]
        await ask(thread=after(0), messages=[{"role": "user", "content": results}])
        more = [{"role": "user", "content": "Are you sure?"}]
        count = await client.post(f"{open.base_url}/messages/count_tokens", json={"thread": after(1), "messages": more})
        last = await ask(thread=after(1), messages=more)
        usage = last["usage"]
        assert count.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]
        (transcript,) = open.trajectory.transcripts
        text = chat.decode(transcript.ids)
        assert text.count("Use tools.") == 1 and text.count("What is 2 + 3?") == 1 and "Two and three" in text
        await ask(thread=after(1), messages=more)
        again = open.trajectory.transcripts[1]
        assert again.ids[: again.prompt_length] == transcript.ids[: again.prompt_length]
        for field, value in (("system", "Be brief."), ("tools", [TOOL])):
            error = (await ask(400, thread=after(1), messages=more, **{field: value}))["error"]
            assert field in error["message"] and "thread" in error["message"]
        unknown = {"type": "continue", "previous_message_id": "msg_unknown"}
        error = (await ask(404, thread=unknown, messages=more))["error"]
        assert error["details"] == {"error_code": "thread_not_found"} and "msg_unknown" in error["message"]
        assert recorded(open.trajectory) == said(engine)
