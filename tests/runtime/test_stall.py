"""What is said of calls that take suspiciously long."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from agentrl.runtime.ranks import LocalRanks
from agentrl.runtime.stall import Position, Stall, position_of, report, watched
from agentrl.system.loop_thread import DelayWatch, LoopThread


def position_in_thread(work: Callable[[threading.Event], Any]) -> Position:
    """Where a thread is that `work` holds up until the event it is given."""
    go_on, entered = threading.Event(), threading.Event()

    def run() -> None:
        entered.set()
        work(go_on)

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    try:
        while True:
            assert thread.ident is not None
            position = position_of(sys._current_frames()[thread.ident])
            if "work(go_on)" not in position.line or position.inside:
                return position
            time.sleep(0.001)
    finally:
        go_on.set()
        thread.join()


def test_a_position_is_the_own_line_and_what_it_calls() -> None:
    def own_line_waits(event: threading.Event) -> None:
        event.wait()

    position = position_in_thread(own_line_waits)
    assert position.inside == "threading.Event.wait"
    assert position.collective == ""
    assert position.line.startswith("tests/runtime/test_stall.py:") and position.line.endswith(", `event.wait()`")

    # What is innermost is a library, called from a library that the own line calls.
    def in_a_library(event: threading.Event) -> None:
        json.dumps([1], default=None, cls=type("Slow", (json.JSONEncoder,), {"encode": lambda self, o: event.wait()}))

    assert "Event.wait" in str(position_in_thread(in_a_library))


def test_the_rank_that_others_wait_for_is_named_first() -> None:
    waiting = Position("agentrl/workers/learner.py:9, `loss.backward()`", "torch.x", "all_gather")
    positions = {0: waiting, 2: waiting, 4: waiting, 1: Position("reward.py:12, `json.loads(text)`", "json.loads", "")}
    assert report(positions, {}) == (
        "rank 1 is in json.loads at reward.py:12, `json.loads(text)`; ranks 0, 2 and 4 wait for other ranks in "
        "all_gather at agentrl/workers/learner.py:9, `loss.backward()`"
    )
    assert report({3: waiting}, {0: "process 7 on here: it is dead"}, [1, 2]) == (
        "rank 0 does not say where it is (process 7 on here: it is dead); rank 3 waits for other ranks in all_gather "
        "at agentrl/workers/learner.py:9, `loss.backward()`; ranks 1 and 2 have answered"
    )


def test_it_is_said_once_a_period_and_over_at_the_limit() -> None:
    now = 100.0
    stall = Stall(10, 25, lambda: now)
    assert (stall.next(), stall.due(), stall.over) == (10, False, False)
    now = 112.0
    assert stall.due() and not stall.due()
    assert stall.next() == 8
    now = 141.0  # two periods at once: said once
    assert stall.due() and not stall.due()
    assert (stall.over, stall.next()) == (True, 0)


class SlowWorker:
    """A fault: its method takes as long as it is made to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def update(self) -> str:
        self.go_on.wait()
        return "done"


def test_a_slow_call_of_one_process_is_told_until_it_ends() -> None:
    worker, told = SlowWorker(), []

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            worker.go_on.set()

    ranks = LocalRanks(worker, lambda method: watched(f"policy.{method} has taken", 0.05, say))
    assert ranks.broadcast(SlowWorker.update) == ["done"]
    assert len(told) == 2
    assert told[0].startswith("policy.update has taken 0 s: it is in threading.Event.wait at tests/runtime/")
    assert "`self.go_on.wait()`" in told[0]


def test_who_holds_an_event_loop_is_told_while_it_stands_still() -> None:
    told, go_on, watch = list[str](), threading.Event(), DelayWatch(0.001)

    def say(text: str) -> None:
        told.append(text)
        if len(told) == 2:
            go_on.set()

    async def holds() -> None:
        go_on.wait()

    async def waits() -> None:
        await asyncio.sleep(0.3)

    with (
        LoopThread("rollouts") as loop,
        watched("the loop stood still for", 0.05, say, thread=loop.thread, seconds=watch.late),
    ):
        loop.call_soon(watch.begin)
        loop.run(waits())
        assert not told, "it goes on"
        loop.run(holds())
    assert len(told) == 2
    assert told[0].startswith("the loop stood still for 0 s: it is in threading.Event.wait at tests/runtime/")
    assert "`go_on.wait()`" in told[0]
