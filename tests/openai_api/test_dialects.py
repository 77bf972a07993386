"""What Responses and Messages alone have: answers by id, items by reference, counted tokens, and their errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.messages import input_of
from agentrl.openai_api.responses import ENCRYPTED
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import scripted
from tests.openai_api.programs import (
    FUNCTION,
    THOUGHT,
    TURNS,
    USER,
    MessagesProgram,
    Program,
    ResponsesProgram,
)
from tests.openai_api.test_record import recorded, said


async def test_an_answer_is_continued_by_its_id(chat: Chat) -> None:
    async with scripted(chat, [TURNS[0], "ok", "no"]) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, store=True)
        agent.say("Hi")
        ((id, _, _),) = await agent.ask()
        first = agent.last["id"]
        agent.history = [{"type": "function_call_output", "call_id": id, "output": "5"}]
        agent.more["previous_response_id"] = first
        await agent.ask()
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)
        assert agent.last["previous_response_id"] == first
        agent.more["store"] = False
        agent.say("More.")
        await agent.ask()
        for unknown in (agent.last["id"], "resp_x"):
            answer = await agent.post({"input": "x", "previous_response_id": unknown})
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "previous_response_not_found")


async def test_items_are_sent_by_reference(chat: Chat) -> None:
    """As Vercel's AI SDK sends what is stored: the transcript goes on."""
    async with scripted(chat, [THOUGHT + TURNS[1], "ok"]) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, store=True)
        agent.say("Hi")
        assert await agent.ask()
        agent.history = [
            {"type": "item_reference", "id": item["id"]} if item.get("id") else item for item in agent.history
        ]
        assert {item.get("type") for item in agent.history[1:]} == {"item_reference"}
        agent.give([(one["call_id"], "5") for one in agent.last["output"] if one["type"] == "function_call"])
        await agent.ask()
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)
        answer = await agent.post({"input": [ITEM, {"type": "item_reference", "id": "msg_x"}]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input[1].id")


async def test_a_tool_that_takes_text_is_called_with_text(chat: Chat) -> None:
    patch = {"type": "custom", "name": "patch", "description": "Change files.", "format": {"type": "text"}}
    texts = [call("patch", input="*** Begin\n+é"), call("patch", path="x"), "done"]
    async with scripted(chat, texts) as (service, engine), service.session() as open:
        agent = ResponsesProgram(open, tools=[patch])
        agent.say("Hi")
        await agent.ask()
        (item,) = agent.last["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin\n+é")
        agent.history.append({"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"})
        ((id, _, arguments),) = await agent.ask()
        assert json.loads(arguments) == {"path": "x"}, "not what such a tool takes: the program sees it as it is"
        agent.give([(id, "expected text")])
        await agent.ask()
        assert len(open.trajectory.transcripts) == 1 and recorded(open.trajectory) == said(engine)


async def test_tokens_are_counted_without_a_record(chat: Chat) -> None:
    async with scripted(chat, ["ok"]) as (service, engine), service.session() as open:
        agent = MessagesProgram(open)
        agent.say("Hi")
        body = agent.body()
        del body["max_tokens"]
        async with httpx.AsyncClient() as client:
            counted = await client.post(f"{agent.url}/count_tokens", json=body)
            assert not open.trajectory.transcripts and open.session.turns == 0
        await agent.ask()
        ((prompt,),) = engine.prompts.values()
        usage = agent.last["usage"]
        assert counted.json() == {"input_tokens": len(prompt)}
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("text", "more", "reasons"),
    [
        ("ok", {}, ("end_turn", None)),
        ("a b END c", {"stop_sequences": ["END"]}, ("stop_sequence", "END")),
        ("word " * 50, {"max_tokens": 4}, ("max_tokens", None)),
        (TURNS[0], {}, ("tool_use", None)),
        (TURNS[0], {"tool_choice": {"type": "none"}}, ("end_turn", None)),
        (TURNS[0], {"tool_choice": {"type": "tool", "name": "add"}}, ("tool_use", None)),
    ],
)
async def test_why_a_message_ended(chat: Chat, text: str, more: dict[str, Any], reasons: tuple[str, Any]) -> None:
    async with scripted(chat, [text]) as (service, _), service.session() as open:
        agent = MessagesProgram(open, **more)
        agent.say("Hi")
        await agent.ask()
        assert (agent.last["stop_reason"], agent.last["stop_sequence"]) == reasons


USED: dict[str, Any] = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "5"}
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
CALLED = {
    "type": "function_call",
    "call_id": "c1",
    "name": "add",
    "arguments": '{"a": 1}',
    "id": "fc_1",
    "status": None,
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "5"}


