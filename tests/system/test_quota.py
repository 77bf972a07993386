from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.system.quota import Quota


async def test_so_many_at_once() -> None:
    quota, running, most = Quota(max_concurrent=3), 0, 0

    async def one() -> float:
        nonlocal running, most
        async with quota as waited:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1
        return waited

    waited = await asyncio.gather(*(one() for _ in range(9)))
    assert most == 3
    assert waited[:3] == [0.0] * 3 and min(waited[3:]) > 0.01


async def test_so_many_a_second() -> None:
    quota, begun = Quota(max_rate=20.0), time.monotonic()
    for _ in range(30):
        async with quota:
            pass
    assert time.monotonic() - begun >= 0.45  # 20 at once, then one every 1/20 s


async def test_a_place_is_given_back_by_one_that_is_cancelled_while_it_waits_for_its_turn() -> None:
    quota = Quota(max_concurrent=1, max_rate=1e-4)
    async with quota:
        pass

    async def waiting() -> None:
        async with quota:
            raise AssertionError("its turn is hours away")

    for _ in range(2):  # the second one would wait for the place instead
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await waiting()
    assert quota._places is not None and not quota._places.locked()
