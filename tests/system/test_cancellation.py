"""Cancellation that nobody asked for is an error of whoever waits, and one that was asked for stays what it is."""

from __future__ import annotations

import asyncio

import pytest

from agentrl.errors import InfrastructureError
from agentrl.system.cancellation import completed, is_being_cancelled, leaked_cancellation_fails
from tests.naming import naming
from tests.waiting import SECONDS, until


async def of_something_awaited() -> None:
    """Wait for a task that somebody else has cancelled."""
    inner = asyncio.create_task(asyncio.sleep(60))
    await asyncio.sleep(0)
    inner.cancel()
    await inner


async def test_one_that_leaks_is_an_error() -> None:
    told = naming(InfrastructureError, "the search", "cancelled")
    with told, leaked_cancellation_fails("the search"):
        await of_something_awaited()
    assert not is_being_cancelled()


async def test_one_that_was_asked_for_passes() -> None:
    seen: list[bool] = []

    async def work() -> None:
        with leaked_cancellation_fails("the search"):
            try:
                await asyncio.sleep(60)
            finally:
                seen.append(is_being_cancelled())

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [True]


async def test_a_deadline_around_it_is_kept() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            with leaked_cancellation_fails("the search"):
                await asyncio.sleep(60)


def test_a_thread_without_an_event_loop() -> None:
    with pytest.raises(InfrastructureError), leaked_cancellation_fails("the scorer"):
        raise asyncio.CancelledError


@pytest.mark.parametrize("turns", range(1, 12))
async def test_a_start_that_is_cancelled_early_ends_and_leaves_no_process(turns: int) -> None:
    begun: list[asyncio.subprocess.Process] = []

    async def start() -> asyncio.subprocess.Process:
        begun.append(await asyncio.create_subprocess_exec("sleep", "3600", stdout=asyncio.subprocess.PIPE))
        return begun[0]

    task = asyncio.create_task(completed(start(), lambda one: one.kill()))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    async with asyncio.timeout(SECONDS):
        try:
            await task
        except asyncio.CancelledError:
            assert task.cancelled()
        else:
            begun[0].kill()
    await until(lambda: not begun or begun[0].returncode is not None)
