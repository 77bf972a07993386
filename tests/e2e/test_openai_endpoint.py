"""docs/openai_endpoint.md: its agents and commands, trained as shown."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest

from tests.agent_loop.test_agent_pool import pool
from tests.e2e.conftest import forked_command
from tests.e2e.test_docs import SMALL, commands, write_files
from tests.e2e.test_train import lines
from tests.forked import ForkedPython
from tests.runs import Overrides
from tests.waiting import wait_for
from tests.wheel import Run

PAGE = "docs/openai_endpoint.md"
ROW = {
    "prompt": [{"role": "user", "content": "What is 2 + 3?"}],
    "data_source": "quickstart/arithmetic",
    "reward_model": {"style": "rule", "ground_truth": "5"},
}


@pytest.mark.slice(1, "documents")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [0, 1, 2, 4, 7], ids=["function", "command", "pool", "remote", "main"])
def test_the_pages_agents_are_trained(
    run_wheel: Run,
    policy_dir: Path,
    reward_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # as where a venv is active
    assert write_files(PAGE, tmp_path) == ["my_agent.py", "my_command.py", "my_pool.py", "my_choice.py"]
    for name in ("rows", "test"):
        pq.write_table(pyarrow.Table.from_pylist([ROW] * 4), tmp_path / f"{name}.parquet")
    words = shlex.split(commands(PAGE)[number])
    assert words[0] == "python"
    words = [word.replace("Qwen/Qwen3-0.6B", str(policy_dir)) for word in words[1:]]
    more = [
        *SMALL,
        "data.train_batch_size=2",
        "data.val_max_samples=1",
        "trainer.val_before_train=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"custom_reward_function.path={reward_file}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
        "algorithm.filter_groups.enable=false",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    agent = None
    if number == 4:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        exports = [f"{commands(PAGE)[n]}\n" for n in (3, 5, 6)]
        monkeypatch.setenv("AGENT_TOKEN", exports[0].partition("=")[2].strip())
        words = [word.replace("8011", port) for word in words]
        agent = subprocess.Popen(["bash", "-c", "".join(exports).replace("8011", port)], cwd=tmp_path)
    run_wheel([*words, *more], tmp_path)
    assert agent is None or agent.wait(60) == 0, "it ends with the run"
    metrics = lines(tmp_path / "run")[-1]
    assert metrics["left_out/failed"] == 0
    assert metrics["trajectory/openai_calls"] >= 1
    assert metrics["response/sampled_mean"] > 1
    assert "score/calls" in metrics or number not in (0, 7)
    assert metrics.get("trajectory/left_out/side_calls") == (0 if number == 7 else None)
    assert ("trajectory/agent_start_cpu_seconds" in metrics) == (number in (1, 2))


def test_a_run_without_an_agent_ends_before_its_first_step(run_wheel: Run, policy_dir: Path, tmp_path: Path) -> None:
    pq.write_table(pyarrow.Table.from_pylist([{**ROW, "agent_name": "openai_proxy"}] * 4), tmp_path / "rows.parquet")
    files = [f"data.train_files={tmp_path}/rows.parquet", f"data.val_files={tmp_path}/rows.parquet"]
    with pytest.raises(AssertionError, match="set one of openai_proxy"):
        run_wheel(["-m", "agentrl.train", *files, f"actor_rollout_ref.model.path={policy_dir}", *SMALL], tmp_path)
    assert not (tmp_path / "runs").exists()


KILLING = """
import random
MOMENTS = {moments}

def solve(session):
    ask(session, session["sample"]["prompt"])
    with open(__file__ + ".calls", "a") as file:
        file.write("x")
    number = os.path.getsize(__file__ + ".calls")
    if number in MOMENTS and once(f".killed{{number}}"):
        os.kill(os.getppid() if MOMENTS[number] else os.getpid(), signal.SIGKILL)
    return {{"reward": number % 3}}

open(f"{{__file__}}.{{os.getpid()}}.pid", "w").close()
"""


def pool_keys(folder: Path, moments: dict[int, bool]) -> list[str]:
    """Keys of a pool whose agents kill themselves, or the trainer, at these of their calls."""
    options = pool(folder, KILLING.format(moments=moments))
    proxy = "actor_rollout_ref.rollout.agent.openai_proxy"
    return [
        "actor_rollout_ref.rollout.agent.default_agent_loop=openai_proxy",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
        f"{proxy}.start=pool",
        f"{proxy}.command={json.dumps(options.command)}",
        f"{proxy}.processes=2",
        f"{proxy}.sessions_at_once=8",
    ]


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(3))
def test_trainer_and_agents_may_be_killed(small_run: Overrides, tmp_path: Path, seed: int) -> None:
    """Each prompt is trained once, no token is too old, and no agent is left."""
    rng = random.Random(seed)
    # Apart, as answers arrive together: a trainer is killed once.
    moments = dict(zip(rng.sample(range(rng.randrange(6, 12), 60, 12), 4), [True, False, True, False], strict=True))
    rows = [{**ROW, "agent_name": "openai_proxy"}] * 16
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    more = ["async_training.max_staleness=1", "trainer.save_freq=2", "trainer.total_training_steps=6"]
    more += [f"data.train_files={tmp_path}/rows.parquet", "data.val_files=null"]
    arguments = small_run(*more, *pool_keys(tmp_path, moments))
    statuses: list[int] = []
    while not statuses or (statuses[-1] and len(statuses) < 4):
        done = forked_command(arguments, tmp_path)
        statuses.append(done.returncode)
    assert statuses == [-signal.SIGKILL, -signal.SIGKILL, 0], done.stderr
    run = tmp_path / "run"
    batches = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [batch["step"] for batch in batches] == list(range(1, 7))
    trained = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
    assert sorted(trained) == list(range(4 * 6))
    assert max(line.get("async/staleness_max", 0) for line in lines(run)) <= 1
    assert sum(line.get("left_out/failed", 0) for line in lines(run)) == 0
    pids = [file.name.split(".")[-2] for file in tmp_path.glob("*.pid")]
    assert len(pids) >= 6
    wait_for(lambda: not any(str(tmp_path) in command_of(pid) for pid in pids))


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [[], ["trainer.n_gpus_per_node=2"]], ids=["one process", "ray"])
def test_two_runs_on_one_machine(small_run: Overrides, tmp_path: Path, more: list[str]) -> None:
    """Each has its own endpoint, agents and Ray, in one working directory."""
    rows = [{**ROW, "agent_name": "openai_proxy"}] * 16
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    files = [f"data.train_files={tmp_path}/rows.parquet", "data.val_files=null", "trainer.total_training_steps=2"]
    keys = [*files, *pool_keys(tmp_path, {}), *more]
    names = ("first", "second")
    runs = [
        ForkedPython(["-m", "agentrl.train", *small_run(*keys, run_dir=tmp_path / name)], tmp_path) for name in names
    ]
    for run_of, name in zip(runs, names, strict=True):
        done = run_of.wait(400)
        assert done.returncode == 0, done.stderr
        metrics = lines(tmp_path / name)
        assert [line["step"] for line in metrics][-2:] == [1, 2]
        assert metrics[-1]["left_out/failed"] == 0 and metrics[-1]["trajectory/openai_calls"] == 1
