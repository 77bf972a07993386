"""Training on a Ray cluster of several machines, with nothing in common but the network and one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.trajectory import Status
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from tests.cluster import (
    FAULT,
    SLOW,
    Cluster,
    assert_each_prompt_is_trained_once,
    assert_the_servers_have_answered,
    give_programs,
    paths_of_the_first_machine,
    serve_tools,
    steps_done,
    vanish_and_come_back,
)
from tests.e2e.test_train import lines
from tests.machines import SHARED, why_not

pytest.importorskip("ray")
pytestmark = [pytest.mark.slice(0, "cluster"), pytest.mark.timeout(1500)]
HEAD, ONE, TWO = "head", "one", "two"
STEPS, MANY, B = 8, 120, 4
REWARD = f"""
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if Path("{SLOW}").exists():
        time.sleep(0.7)
    return len(solution_str) % 7 / 7
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Cluster(tmp_path, [HEAD, ONE, TWO])
    yield made
    made.network.close()


@pytest.fixture
def keys(small_run: Callable[..., list[str]], cluster: Cluster, policy_dir: Path) -> list[str]:
    """Overrides of a small run, whose relative paths are those of the first machine's home."""
    for name in (HEAD, ONE, TWO):
        cluster.give(name, policy=policy_dir)
    more = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=2"]
    return [*small_run(run_dir=SHARED / "run"), *paths_of_the_first_machine(), *more]


def give_rows(cluster: Cluster, data_dir: Path, reward_file: Path) -> None:
    """Give the first machine what a user writes; the others have only what the search tool reads."""
    cluster.give(HEAD, **{"train.parquet": data_dir / "train.parquet", "tools.yaml": data_dir / "tools.yaml"})
    cluster.give(HEAD, **{"reward.py": reward_file})
    for name in (HEAD, ONE, TWO):
        cluster.give(name, **{"corpus.jsonl": data_dir / "corpus.jsonl"})


def test_a_rollout_workers_machine_vanishes_and_comes_back(
    cluster: Cluster, keys: list[str], policy_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    """Two ranks on the first machine and a rollout worker on each of the others, one of which goes on alone."""
    reward = tmp_path / "slow_reward.py"
    reward.write_text(REWARD)
    give_rows(cluster, data_dir, reward)
    (cluster.shared / SLOW.name).touch()
    cluster.begin(2)
    cluster.join(ONE, 1)
    cluster.join(TWO, 1)
    two_workers = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.nnodes=2"]
    long = [f"trainer.total_training_steps={MANY}", "trainer.save_freq=10", "trainer.max_worker_restarts=1"]
    run = cluster.train(*keys, *two_workers, *long, "async_training.max_staleness=1")
    folder = cluster.shared / "run"
    cluster.wait(run, lambda: steps_done(folder) >= 2)
    corpus = {"corpus.jsonl": data_dir / "corpus.jsonl"}
    first, last = vanish_and_come_back(cluster, run, ONE, policy=policy_dir, **corpus)
    assert run.wait(600) == 0, cluster.output()
    assert "and its machine is gone; a new one takes its place, and the others go on meanwhile" in cluster.output()
    assert_each_prompt_is_trained_once(folder, cluster.output(), B * MANY)
    files = {file.name for file in trajectory_files(folder / "trajectories")}
    assert {f"train_{step:06}.parquet" for step in range(first, last + 1)} <= files, "one worker wrote each"
    assert {f"train_{step:06}.{number}of2.parquet" for step in (1, MANY) for number in (1, 2)} <= files
    rows = [one for file in trajectory_files(folder / "trajectories") for one in read_trajectories(file)]
    assert len({one.uid for one in rows}) == len(rows) == MANY * B * 4


def test_ranks_on_two_machines_and_tools_on_a_third(cluster: Cluster, keys: list[str], data_dir: Path) -> None:
    """A rank and a rollout worker on each of two machines, retriever and sandbox on a third.

    The third is cut off for a while: calls are faults. One of the two is cut off for good: the third takes its place.
    """
    serve_tools(cluster, TWO, data_dir)
    keys += give_programs(cluster, TWO, data_dir)
    cluster.begin(1)
    cluster.join(ONE, 1)
    run = cluster.train(*keys, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.max_worker_restarts=3")
    folder, fault = cluster.shared / "run", cluster.shared / FAULT.name
    cluster.wait(run, lambda: (folder / "checkpoints" / "step_000002").exists())
    fault.unlink(missing_ok=True)  # of a machine that was only slow
    cluster.network.cut(TWO)
    cluster.wait(run, fault.exists)
    cluster.network.mend(TWO)
    cluster.wait(run, lambda: (folder / "checkpoints" / "step_000004").exists())
    cluster.network.cut(ONE)
    cluster.join(TWO, 1)
    assert run.wait(900) == 0, cluster.output()
    assert "new workers go on after step" in cluster.output()
    assert lines(folder)[-1]["step"] == STEPS
    trajectories = [one for file in trajectory_files(folder / "trajectories") for one in read_trajectories(file)]
    assert len(trajectories) == STEPS * B * 4
    assert_the_servers_have_answered(trajectories, TWO)
    again = [one for one in trajectories if one.metrics["retries"]]
    assert again and any(one.status is not Status.FAILED for one in again)
