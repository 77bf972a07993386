"""Asynchronous training under real Ray: rollout workers sample while two ranks update, through kills of any of them."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import forked_command
from tests.e2e.kills import ends_at
from tests.e2e.test_ray import actors_of, start, wait_for
from tests.e2e.test_resume import SLOW, THIRDS, slow_loop
from tests.e2e.test_train import lines
from tests.forked import forked
from tests.runs import Overrides

pytest.importorskip("ray")
pytestmark = pytest.mark.slice(1, "kill")
STEPS, B = 6, 4
FREED = '''
"""A training for whose updates the engine's memory is freed, which the command refuses on a CPU."""

import sys

from agentrl.config import load_config
from agentrl.train import train

if __name__ == "__main__":
    config = load_config(sys.argv[1:])
    rollout = config.actor_rollout_ref.rollout.model_copy(update={"free_cache_engine": True})
    roles = config.actor_rollout_ref.model_copy(update={"rollout": rollout})
    train(config.model_copy(update={"actor_rollout_ref": roles}))
'''


@pytest.fixture
def apart(small_run: Overrides, tmp_path: Path) -> Overrides:
    """Two ranks, and two rollout workers with an embedded engine each, with devices of their own."""

    def overrides(*more: str) -> list[str]:
        return small_run(
            "trainer.device=cpu",
            "trainer.n_gpus_per_node=2",
            "actor_rollout_ref.rollout.nnodes=2",
            "async_training.max_staleness=1",
            "trainer.save_freq=2",
            "trainer.test_freq=2",
            f"trainer.total_training_steps={STEPS}",
            *more,
        )

    return overrides


def trained(run: Path) -> list[list[int]]:
    """Prompts of each step, by the ledger."""
    batches = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [batch["step"] for batch in batches] == list(range(1, len(batches) + 1))
    return [[one for first, end in batch["trained"] for one in range(first, end)] for batch in batches]


@pytest.mark.slice(0, "kill")  # in the slice: ranks and workers killed without a run, runtime/test_ray.py
@pytest.mark.timeout(600)
def test_each_prompt_is_trained_once_though_a_worker_and_a_rank_are_killed(apart: Overrides, tmp_path: Path) -> None:
    process = start(apart("trainer.max_worker_restarts=3"), tmp_path)
    run = tmp_path / "run"
    try:
        for step, kind in ((2, "RolloutWorker"), (4, "Rank")):
            wait_for(process, run / "checkpoints" / f"step_{step:06d}")
            assert process.poll() is None, process.communicate()
            found = actors_of(process, kind)
            assert len(found) == 2
            found[1].kill()
        said, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert "a new one takes its place, and the others go on meanwhile" in said, said
    assert "new workers go on after step 4" in said, said
    assert sorted(one for batch in trained(run) for one in batch) == list(range(B * STEPS))
    assert max(line.get("async/staleness_max", 0) for line in lines(run)) == 1
    idle = [line["async/engine_idle"] for line in lines(run) if "async/engine_idle" in line]
    assert idle and 0 < max(idle) <= 1
    assert f"{B * STEPS} prompts, each once: {B * STEPS} trained" in said


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(600)
def test_training_waits_where_no_rollout_worker_is_left(apart: Overrides, tmp_path: Path) -> None:
    process, run = start(apart("trainer.max_worker_restarts=2"), tmp_path), tmp_path / "run"
    try:
        wait_for(process, run / "checkpoints" / "step_000002")
        for worker in actors_of(process, "RolloutWorker"):
            worker.kill()
        said, _ = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert said.count("a new one takes its place") == 2 and "has started, and takes part from now on" in said, said
    assert f"{B * STEPS} prompts, each once: {B * STEPS} trained" in said
    assert [line["step"] for line in lines(run) if "train/sequences" in line] == list(range(1, STEPS + 1))


@pytest.mark.timeout(600)
def test_engines_that_share_the_ranks_devices_are_held_and_groups_replaced(apart: Overrides, tmp_path: Path) -> None:
    """One rollout worker beside two ranks, and dynamic sampling."""
    more = ["actor_rollout_ref.rollout.nnodes=0", "algorithm.filter_groups.refill=true", "data.val_files=null"]
    more += ["algorithm.filter_groups.max_num_gen_batches=40", "trainer.total_training_steps=4"]
    keys = [one for one in apart(*more) if "filter_groups.enable" not in one and "test_freq" not in one]
    (tmp_path / "thirds.py").write_text(THIRDS)
    done = forked_command([*keys, f"custom_reward_function.path={tmp_path}/thirds.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [len(batch) for batch in trained(tmp_path / "run")] == [B] * 4
    logged = lines(tmp_path / "run")
    assert max(line.get("async/staleness_max", 0) for line in logged) <= 1
    assert sum(line["refill/groups_equal"] for line in logged if "refill/groups_equal" in line) > 0
    assert all(line["group/groups_equal"] == 0 for line in logged if "group/groups_equal" in line)
    assert "prompts, each once: 16 trained, " in done.stdout and " filtered" in done.stdout


@pytest.mark.timeout(600)
def test_engines_whose_memory_is_freed_keep_trajectories_over_updates(apart: Overrides, tmp_path: Path) -> None:
    (tmp_path / "freed.py").write_text(FREED)
    keys = apart("actor_rollout_ref.rollout.nnodes=0", "trainer.total_training_steps=4")
    done = forked([tmp_path / "freed.py", *keys], tmp_path)
    assert done.returncode == 0, done.stderr
    assert [len(batch) for batch in trained(tmp_path / "run")] == [B] * 4
    logged = lines(tmp_path / "run")
    assert max(line.get("async/staleness_max", 0) for line in logged) == 1
    assert f"{B * 4} prompts, each once: {B * 4} trained" in done.stdout


@pytest.mark.timeout(600)
def test_a_killed_run_takes_the_recorded_batches_again(apart: Overrides, tmp_path: Path) -> None:
    """SIGKILL of the driver when the fifth batch is taken; the checkpoint is of step 3."""
    ledger = tmp_path / "run" / "ledger.jsonl"
    killed = forked_command([*apart("trainer.save_freq=3"), ends_at(tmp_path, 5, "on_rollout")], tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    before = ledger.read_text().splitlines()
    assert len(before) == 5 < STEPS
    resumed = forked_command(apart("trainer.save_freq=3"), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"steps 4 to {len(before)} were begun before: their batches are taken again" in resumed.stdout
    assert "came from the journal" in resumed.stdout
    assert ledger.read_text().splitlines()[: len(before)] == before
    assert sorted(one for batch in trained(tmp_path / "run") for one in batch) == list(range(B * STEPS))
    assert max(line.get("async/staleness_max", 0) for line in lines(tmp_path / "run")) == 1


@pytest.mark.timeout(600)
def test_a_run_killed_before_its_first_checkpoint_begins_anew(apart: Overrides, tmp_path: Path) -> None:
    arguments = [
        one for one in apart("trainer.total_training_steps=2", "data.val_files=null") if "test_freq" not in one
    ]
    killed = forked_command([*arguments, ends_at(tmp_path, 1, "on_rollout")], tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len((tmp_path / "run" / "ledger.jsonl").read_bytes().splitlines()) == 1
    again = start(arguments, tmp_path)
    try:
        said, _ = again.communicate(timeout=400)
    finally:
        again.kill()
    assert again.returncode == 0, said
    assert "prompts that a run before had begun are left behind: it has saved no checkpoint" in said
    assert sorted(one for batch in trained(tmp_path / "run") for one in batch) == list(range(B * 2))
    assert f"{B * 2} prompts, each once: {B * 2} trained" in said


IMPATIENT = """
import sys
import agentrl.rollouts.ray_groups
import agentrl.rollouts.ray_workers
from agentrl.train import main

for module in (agentrl.rollouts.ray_workers, agentrl.rollouts.ray_groups):
    module.SILENT_TOLD, module.SILENT_FOR = 2.0, 8.0
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bound", [0, 1])
def test_a_worker_that_stands_still_counts_as_dead_in_the_end(apart: Overrides, tmp_path: Path, bound: int) -> None:
    """SIGSTOP, where a worker has 8 s to answer."""
    more = ["trainer.max_worker_restarts=3", "trainer.save_freq=1", f"async_training.max_staleness={bound}"]
    process, run = start(apart(*more), tmp_path, IMPATIENT), tmp_path / "run"
    try:
        wait_for(process, run / "checkpoints" / "step_000001")
        assert process.poll() is None, process.communicate()
        stopped = actors_of(process, "RolloutWorker")[1]
        stopped.suspend()
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert re.search(r"rollout worker \d has not answered for \d+ s: it is stopped, unreachable, or in native", said), (
        said
    )
    assert "a new one takes its place" in said and not stopped.is_running()
    logged = lines(run)
    assert [line["step"] for line in logged if "train/sequences" in line] == list(range(1, STEPS + 1))
    if bound:
        assert f"{B * STEPS} prompts, each once: {B * STEPS} trained" in said


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(600)
def test_trajectories_of_a_killed_worker_go_on_behind_what_they_were_answered(
    apart: Overrides, data_dir: Path, tmp_path: Path
) -> None:
    """Of its finished turns only those may be sampled again that it had not told the driver of when it died."""
    more = slow_loop(tmp_path, data_dir, SLOW)
    more += ["trainer.total_training_steps=5", "trainer.max_worker_restarts=3"]
    done = forked_command([one for one in apart(*more) if "test_freq" not in one], tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists() and "a new one takes its place" in done.stdout
    finished = [json.loads(line) for line in (tmp_path / "finished.jsonl").read_text().splitlines()]
    turns = len({(session, tuple(prompt)) for session, prompt, _ in finished})
    assert turns == 3 * 2 * B * 5 and len(finished) <= turns + 4, "one a trajectory that ran there"
    assert f"{B * 5} prompts, each once: {B * 5} trained" in done.stdout
