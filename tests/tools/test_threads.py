"""Blocking calls that are given up are counted, and refused when they pile up."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from agentrl.system.threads import AbandonedThreads, DaemonThreads
from tests.naming import naming


async def test_results_and_exceptions_come_back() -> None:
    threads = DaemonThreads("test")
    assert await threads.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(divmod, 7, 0)

    def stop() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(stop)


async def test_a_function_that_exits_ends_nothing() -> None:
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await DaemonThreads("test").run(sys.exit, 3)


async def test_given_up_calls_are_counted_until_they_return() -> None:
    threads, release = DaemonThreads("search", max_abandoned=2), threading.Event()
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.run(release.wait, 10), 0.02)
    assert threads.abandoned == 2
    with naming(AbandonedThreads, "2 calls"):
        await threads.run(int)
    release.set()
    async with asyncio.timeout(5):
        while threads.abandoned:
            await asyncio.sleep(0.005)
    assert await threads.run(int) == 0


async def test_a_call_that_returns_as_it_is_given_up_is_not_counted() -> None:
    threads, release = DaemonThreads("returns at once"), threading.Event()
    task = asyncio.create_task(threads.run(release.wait))
    await asyncio.sleep(0)
    task.cancel()  # the task itself has yet to run
    release.set()
    for thread in threading.enumerate():
        if thread.name == "returns at once":
            thread.join()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads.abandoned == 0


def test_a_hanging_call_keeps_no_process_alive() -> None:
    program = (
        "import asyncio, time\n"
        "from agentrl.system.threads import DaemonThreads\n"
        "async def main():\n"
        "    try: await asyncio.wait_for(DaemonThreads('x').run(time.sleep, 60), 0.05)\n"
        "    except TimeoutError: print('given up')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "given up\n"
