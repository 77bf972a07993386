"""An event loop in a thread: results, errors, interrupts, and what is left when it is closed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from agentrl.system import loop_thread
from agentrl.system.loop_thread import DelayWatch, LoopThread
from tests.naming import naming


async def here() -> threading.Thread:
    return threading.current_thread()


def test_all_work_runs_on_one_thread_until_the_end_and_tasks_outlive_a_run() -> None:
    ended = []

    async def begin() -> asyncio.Task[None]:
        async def wait() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("cancelled")

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        return task

    with LoopThread("mine") as loop:
        thread = loop.run(here())
        assert thread.name == "mine" and thread is loop.run(here()) is not threading.current_thread()
        task = loop.run(begin())
        assert not task.done() and not ended
    assert task.cancelled() and ended and not thread.is_alive()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run(here())


def test_errors_of_the_work_are_raised_where_it_is_waited_for() -> None:
    async def fail(error: BaseException) -> None:
        raise error

    async def cancelled() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    with LoopThread("mine") as loop:
        for error in (ValueError("x"), TimeoutError("late"), SystemExit(3), KeyboardInterrupt("k")):
            with pytest.raises(type(error), match=str(error)):
                loop.run(fail(error))
        with pytest.raises(asyncio.CancelledError):
            loop.run(cancelled())
        assert loop.run(here()).is_alive(), "the loop goes on"


def test_what_ends_a_loop_reaches_who_waits() -> None:
    """SystemExit of a task that nobody awaits: asyncio lets it through."""

    async def leave() -> None:
        sys.exit("of a task in the background")

    async def wait(task: list[asyncio.Task[None]]) -> None:
        task.append(asyncio.create_task(leave()))
        await asyncio.Event().wait()

    async def leave_later(task: list[asyncio.Task[None]]) -> None:
        task.append(asyncio.get_running_loop().create_task(leave()))

    with LoopThread("mine") as loop:
        with pytest.raises(SystemExit, match="in the background"):
            loop.run(wait([]))
        kept: list[asyncio.Task[None]] = []
        with pytest.raises(SystemExit, match="in the background"):
            loop.run(leave_later(kept))
            while not kept[0].done():
                time.sleep(0.01)
            loop.run(asyncio.sleep(60))
        assert loop.run(here()).is_alive()


def test_the_longest_delay_is_of_what_held_the_loop_since_it_was_last_asked_for() -> None:
    with LoopThread("delayed") as loop:
        watch = DelayWatch()
        assert watch.late() == 0.0
        loop.call_soon(watch.begin)

        async def held(seconds: float) -> float:
            await asyncio.sleep(2 * DelayWatch.SECONDS)
            watch.take()
            time.sleep(seconds)
            await asyncio.sleep(2 * DelayWatch.SECONDS)
            return watch.take()

        async def held_until_now() -> float:
            watch.take()
            time.sleep(0.4)
            return watch.take()

        assert loop.run(held(0.5)) >= 0.5 - DelayWatch.SECONDS
        assert loop.run(held_until_now()) >= 0.4 - DelayWatch.SECONDS
        assert loop.run(held(0.0)) < 0.35  # room for a busy machine


def test_a_thread_that_cannot_be_set_up_tells_why() -> None:
    @contextmanager
    def refuse() -> Iterator[None]:
        raise OSError("no such device")
        yield

    loop = LoopThread("mine", refuse)
    with pytest.raises(OSError, match="no such device"):
        loop.run(asyncio.sleep(60))
    loop.close()


def test_it_works_beside_a_running_loop_and_not_from_its_own() -> None:
    async def main() -> None:
        with LoopThread("mine") as loop:
            assert loop.run(here()).name == "mine"

            async def nested() -> None:
                with naming(RuntimeError, "itself"):
                    loop.run(here())

            loop.run(nested())

    asyncio.run(main())


@contextmanager
def interrupts() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt(begun: threading.Event, seconds: float = 0.0) -> None:
    def send() -> None:
        begun.wait()
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.timeout(60)
def test_an_interrupt_ends_the_work_in_good_order() -> None:
    begun, ended = threading.Event(), []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append("in good order")

    with interrupts(), LoopThread("mine") as loop:
        interrupt(begun)
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
        assert ended == ["in good order"]
        assert loop.run(here()).is_alive()


@pytest.mark.timeout(60)
def test_a_second_interrupt_ends_at_once_and_what_is_closed_after_it_has_little_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_thread, "HURRIED_SECONDS", 0.2)
    begun, ending, let_go = threading.Event(), threading.Event(), threading.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            let_go.wait()  # a fault: it blocks the loop

    with interrupts(), pytest.raises(KeyboardInterrupt), LoopThread("mine") as loop:
        interrupt(begun)
        interrupt(ending, 0.1)
        loop.run(work())
    monkeypatch.setattr(loop_thread, "HURRIED_SECONDS", 3600.0)  # a loop that was given up is not waited for again
    with pytest.raises(KeyboardInterrupt):
        loop.run(here())
    loop.close()
    let_go.set()


@pytest.mark.timeout(60)
def test_a_loop_that_was_given_up_keeps_no_process_from_ending() -> None:
    program = (
        "import threading\n"
        "from agentrl.system.loop_thread import DelayWatch, LoopThread\n"
        "async def block():\n"
        "    threading.Event().wait()\n"
        "loop = LoopThread('mine')\n"
        "loop._loop.call_soon_threadsafe(lambda: loop._loop.create_task(block()))\n"
        "raise SystemExit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 7
