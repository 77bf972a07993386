"""Trainings in containers that are killed: each prompt is trained once, and no container stays."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pyarrow
import pyarrow.parquet as pq
import pytest

from tests.containers.conftest import LINE, Boxed, names
from tests.e2e.test_train import lines
from tests.forked import ForkedPython
from tests.runs import Overrides
from tests.waiting import wait_for

PROXY = "actor_rollout_ref.rollout.agent.openai_proxy"
ROW = {
    "prompt": [{"role": "user", "content": "2 + 3"}],
    "data_source": "agent/files",
    "agent_name": "openai_proxy",
    "reward_model": {"style": "rule", "ground_truth": ""},
}
AGENT = """
import json, os, sys, time, urllib.request
body = json.dumps({"model": "policy", "messages": json.load(sys.stdin)["prompt"]}).encode()
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(address, body, {"content-type": "text/json"})).read()
"""


class Start(Protocol):
    """Starter of a training with this code as its agent's end, and further overrides."""

    def __call__(self, code: str, *more: str) -> ForkedPython: ...


@pytest.fixture
def start(small_run: Overrides, boxed: Boxed, tmp_path: Path) -> Start:
    options = boxed()
    tmp_path.chmod(0o755)
    pq.write_table(pyarrow.Table.from_pylist([ROW] * 4), tmp_path / "rows.parquet")
    arguments = [*options.arguments, "--volume", f"{tmp_path}:/opt:ro"]
    box = {
        "memory_megabytes": 256,
        "image": options.image,
        "command_line": f"[{','.join(LINE)}]",
        "arguments": f"[{','.join(arguments)}]",
    }
    keys = [
        *(f"{PROXY}.container.{name}={value}" for name, value in box.items()),
        f"{PROXY}.start=container",
        f"{PROXY}.command=[python3,-S,/opt/agent.py]",
        f"{PROXY}.check=[ls]",
        f"data.train_files={tmp_path / 'rows.parquet'}",
        "data.val_files=null",
        "data.train_batch_size=2",
        "custom_reward_function.path=null",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
    ]

    def started(code: str, *more: str) -> ForkedPython:
        (tmp_path / "agent.py").write_text(AGENT + code)
        return ForkedPython(["-m", "agentrl.train", *small_run(*keys, *more)], tmp_path)

    return started


def of(run: ForkedPython) -> list[str]:
    """Names of the containers of a run."""
    return [name for name in names() if f"-{run.process.pid}-" in name]


def kill(run: ForkedPython) -> None:
    """Kill a run, unless it has ended by itself."""
    assert run.process.pid is not None
    with suppress(ProcessLookupError):
        os.kill(run.process.pid, signal.SIGKILL)


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(400)
def test_a_training_that_is_killed_leaves_its_containers_to_the_next_one(start: Start, tmp_path: Path) -> None:
    keys = [f"{PROXY}.container.pool=1", "trainer.total_training_steps=1", "actor_rollout_ref.rollout.n=2"]
    killed = start("time.sleep(600)", *keys)
    # Four sessions, and one container that is ready.
    wait_for(lambda: len(of(killed)) > 4 or not killed.process.is_alive(), 200)
    assert killed.process.is_alive(), killed.wait(1)
    kill(killed)
    killed.wait(30)
    run = start("", *keys)
    ended = run.wait(200)
    assert ended.returncode == 0, ended
    metrics = lines(tmp_path / "run")[-1]
    assert of(killed) == of(run) == []
    assert metrics["trajectory/containers"] == 2 and metrics["left_out/failed"] == 0


STEPS, PROMPTS, TRAJECTORIES = 13, 2, 4
TRAINER_KILLS, CONTAINER_KILLS = 6, 14


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bound", [0, 1])
def test_each_prompt_is_trained_once_whatever_is_killed(
    start: Start, tmp_path: Path, bound: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of 208 containers or more, of which some are killed, and its trainer six times."""
    rng = random.Random(bound)
    keys = [
        f"async_training.max_staleness={bound}",
        f"trainer.total_training_steps={STEPS}",
        f"actor_rollout_ref.rollout.n={TRAJECTORIES}",
        "actor_rollout_ref.rollout.agent.max_retries=8",
    ]
    used, trainers, containers = set[str](), 0, 0
    while True:
        run, own = start("time.sleep(len(os.environ['OPENAI_BASE_URL']) % 3 / 5)", *keys), set[str]()
        most = rng.randrange(2, 60) if trainers < TRAINER_KILLS else None
        while run.process.is_alive() and (most is None or len(own) < most):
            own |= set(there := of(run))
            if len(there) > 1 and containers < CONTAINER_KILLS and rng.random() < 0.4:  # a lone one may be the trial
                killing = subprocess.run([*LINE, "kill", rng.choice(there)], capture_output=True, check=False)
                containers += killing.returncode == 0
            time.sleep(0.05)
        if run.process.is_alive():
            time.sleep(rng.uniform(0, 1))
            kill(run)
        ended = run.wait(900)
        used |= own
        if ended.returncode != -signal.SIGKILL:
            break
        trainers += 1
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert not [name for name in names() if name in used or f"-{run.process.pid}-" in name]
    steps = lines(tmp_path / "run")
    trained = [line for line in steps if "trajectory/containers" in line]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1)), "each step counts once"
    assert sum(line["left_out/failed"] for line in trained) == 0
    records = pq.ParquetDataset(tmp_path / "run" / "trajectories").read(["uid"])
    assert len(records) == len(set(records["uid"].to_pylist())) == STEPS * PROMPTS * TRAJECTORIES
    if bound:
        batches = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
        prompts = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
        assert sorted(prompts) == list(range(STEPS * PROMPTS))
    begun = sum(line["trajectory/containers"] for line in trained) * PROMPTS * TRAJECTORIES
    with capsys.disabled():
        print(f"\nbound {bound}: {begun:.0f} containers, {trainers} trainer and {containers} container kills")
    # Tries that were killed come on top.
    assert begun >= 2 * STEPS * PROMPTS * TRAJECTORIES and trainers > 0 and containers > 0
