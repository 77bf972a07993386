"""Killed at any moment and started again, a run ends with the numbers of an undisturbed one, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from tests.e2e.conftest import forked_command
from tests.e2e.kills import ends_at
from tests.e2e.test_train import lines
from tests.forked import ForkedPython
from tests.runs import Overrides

TIMES = ("time/", "perf/", "tool/seconds", "trajectory/generate_seconds", "trajectory/tool_seconds")
STEPS = 6
THIRDS = """
from hashlib import sha256

def compute_score(solution_str, ground_truth):
    differs = sha256(str(ground_truth).encode()).digest()[0] % 3 == 0
    return float(differs and len(solution_str) % 2)
"""
"""A scorer by which the answers to some prompts, and to no others, may differ."""


def numbers(run: Path) -> list[dict[str, float]]:
    """The metrics without what a clock says."""
    return [
        {name: value for name, value in line.items() if not name.startswith(TIMES) and "seconds" not in name}
        for line in lines(run)
    ]


def kill_after(arguments: list[str], run: Path, seconds: float, last: int, number: int = signal.SIGKILL) -> bool:
    """Start a run that is killed after its step `last`, or by us after `seconds`; returns whether it was killed."""
    ends = ends_at(run.parent, last, number=number)
    started = ForkedPython(["-m", "agentrl.train", *arguments, ends], run.parent)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and started.process.is_alive():
        time.sleep(0.01)
    assert started.process.pid is not None
    if started.process.is_alive():
        os.kill(started.process.pid, number)
    return started.wait(30).returncode == (-signal.SIGKILL if number == signal.SIGKILL else 143)


@pytest.mark.slice(1, "kill")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dapo"])
def test_killed_and_resumed_equals_undisturbed(small_run: Overrides, tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "thirds.py").write_text(THIRDS)
    refilled = [
        f"custom_reward_function.path={tmp_path}/thirds.py",
        "data.gen_batch_size=3",
        "algorithm.filter_groups.refill=true",
        "algorithm.filter_groups.max_num_gen_batches=40",
    ]

    def overrides(name: str) -> list[str]:
        group = "grpo" if algorithm == "dapo" else algorithm
        more = [f"trainer.total_training_steps={STEPS}", "trainer.test_freq=2", f"algorithm={group}"]
        more += refilled if algorithm == "dapo" else []
        more.append(f"actor_rollout_ref.actor.checkpoint.async_save={algorithm == 'ppo'}")
        return [
            override
            for override in small_run(*more, run_dir=tmp_path / name)
            if algorithm != "ppo" or "filter_groups.enable" not in override
        ]

    began = time.monotonic()
    whole = forked_command(overrides("whole"), tmp_path)
    seconds = time.monotonic() - began
    assert whole.returncode == 0, whole.stderr
    rng = random.Random(algorithm)
    killed = tmp_path / "killed"
    for last in (STEPS - 1, STEPS + 1):  # a first run that is much faster than the one before is killed, too
        was_running = kill_after(overrides("killed"), killed, rng.uniform(0.3, 1.0) * seconds, last)
        assert was_running or last > STEPS
    resumed = forked_command(overrides("killed"), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert numbers(killed) == numbers(tmp_path / "whole")
    if algorithm == "dapo":
        drawn = {line["refill/gen_batches"] for line in numbers(killed)[1:]}
        assert len(drawn) > 1, "steps drew different numbers of generation batches"
    one, other = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "killed"))
    assert one.keys() == other.keys()
    assert all((one[name] == other[name]).all() for name in one)


@pytest.mark.slice(1, "kill")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bound", [1, 3])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_asynchronous_run_that_is_killed_trains_each_prompt_once(
    small_run: Overrides, tmp_path: Path, bound: int, number: signal.Signals
) -> None:
    """Killed without a checkpoint, between two, and again; 4 prompts a step, and slots for 6 trajectories."""
    more = [f"async_training.max_staleness={bound}", f"async_training.depth={min(bound, 2)}", "trainer.save_freq=3"]
    more += [f"trainer.total_training_steps={STEPS}", "actor_rollout_ref.rollout.max_num_seqs=6"]
    arguments, run = small_run(*more), tmp_path / "run"
    for last in (2, 4, 5, STEPS + 1):
        if not kill_after(arguments, run, 100, last, number):
            break
    resumed = forked_command([*arguments, f"trainer.total_training_steps={STEPS + 2}"], tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    text = (run / "ledger.jsonl").read_text()
    batches = [json.loads(line) for line in text.splitlines()]
    assert [batch["step"] for batch in batches] == list(range(1, STEPS + 3))
    ordinals = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
    assert sorted(ordinals) == list(range(4 * (STEPS + 2)))
    assert [line["step"] for line in lines(run)] == list(range(STEPS + 3))
    assert max(line.get("async/staleness_max", 0) for line in lines(run)) <= bound
    assert f"{4 * (STEPS + 2)} prompts, each once: {4 * (STEPS + 2)} trained" in resumed.stdout


SLOW = """
import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

