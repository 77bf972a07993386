"""Training on a Ray cluster of several machines, with nothing in common but the network and one folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import PROJECT
from tests.e2e.test_train import lines
from tests.machines import HOME, SHARED, Network, why_not

pytest.importorskip("ray")
pytestmark = [pytest.mark.slice(0, "cluster"), pytest.mark.timeout(1500)]
ENVIRONMENT = {
    "PYTHONPATH": str(PROJECT),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_worker_niceness": "0",
}
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--object-store-memory=80000000"]
HEAD, ONE, TWO = "head", "one", "two"
STEPS, B = 8, 4


class Cluster:
    """Ray on three machines, the first of which is that of the command and of the user's files."""

    def __init__(self, folder: Path) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.said = (folder / "said.txt").open("w+")
        self.network = Network([HEAD, ONE, TWO], self.shared)
        self.address = f"{self.network.addresses[HEAD]}:6379"

    def begin(self, cpus: int) -> None:
        """Start Ray's head, with so many CPUs."""
        place = ["--head", f"--node-ip-address={self.network.addresses[HEAD]}", "--port=6379"]
        self.network.machines[HEAD].run([*RAY, *place, f"--num-cpus={cpus}", "--include-dashboard=false"], ENVIRONMENT)

    def join(self, name: str, cpus: int) -> None:
        """Have a machine join it."""
        place = [f"--address={self.address}", f"--node-ip-address={self.network.addresses[name]}"]
        self.network.machines[name].run([*RAY, *place, f"--num-cpus={cpus}"], ENVIRONMENT)

    def give(self, name: str, **files: Path) -> None:
        """Copy files or folders into a machine's home, under other names."""
        for to, source in files.items():
            target = self.network.machines[name].path(HOME / to)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)

    def train(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command on the first machine."""
        words = [sys.executable, "-m", "agentrl.train", "ray_init.address=auto", *arguments]
        return self.network.machines[HEAD].popen(words, ENVIRONMENT, stdout=self.said, stderr=subprocess.STDOUT)

    def output(self) -> str:
        """Return what it has said."""
        return Path(self.said.name).read_text()

    def wait(self, run: subprocess.Popen[str], until: Callable[[], bool], seconds: float = 600) -> None:
        """Wait for something of a run that goes on."""
        end = time.monotonic() + seconds
        while not until():
            assert run.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Cluster(tmp_path)
    yield made
    made.network.close()


@pytest.fixture
def keys(small_run: Callable[..., list[str]], cluster: Cluster, policy_dir: Path) -> list[str]:
    """Overrides of a small run, whose relative paths are those of the first machine's home."""
    names = [
        "data.train_files=train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={HOME}/policy",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
        "custom_reward_function.path=reward.py",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        "trainer.save_freq=2",
    ]
    for name in (HEAD, ONE, TWO):
        cluster.give(name, policy=policy_dir)
    return [*small_run(run_dir=SHARED / "run"), *names]


def give_rows(cluster: Cluster, data_dir: Path, reward_file: Path) -> None:
    """Give the first machine what a user writes; the others have only what the search tool reads."""
    cluster.give(HEAD, **{"train.parquet": data_dir / "train.parquet", "tools.yaml": data_dir / "tools.yaml"})
    cluster.give(HEAD, **{"reward.py": reward_file})
    for name in (HEAD, ONE, TWO):
        cluster.give(name, **{"corpus.jsonl": data_dir / "corpus.jsonl"})


def assert_each_prompt_is_trained_once(run: Path, said: str) -> None:
    batches = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    prompts = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
    assert sorted(prompts) == list(range(B * STEPS))
    assert max(line.get("async/staleness_max", 0) for line in lines(run)) == 1
    assert f"{B * STEPS} prompts, each once: {B * STEPS} trained" in said


def test_a_rollout_workers_machine_vanishes_and_comes_back(
    cluster: Cluster, keys: list[str], policy_dir: Path, data_dir: Path, reward_file: Path
) -> None:
    """Two ranks on the first machine and a rollout worker on each of the others."""
    give_rows(cluster, data_dir, reward_file)
    cluster.begin(2)
    cluster.join(ONE, 1)
    cluster.join(TWO, 1)
    two_workers = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.nnodes=2"]
    run = cluster.train(*keys, *two_workers, "async_training.max_staleness=1", "trainer.max_worker_restarts=1")
    folder = cluster.shared / "run"
    cluster.wait(run, lambda: (folder / "checkpoints" / "step_000002").exists())
    cluster.network.machines[ONE].vanish()
    cluster.wait(run, lambda: "no machine of the cluster has room for rollout worker" in cluster.output())
    cluster.network.start(ONE)
    cluster.give(ONE, policy=policy_dir, **{"corpus.jsonl": data_dir / "corpus.jsonl"})
    cluster.join(ONE, 1)
    assert run.wait(600) == 0, cluster.output()
    assert "and its machine is gone; a new one takes its place" in cluster.output()
    assert_each_prompt_is_trained_once(folder, cluster.output())


def test_ranks_on_two_machines_and_tools_on_a_third(
    cluster: Cluster, keys: list[str], data_dir: Path, reward_file: Path
) -> None:
    """A rank and a rollout worker on each of two machines. One is cut off for good: the third takes its place."""
    give_rows(cluster, data_dir, reward_file)
    serving = [sys.executable, "-m", "tools.retriever", "serve", "wiki", "--workers", "1"]
    serving += ["--host", cluster.network.addresses[TWO]]
    indexing = [sys.executable, "-m", "tools.retriever", "index", "corpus.jsonl", "wiki"]
    cluster.network.machines[TWO].run(indexing, ENVIRONMENT)
    cluster.network.machines[TWO].popen(serving, ENVIRONMENT, stdout=subprocess.DEVNULL)
    tools = cluster.network.machines[HEAD].path(HOME / "tools.yaml")
    tools.write_text(
        "tools:\n  - class_name: tools.remote_search.RemoteSearchTool\n    config:\n"
        f"      url: http://{cluster.network.addresses[TWO]}:8000\n"
    )
    cluster.begin(1)
    cluster.join(ONE, 1)
    run = cluster.train(*keys, "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.max_worker_restarts=3")
    folder = cluster.shared / "run"
    cluster.wait(run, lambda: (folder / "checkpoints" / "step_000002").exists())
    cluster.network.cut(ONE)
    cluster.join(TWO, 1)
    assert run.wait(900) == 0, cluster.output()
    assert "new workers go on after step" in cluster.output()
    assert lines(folder)[-1]["step"] == STEPS
