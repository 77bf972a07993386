"""The event loop goes on turning while a long turn is read, and pieces of a text decode to the whole."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import pytest

from agentrl.chat import Chat
from agentrl.chat.chat import LONG_TURN
from agentrl.chat.codec import PIECE
from agentrl.system.threads import LONG_TEXT
from tests.chat.conversations import TOOLS
from tests.chat.test_parse import GOOD


async def largest_share(work: asyncio.Task[object]) -> float:
    """The longest that the event loop stood still during `work`, as a share of all CPU time until its end."""
    begun = last = time.process_time()  # The processes beside this one take no such time.
    longest = 0.0
    while not work.done():
        await asyncio.sleep(0)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return longest / (last - begun)


@pytest.mark.parametrize("name", ["hermes", "qwen3"])
@pytest.mark.parametrize("text", ["The user asks a question. é\n", GOOD])
async def test_the_event_loop_goes_on_while_a_long_turn_is_read(
    make_chat: Callable[..., Chat], name: str, text: str
) -> None:
    chat = make_chat(name)
    unit = chat._codec.encode(text)
    ids = unit * (200_000 // len(unit))
    # A busy machine may hold this thread up while the one that reads goes on, but hardly each time.
    shares = [await largest_share(asyncio.create_task(chat.read(ids, TOOLS))) for _ in range(3)]
    assert min(shares) < 0.5, shares
    assert await chat.read(unit * 2, TOOLS) == chat.parse(unit * 2, TOOLS)


async def test_short_turns_are_read_at_once(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    reading = chat.read(chat.encode("a") * (LONG_TURN - 1), TOOLS)
    with pytest.raises(StopIteration):  # It never waits.
        reading.send(None)


@pytest.mark.parametrize("text", ["aé 中😀", "\ufffd", "a\ufffd😀", "😀"])
def test_pieces_decode_to_the_whole(make_chat: Callable[..., Chat], text: str) -> None:
    chat = make_chat("hermes")
    ids, backend = chat.encode(text) * (3 * PIECE), chat._codec._backend
    assert backend is not None
    for start in range(5):
        assert chat.decode(ids[start:]) == backend.decode(ids[start:], skip_special_tokens=False)
    random.Random(text).shuffle(ids)  # Broken characters.
    assert chat.decode(ids) == backend.decode(ids, skip_special_tokens=False)


def test_long_texts_have_the_same_ids(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    text = "The city of é <|im_end|>\n" * (LONG_TEXT // 10)
    assert chat.encode(text) == [id for line in text.splitlines(keepends=True) for id in chat.encode(line)]