from agentrl.agent_loop import AgentLoop
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.trajectory import Status

HERE = Path(__file__).parent
generate = EmbeddedEngine.generate


def note(file, *what):
    with open(HERE / file, "a") as opened:
        opened.write(json.dumps(what) + "\\n")


async def counted(self, ids, params, session, *images):
    global later
    if not (HERE / "killed").exists() and self._version >= 2:
        while not (HERE / "run/checkpoints/step_000002").exists():  # it is saved by another thread
            await asyncio.sleep(0.01)
        later += 1
        if later == 8:
            with contextlib.suppress(FileExistsError):  # another process was first
                (HERE / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
    note("begun.jsonl", session, list(ids))
    made = await generate(self, ids, params, session, *images)
    note("finished.jsonl", session, list(ids), made.ids)
    return made


EmbeddedEngine.generate = counted
later = 0


async def slow(place: int) -> str:
    \"\"\"Answer late.\"\"\"
    note("calls.jsonl", place)
    await asyncio.sleep(0.05 * (place % 5))
    return "later"


class Calling(AgentLoop):
    async def run(self, episode):
        await episode.start(episode.sample.prompt)
        for turn in range(3):
            reply = await episode.generate(max_tokens=3)
            said = await episode.call("slow", {"place": len(reply.message.text) + turn})
            await episode.observe([{"role": "user", "content": said.text}])
        note("ended.jsonl", episode.trajectory.uid, episode.transcript.ids)
        episode.finish(Status.COMPLETED)
"""
"""A loop of three turns with a slow tool. Its process is killed some turns after the first checkpoint: turns of these
weights or later ones, which the last of five steps cannot do without."""


def slow_loop(folder: Path, data: Path, code: str, tool: str = "{function: slow.slow}") -> list[str]:
    """Write the loop and its rows into a folder; return the keys that name them. A prompt has two trajectories."""
    (folder / "slow.py").write_text(code)
    (folder / "tools.yaml").write_text(f"tools:\n  - {tool}\n")
    (folder / "loops.yaml").write_text("- name: calling\n  _target_: slow.Calling\n")
    rows = [{**row, "agent_name": "calling"} for row in pq.read_table(data / "train.parquet").to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return [
        "actor_rollout_ref.rollout.n=2",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={folder}/tools.yaml",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder}/loops.yaml",
        f"data.train_files={folder}/rows.parquet",
        "data.val_files=null",
        "data.max_response_length=64",
    ]


@pytest.mark.slice(1, "kill")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("on_resume", ["answers", "none"])
def test_no_finished_turn_is_sampled_again_after_a_kill(
    small_run: Overrides, data_dir: Path, tmp_path: Path, on_resume: str
) -> None:
    """With a tool whose sessions do not come back, trajectories that called it begin anew."""
    tool = f"{{function: slow.slow, config: {{on_resume: {on_resume}}}}}"
    more = ["async_training.max_staleness=2", "async_training.depth=2", "trainer.save_freq=2"]
    arguments = small_run(*slow_loop(tmp_path, data_dir, SLOW, tool), *more, "trainer.total_training_steps=5")

    def noted(file: str) -> list[list[object]]:
        return [json.loads(line) for line in (tmp_path / file).read_text().splitlines()]

    assert forked_command(arguments, tmp_path).returncode == -signal.SIGKILL
    in_flight = len(noted("begun.jsonl")) - len(noted("finished.jsonl"))
    resumed = forked_command(arguments, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    last = lines(tmp_path / "run")[-1]
    assert max(line.get("async/staleness_max", 0) for line in lines(tmp_path / "run")) <= 2
    ended = {str(uid): ids for uid, ids in noted("ended.jsonl")}
    turns, finished = 3 * 4 * 2 * 5, noted("finished.jsonl")
    assert len(ended) * 3 == turns
    if on_resume == "none":
        assert last["async/begun_anew"] > 0 and "tool slow keeps a state" in resumed.stdout
        return
    assert last["async/turns_resumed"] > 0 == last["async/begun_anew"]
    assert len(finished) == turns and len(noted("begun.jsonl")) == turns + in_flight
    for session, prompt, sampled in finished:
        assert isinstance(prompt, list) and isinstance(sampled, list)
        whole = ended[str(session).rsplit(".", 1)[0]]
        assert isinstance(whole, list) and whole[: len(prompt) + len(sampled)] == prompt + sampled
