"""Training on a Ray cluster of several machines, with nothing in common but the network and one folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from data_prep.files import write_parquet
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
EXPOSED = Path("/media")
"""Folder in which programs of the sandbox find the name of their machine."""
FAULT = SHARED / "fault"
"""What a loop writes when a tool has not answered."""
LOOP = f"""
from pathlib import Path

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.errors import InfrastructureError
from agentrl.trajectory import Status


class AskBothLoop(AgentLoop):
    \"""Shows the policy what a program and a search have said; how long its answer is counts beside the score.\"""

    async def run(self, episode: Episode) -> None:
        question = episode.sample.prompt[-1]["content"]
        program = f"print(open('{EXPOSED}/name').read(), {{len(question)}} * 1009)"
        try:
            ran = await episode.call("code_interpreter", {{"code": program}})
            found = await episode.call("search", {{"query": question}})
        except InfrastructureError:
            Path("{FAULT}").touch()
            raise
        await episode.start([{{"role": "user", "content": f"{{question}} {{ran.text}} {{found.text[:40]}}"}}])
        reply = await episode.generate()
        episode.add_turn_reward(len(reply.message.text) % 7 / 7)
        episode.finish(Status.COMPLETED if reply.stopped else Status.LENGTH)
"""
TESTS = {"kind": "stdio", "tests": [{"input": "", "output": "42"}]}


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


def serve(cluster: Cluster, name: str, *words: str) -> None:
    """Start a server on a machine, at its address."""
    address = cluster.network.addresses[name]
    serving = [sys.executable, "-m", *words, "--host", address]
    cluster.network.machines[name].popen(serving, ENVIRONMENT, stdout=cluster.said, stderr=subprocess.STDOUT)


def give_programs(cluster: Cluster, data_dir: Path) -> list[str]:
    """Give the first machine rows whose loop asks both servers of the third, a program and a search. Returns keys."""
    address = cluster.network.addresses[TWO]
    home = cluster.network.machines[HEAD].path(HOME)
    rows = pq.read_table(data_dir / "train.parquet").to_pylist()
    judged = {"data_source": "code/echo", "agent_name": "ask_both"}
    truth = {"reward_model": {"style": "rule", "ground_truth": json.dumps(TESTS)}}
    write_parquet(home / "train.parquet", [row | judged | truth for row in rows])
    (home / "ask_both.py").write_text(LOOP)
    (home / "loops.yaml").write_text("- name: ask_both\n  _target_: ask_both.py:AskBothLoop\n")
    (home / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: tools.remote_search.RemoteSearchTool\n"
        f"    config: {{url: http://{address}:8000, timeout: 8}}\n"
        "  - class_name: tools.code_interpreter.CodeInterpreterTool\n"
        f"    config: {{url: http://{address}:8080, timeout: 8, run_timeout: 5, session: true}}\n"
    )
    return [
        "custom_reward_function.path=null",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
        f"reward_model.sandbox_fusion.url=http://{address}:8080",
        "reward_model.sandbox_fusion.timeout=5",
        "reward_model.timeout=15",
    ]


def assert_the_servers_have_answered(trajectories: list[Trajectory]) -> None:
    """Each trajectory that counts was shown what the third machine said, and scored by it; the others have no score."""
    for one in trajectories:
        if one.status is Status.FAILED or one.score is None:
            assert (one.status, one.score) == (Status.FAILED, None)
            continue
        ran, found = one.tool_calls
        question = (found.arguments or {})["query"]
        assert isinstance(question, str)
        assert (ran.error, ran.response) == (None, f"{TWO} {len(question) * 1009}")
        assert found.error is None and found.response
        assert one.score in (0, 1) and one.score_extra["pass_fraction"] == one.score


def test_ranks_on_two_machines_and_tools_on_a_third(cluster: Cluster, keys: list[str], data_dir: Path) -> None:
    """A rank and a rollout worker on each of two machines, retriever and sandbox on a third.

    The third is cut off for a while: calls are faults. One of the two is cut off for good: the third takes its place.
    """
    cluster.give(TWO, **{"corpus.jsonl": data_dir / "corpus.jsonl"})
    third = cluster.network.machines[TWO]
    third.run([sys.executable, "-m", "tools.retriever", "index", "corpus.jsonl", "wiki"], ENVIRONMENT)
    third.run(["sh", "-c", f"mount -t tmpfs tmpfs {EXPOSED} && printf {TWO} > {EXPOSED}/name"])
    serve(cluster, TWO, "tools.retriever", "serve", "wiki", "--workers", "1")
    serve(cluster, TWO, "sandbox.server", "--expose", str(EXPOSED))
    keys += give_programs(cluster, data_dir)
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
    assert_the_servers_have_answered(trajectories)
    again = [one for one in trajectories if one.metrics["retries"]]
    assert again and any(one.status is not Status.FAILED for one in again)
