from __future__ import annotations

import asyncio

import pytest

from agentrl.system.deadline import Clock, paused_deadlines, seconds_left, within
from tests.virtual_time import passes, virtual_time


@virtual_time
async def test_what_runs_inside_sees_how_long_it_has() -> None:
    assert seconds_left(7.0) == 7.0
    async with within(10.0):
        assert seconds_left(7.0) == 10.0
        async with within(60.0):  # an inner one cannot outlast it
            assert seconds_left(7.0) == 10.0
        async with within(1.0):
            assert await asyncio.create_task(left()) == 1.0
        passes(1.0)
        assert seconds_left(7.0) == 9.0
    assert seconds_left(7.0) == 7.0


@virtual_time
async def test_it_ends_what_runs_inside() -> None:
    with pytest.raises(TimeoutError):
        async with within(0.05) as timeout:
            await asyncio.sleep(10)
    assert timeout.expired()
    assert seconds_left(7.0) == 7.0


async def left() -> float:
    return seconds_left(7.0)


@virtual_time
async def test_what_waits_for_its_turn_is_not_charged_for_it() -> None:
    async with within(0.08), within(0.05):
        with paused_deadlines():
            await asyncio.sleep(0.1)
            assert seconds_left(7.0) == pytest.approx(0.05)
            async with within(0.01) as inner:  # one begun inside counts
                assert seconds_left(7.0) == pytest.approx(0.01)
                inner.reschedule(None)
        assert seconds_left(7.0) == pytest.approx(0.05)
    with pytest.raises(TimeoutError):
        async with within(0.05):
            with paused_deadlines():
                await asyncio.sleep(0.06)
            await asyncio.sleep(10)


@virtual_time
async def test_the_clock_stands_still_while_any_of_those_inside_waits() -> None:
    async def wait(seconds: float) -> None:
        with paused_deadlines():
            await asyncio.sleep(seconds)

    async with within(0.05):
        await asyncio.gather(wait(0.02), wait(0.1), asyncio.sleep(0.09))
    straggler = None
    with pytest.raises(TimeoutError):
        async with within(0.01):
            straggler = asyncio.create_task(wait(0.0))  # begins when the deadline is over: nothing is left to stop
            passes(0.02)
            await asyncio.sleep(10)
    assert straggler is not None
    await straggler


@virtual_time
async def test_a_cancellation_ends_the_wait() -> None:
    async def wait() -> None:
        async with within(5):
            with paused_deadlines():
                await asyncio.sleep(10)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@virtual_time
async def test_deadlines_of_a_clock_that_is_stopped_do_not_pass() -> None:
    clock = Clock()
    async with clock.timeout(0.03) as first:
        clock.stop()
        clock.stop()
        async with clock.timeout(0.01):  # one that begins meanwhile
            await asyncio.sleep(0.1)
            assert first.when() is None
            clock.resume()
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.01):
            await asyncio.sleep(10)
    clock.stop()
    clock.resume()


@virtual_time
async def test_a_clock_that_goes_on_leaves_the_time_that_was_left() -> None:
    clock = Clock()
    with pytest.raises(TimeoutError):
        async with clock.timeout(0.05) as timeout:
            clock.stop()
            clock.resume()
            left = timeout.when()
            assert left is not None and left - asyncio.get_running_loop().time() == pytest.approx(0.05)
            await asyncio.sleep(10)
    assert timeout.expired()
