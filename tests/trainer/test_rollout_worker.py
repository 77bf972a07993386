"""A rollout worker of Ray's, without Ray around it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from agentrl.agent_loop import Scheduler
from agentrl.config import Config
from agentrl.data.sample import Sample
from agentrl.rollout.engine import RolloutEngine
from agentrl.trainer.rollouts import Rollouts

pytest.importorskip("ray")


class EndlessScheduler:
    """A fault: no trajectory ever ends."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cancelled = False

    async def run(self, requests: Any, on_end: Any) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.timeout(60)
def test_rollouts_that_nobody_wants_any_more_are_ended(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.trainer.ray_rollouts import RolloutWorker
    from agentrl.workers.ray_rank import Failure

    monkeypatch.chdir(tmp_path)  # a worker goes to the folder it is given
    worker, scheduler = RolloutWorker(str(tmp_path)), EndlessScheduler()
    worker.rollouts = Rollouts(
        Config(), cast(Scheduler, scheduler), cast(RolloutEngine, None), runner, worker.relay, tmp_path
    )
    worker.rollouts.stop()  # nothing is going on

    def stop() -> None:
        scheduler.begun.wait()
        worker.rollouts.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    answer = worker.call("train", ([Sample([], "test", "single_turn")], 1), {})
    stopping.join()
    assert isinstance(answer, Failure) and answer.message.startswith("CancelledError")
    assert scheduler.cancelled
