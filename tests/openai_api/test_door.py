"""A door of the endpoint: one further listening socket, as a container has it, for one session alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import openai
import pytest

from agentrl.chat import Chat
from agentrl.openai_api import endpoint as endpoints
from tests.openai_api.conftest import Open, Service, scripted


@asynccontextmanager
async def door(service: Service, opened: Open) -> AsyncIterator[str]:
    """Open a session's door; give the address of the session behind it."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    token = opened.base_url.split("/")[3]
    async with service.endpoint.door(token, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{token}/v1"


async def test_a_door_leads_to_its_own_session_alone(chat: Chat) -> None:
    async with scripted(chat, lambda session, turn: "5") as (service, _), AsyncExitStack() as stack:
        first = await stack.enter_async_context(service.session())
        second = await stack.enter_async_context(service.session())
        url = await stack.enter_async_context(door(service, first))
        root, (own, other) = url.split("/", 3)[:3], (one.base_url.split("/")[3] for one in (first, second))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url="/".join(root)))
        asked = await openai.AsyncOpenAI(base_url=url, api_key="unused").chat.completions.create(
            model="any", messages=[{"role": "user", "content": "2 + 3"}]
        )
        assert asked.choices[0].message.content == "5" and first.session.turns
        told = (await client.get(f"/{own}/v1/models")).status_code
        hidden = [
            (await client.request(method, path, json={})).status_code
            for method, path in (
                ("GET", f"/{other}/v1/models"),
                ("POST", f"/{other}/v1/chat/completions"),
                ("POST", f"/{first.session.report_token}/v1/feedback"),
                ("POST", f"/{second.session.report_token}/v1/feedback"),
                ("GET", "/v1/sessions"),
                ("GET", f"//{own}/v1/models"),
            )
        ]
        scored = (await client.post(f"/{own}/v1/feedback", json={"score": 1})).status_code
    assert (told, scored, set(hidden)) == (200, 403, {404})
    assert not second.session.turns and not first.session.feedback and not second.session.feedback


async def test_a_door_has_few_connections_and_ends_with_its_session(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "MOST_OF_DOOR", 2)
    async with scripted(chat, lambda session, turn: "5") as (service, _), service.session() as opened:
        async with door(service, opened) as url:
            place = ("127.0.0.1", int(url.split(":")[2].split("/")[0]))
            links = [await asyncio.open_connection(*place) for _ in range(3)]
            assert await asyncio.wait_for(links[2][0].read(), 10) == b""
            links[0][1].close()
            async with httpx.AsyncClient() as client:
                for _ in range(100):  # until the server has seen that end
                    try:
                        assert (await client.get(url + "/models")).status_code == 200
                        break
                    except httpx.TransportError:
                        await asyncio.sleep(0.05)
                else:
                    pytest.fail("a connection that ended still counts")
        with pytest.raises(OSError):
            await asyncio.open_connection(*place)
        for _, writer in links:
            writer.close()
