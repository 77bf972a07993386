"""Rollout workers with SGLang servers on machines of their own; trainer, and retriever and sandbox, on others."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from tests.cluster import (
    SLOW,
    Cluster,
    assert_each_prompt_is_trained_once,
    assert_the_servers_have_answered,
    give_programs,
    paths_of_the_first_machine,
    serve_tools,
    vanish_and_come_back,
)
from tests.machines import SHARED, why_not
from tests.sglang.test_training import ROLLOUT, policy_of
from tests.sglang.test_under_ray import versions_that_sampled
from tests.waiting import wait_for

pytest.importorskip("ray")
pytestmark = [pytest.mark.slice(0, "cluster"), pytest.mark.timeout(1800)]
HEAD, ONE, TWO, TOOLS = "head", "one", "two", "tools"
STEPS, B, N = 30, 4, 4


@pytest.fixture
def cluster(policy_dir: Path, data_dir: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Ray with two ranks' room on the first machine and a rollout worker's on each of two; tools on the fourth."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Cluster(tmp_path, [HEAD, ONE, TWO, TOOLS])
    try:
        serve_tools(made, TOOLS, data_dir)
        for name in (HEAD, ONE, TWO):
            made.give(name, policy=policy_dir)
        made.begin(2)
        made.join(ONE, 1)
        made.join(TWO, 1)
        yield made
    finally:
        made.network.close()


def has_server(cluster: Cluster, name: str) -> bool:
    """Say whether a server of agentrl's runs on a machine, which sees only processes of its own."""
    looked = cluster.network.machines[name].popen(
        ["pgrep", "-f", "agentrl.engines.sglang.launch"], stdout=subprocess.DEVNULL
    )
    return looked.wait(60) == 0


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_a_machine_with_a_server_vanishes_and_comes_back(
    cluster: Cluster,
    small_run: Callable[..., list[str]],
    policy_dir: Path,
    data_dir: Path,
    transport: str,
) -> None:
    """Its link is cut, then its processes are killed: the other one trains on; it begins anew with an empty disk."""
    (cluster.shared / SLOW.name).touch()
    keys = [
        *small_run(run_dir=SHARED / "run"),
        *paths_of_the_first_machine(),
        *give_programs(cluster, TOOLS, data_dir),
        "trainer.n_gpus_per_node=2",
        f"{ROLLOUT}.name=sglang",
        f"{ROLLOUT}.nnodes=2",
        f"{ROLLOUT}.max_num_seqs=16",
        f"{ROLLOUT}.update_weights_transport={transport}",
        f"{ROLLOUT}.update_weights_checksum=true",
        "async_training.max_staleness=1",
        "actor_rollout_ref.actor.optim.lr=5e-3",
        f"trainer.total_training_steps={STEPS}",
        "trainer.max_actor_ckpt_to_keep=null",
        "trainer.max_worker_restarts=1",
    ]
    run = cluster.train(*keys)
    folder = cluster.shared / "run"
    cluster.wait(run, lambda: (folder / "checkpoints" / "step_000002").exists())
    assert [name for name in cluster.network.machines if has_server(cluster, name)] == [ONE, TWO]
    cluster.network.cut(ONE)
    cluster.wait(run, lambda: "and its machine is gone; a new one takes its place" in cluster.output())
    first, last = vanish_and_come_back(cluster, run, ONE, policy=policy_dir)
    assert run.wait(900) == 0, cluster.output()
    wait_for(lambda: not any(has_server(cluster, name) for name in (ONE, TWO)))
    assert_each_prompt_is_trained_once(folder, cluster.output(), B * STEPS)
    files = trajectory_files(folder / "trajectories")
    steps = [
        [one for file in files if f"_{step:06}." in file.name for one in read_trajectories(file)]
        for step in range(1, STEPS + 1)
    ]
    rows = [one for step in steps for one in step]
    assert len({one.uid for one in rows}) == len(rows) == STEPS * B * N
    assert_the_servers_have_answered(rows, TOOLS)
    for some, names in ((steps[:2], (ONE, TWO)), (steps[first:last], (TWO,)), (steps[-2:], (ONE, TWO))):
        ran_on = {name for step in some for one in step for name in one.metrics if name.startswith("on_")}
        assert ran_on == {f"on_{name}" for name in names}, "also the machine that came back samples"
    for number, step in enumerate(steps, 1):
        spans = [span for one in step for transcript in one.transcripts for span in transcript.versions]
        assert number - 2 <= min(span.version for span in spans) <= max(span.version for span in spans) <= number - 1
    checkpoints = folder / "checkpoints"
    policies = [policy_of(policy_dir)]
    policies += [policy_of(policy_dir, checkpoints / f"step_{step:06}" / "policy") for step in range(1, STEPS)]
    versions_that_sampled([one for one in rows if one.score is not None], policies)
    logs = [(folder / f"worker_{number}of2" / "servers" / "0.log").read_text() for number in (1, 2)]
    assert all(("init custom process group" in log) == (transport == "distributed") for log in logs)
    assert list(folder.glob("worker_*/weights/*")) == []