async def test_errors_are_in_the_form_of_the_route(chat: Chat) -> None:
    async with scripted(chat, ["ok"]) as (service, _), httpx.AsyncClient() as client:
        for path, kind in (("v1/messages", "not_found_error"), ("v1/responses", "invalid_request_error")):
            answer = await client.post(f"{service.endpoint.url}/wrong-token/{path}", json={"messages": [USER]})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, kind)
            assert "session" in answer.json()["error"]["message"]
        async with service.session() as open:
            answer = await client.post(f"{open.base_url}/messages/batches", json={})
            assert answer.status_code == 404 and answer.json()["type"] == "error"
            assert "POST v1/messages, POST v1/messages/count_tokens" in answer.json()["error"]["message"]
            answer = await client.post(f"{open.base_url}/v1/messages", json={"messages": [USER], "max_tokens": 9})
            assert answer.json()["content"] == [{"type": "text", "text": "ok"}], "a base URL that ends with v1"


ODD: list[Any] = [None, 3, -1.5, "x", "", [], {}, True, [3], {"type": "x"}, [[]], 10**30, "\ud800"]
"""Values put in place of every member of a request."""
FOUND = [{"type": "tool_reference", "tool_name": "later"}, {"type": "text", "text": "5"}]
FULL_MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "tools": [
        {"name": "add", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"default": 1}}}},
        {"name": "later", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "bash_20250124", "name": "bash"},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "stop_sequences": ["END"],
    "stream": False,
    "thinking": {"type": "adaptive"},
    "temperature": 1.0,
    "top_k": 5,
    "metadata": {"user_id": "u"},
    "messages": [
        USER,
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, *USED["content"]]},
        {"role": "user", "content": [RESULT | {"content": FOUND}, {"type": "text", "text": "b"}]},
    ],
}
FULL_RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "a",
    "max_output_tokens": 9,
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        {"type": "tool_search", "execution": "client"},
        {"type": "shell"},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
    "parallel_tool_calls": True,
    "store": False,
    "stream": False,
    "include": [ENCRYPTED],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "input": [
        ITEM,
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        CALLED,
        OUTPUT,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "tool_search_call", "call_id": "c3", "arguments": {"query": "x"}},
        {"type": "shell_call", "call_id": "c4", "action": {"commands": ["ls"]}},
        {"type": "tool_search_output", "call_id": "c3", "tools": [{"type": "function", "name": "g"}]},
        {"type": "shell_call_output", "call_id": "c4", "output": [{"stdout": "x"}]},
    ],
}


def changed(value: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with one member replaced by an odd one, or left out."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        for other in [*ODD, *changed(member)]:
            copy = value.copy()
            copy[name] = other
            yield copy
        copy = value.copy()
        del copy[name]
        yield copy


@pytest.mark.slice(1, "hostile")
@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize(
    ("program", "body"),
    [(MessagesProgram, FULL_MESSAGES), (ResponsesProgram, FULL_RESPONSES)],
    ids=["messages", "responses"],
)
async def test_no_odd_request_is_an_error_of_the_endpoint(
    chat: Chat, program: type[Program], body: dict[str, Any], part: int
) -> None:
    """Each is answered, or refused with the path of a member that exists or is missing."""
    seen = {200: 0, 400: 0}
    limits = {"max_assistant_turns": 10**6}
    async with scripted(chat, lambda session, turn: "ok", **limits) as (service, _), httpx.AsyncClient() as client:
        for other in itertools.islice(changed(body), part, None, 8):
            async with service.session() as open:
                url = f"{open.base_url.removesuffix('/v1')}/{program.path}"
                answer = await client.post(url, content=json.dumps(other), headers={"content-type": "application/json"})
                assert answer.status_code in seen, (other, answer.text)
                seen[answer.status_code] += 1
                if answer.status_code == 400:
                    assert answer.json()["error"]["message"] and ".:" not in answer.text, (other, answer.text)
    assert min(seen.values()) > 10


async def test_tokens_are_counted_of_the_prompt_that_a_call_gets(chat: Chat) -> None:
    """A transcript keeps reasoning that a template leaves out of its history."""
    async with scripted(chat, [THOUGHT + "Yes.", "No."]) as (service, _), service.session() as open:
        talk: list[Any] = [{"role": "user", "content": "Hi"}]
        async with httpx.AsyncClient(timeout=60) as client:

            async def ask(path: str) -> Any:
                answer = await client.post(f"{open.base_url}/{path}", json={"messages": talk, "max_tokens": 99})
                assert answer.status_code == 200, answer.text
                return answer.json()

            for _ in range(2):
                counted = (await ask("messages/count_tokens"))["input_tokens"]
                said = await ask("messages")
                usage = said["usage"]
                assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
                talk += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "Sure?"}]
        assert len(open.trajectory.transcripts) == 1


def test_an_input_of_a_call_is_one_that_a_body_may_hold() -> None:
    deep = '{"a": ' + "[" * 190 + "]" * 190 + "}"
    assert [input_of(one) for one in ('{"a": 1}', deep, r'{"a": "\udfff"}')] == [
        {"a": 1},
        {"unparsed_arguments": deep},
        {"unparsed_arguments": r'{"a": "\udfff"}'},
    ]
