"""Answers that a client does not take from its connection: they are not trained on."""

from __future__ import annotations

import asyncio

from agentrl.chat import Chat
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.contract import LIMITS, LONG
from tests.openai_api.programs import USER, leave_at, read_until, request, undelivered
from tests.waiting import until


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
