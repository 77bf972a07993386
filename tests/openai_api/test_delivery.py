"""Answers that a client does not take from its connection, in the three APIs: they are not trained on."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from agentrl.chat import Chat
from tests.openai_api.conftest import ADD, Open, scripted
from tests.openai_api.test_record import QUESTION
from tests.waiting import until

LONG = "word " * 5000
LIMITS = {"max_model_len": 40_000, "max_response_tokens": 30_000}
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
APIS: dict[str, tuple[dict[str, Any], bytes]] = {
    "chat/completions": ({"messages": [USER]}, b"data: [DONE]"),
    "responses": ({"input": [USER]}, b"event: response.completed"),
    "messages": ({"messages": [USER], "max_tokens": 20_000}, b"event: message_stop"),
}


def request(url: str, body: dict[str, Any]) -> socket.socket:
    """Send a request; the system takes little of its answer before the program reads."""
    address, content = urlsplit(url), json.dumps(body).encode()
    connection = socket.create_connection((address.hostname, address.port))
    head = f"POST {address.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def read_until(connection: socket.socket, wanted: bytes, most: int) -> bytes:
    """Read to the end of the event that begins with `wanted`, or to any other text."""
    said = b""
    while not (wanted in said and (b"\n\n" in said.partition(wanted)[2] or not wanted.startswith(b"event"))):
        piece = connection.recv(most)
        assert piece, said[-2000:]
        said += piece
    return said


def leave_at(url: str, body: dict[str, Any], wanted: bytes, most: int) -> bytes:
    with request(url, body) as connection:
        return read_until(connection, wanted, most)


def undelivered(open: Open) -> tuple[float, float]:
    metrics = open.trajectory.metrics
    return metrics.get("openai_undelivered_turns", 0), metrics.get("openai_undelivered_tokens", 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", APIS)
async def test_an_answer_that_its_client_left_is_not_trained_on(chat: Chat, path: str, stream: bool) -> None:
    async with scripted(chat, ["Hello.", LONG], **LIMITS) as (service, engine):
        async with service.session() as open:
            hello = (await open.say([QUESTION])).choices[0].message
            said = open.trajectory.num_sampled
            url, body = f"{open.base_url}/{path}", {**APIS[path][0], "stream": stream}
            await asyncio.to_thread(leave_at, url, body, b"word", 500)
            await until(lambda: len(engine.prompts) == 2 and not engine.running)
            assert hello.content == "Hello."
        turns, tokens = undelivered(open)
        more = open.trajectory.num_sampled - said  # What was taken stays: of a stream, pieces that arrived.
        assert tokens >= 5000 > 10 * more * (not stream)
        assert tokens + more == sum(map(len, engine.said["s1.1"][-1:]))
        assert (turns, len(open.trajectory.turns)) == ((1, 1) if not more else (0, 2))
        contents = [message["content"] for message in open.trajectory.messages]
        assert contents[:3] == [QUESTION["content"], "Hello.", "Hi"]
        assert "".join(map(str, contents[3:])) == LONG[: len("".join(map(str, contents[3:])))]


@pytest.mark.parametrize("path", APIS)
async def test_a_client_that_leaves_at_the_last_event_has_taken_the_answer(chat: Chat, path: str) -> None:
    """Codex does so: it waits neither for another event nor for the end of the body."""
    body, last = APIS[path]
    async with scripted(chat, lambda session, turn: LONG, **LIMITS) as (service, _):
        for _ in range(3):
            async with service.session() as open:
                url = f"{open.base_url}/{path}"
                said = await asyncio.to_thread(leave_at, url, {**body, "stream": True}, last, 65536)
                assert said.endswith(b"\r\n0\r\n\r\n")
            assert undelivered(open) == (0, 0) and open.trajectory.num_sampled > 5000


async def test_an_answer_that_a_call_continues_was_read(chat: Chat) -> None:
    """Whatever became of its connection: the client repeats its text."""
    url = "chat/completions"
    async with scripted(chat, [LONG, "Yes.", LONG, "No."], **LIMITS) as (service, _):
        async with service.session() as open:
            for expected in (1, 2):
                talk = [USER] if expected == 1 else [USER, {"role": "assistant", "content": "x"}, USER]
                body = {"messages": talk, "stream": True}
                with await asyncio.to_thread(request, f"{open.base_url}/{url}", body) as connection:
                    await asyncio.to_thread(read_until, connection, b"word", 500)
                    await until(lambda: not open.session._tasks)
                turn = open.trajectory.turns[-1]
                more = [*talk, {"role": "assistant", "content": turn.text}, {"role": "user", "content": "And?"}]
                await open.say(more)
        assert undelivered(open) == (0, 0)
        assert [turn.role for turn in open.trajectory.turns].count("assistant") == 4


async def test_a_clients_clean_end_after_the_answer_is_no_loss(chat: Chat) -> None:
    """Each call by a connection of its own, which the client or the server ends."""
    async with scripted(chat, lambda session, turn: LONG, **LIMITS) as (service, _):
        async with service.session() as open:
            url = f"{open.base_url}/chat/completions"
            for stream in (True, False):
                end = b"0\r\n\r\n" if stream else b"prompt_tokens_details"
                body = {"messages": [USER], "stream": stream}
                await asyncio.to_thread(leave_at, url, body, end, 65536)
            host = {"Connection": "close"}
            await open.say([USER], extra_headers=host)
        assert undelivered(open) == (0, 0)
        assert [turn.role for turn in open.trajectory.turns] == ["assistant"] * 3


async def test_a_cancelled_call_leaves_none_of_its_tries(chat: Chat) -> None:
    """An answer without the required call is asked for again; the client leaves meanwhile."""
    async with scripted(chat, lambda session, turn: "no call") as (service, engine), service.session() as open:
        body = {"messages": [USER], "tools": [ADD], "tool_choice": "required"}
        engine.delay = 0.2
        connection = await asyncio.to_thread(request, f"{open.base_url}/chat/completions", body)
        await until(lambda: len(engine.prompts) == 2)
        assert open.trajectory.num_sampled > 0
        connection.close()
        await until(lambda: not open.session._tasks)
        assert undelivered(open)[0] >= 1
        assert (open.trajectory.num_sampled, open.trajectory.turns) == (0, [])
