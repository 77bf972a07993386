"""Live clients whose engine is servers on this CPU: they are served through updates and a kill of the trainer."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from tests.e2e.test_train import lines
from tests.serve.served import People, arguments, free_port, serving
from tests.serve.test_learn import by_length, check_each_once

STEPS = 4


async def learn_through_a_kill(name: str, policy: Path, run: Path, seconds: float) -> None:
    """Train by servers of `name`; the process is killed when its second batch is known, and started again.

    seconds: each of the two processes has as many.
    """
    port, rollout = free_port(), "actor_rollout_ref.rollout"
    engine = [f"{rollout}.name={name}", f"{rollout}.max_num_seqs=16", f"{rollout}.server_start_timeout={seconds}"]
    engine.append(f"{rollout}.health_check_interval=60")  # a starved machine is no dead server
    words = arguments(policy, run, port, *engine, "trainer.device=cpu", f"trainer.total_training_steps={STEPS}")
    statuses: list[int] = []
    people = People(port, by_length, turns=3, is_over=lambda: bool(statuses and not statuses[-1]))

    async def serve() -> None:
        for point, number, expected in (("batch in the ledger", 2, -signal.SIGKILL), ("", 0, 0)):
            with serving(words, point, number) as server:
                await asyncio.to_thread(server.process.join, seconds)
                done = server.wait(1)
            statuses.append(done.returncode)
            assert done.returncode == expected, done.stderr

    await asyncio.gather(serve(), people.come(4))
    check_each_once(run, people, STEPS)
    trained = [line for line in lines(run) if line["step"]]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    assert trained[0]["rollout/logprob_gap_max_abs"] < 1e-4, "servers and trainer have different weights"
    assert all(line["sync/bytes"] > 100_000 for line in trained)
