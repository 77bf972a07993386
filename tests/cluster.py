"""Training on a Ray cluster of machines that have nothing in common but the network and one folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from agentrl.trajectory import Status, Trajectory
from data_prep.files import write_parquet
from tests.machines import HOME, PROJECT, SHARED, Network

ENVIRONMENT = {
    "PYTHONPATH": str(PROJECT),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_worker_niceness": "0",
}
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--object-store-memory=80000000"]
EXPOSED = Path("/media")
"""Folder in which programs of the sandbox find the name of their machine."""
FAULT = SHARED / "fault"
"""What a loop writes when a tool has not answered."""
SLOW = SHARED / "slow"
"""While it is there, trajectories take longer, by the seconds in it or 5: a machine has time to come back."""
LOOP = f"""
import asyncio
import socket
from pathlib import Path

from agentrl.agent_loop import AgentLoop, Episode
from agentrl.errors import InfrastructureError
from agentrl.trajectory import Status


def slowness():
    try:
        return int(Path("{SLOW}").read_text() or 5)
    except FileNotFoundError:
        return 0


class AskBothLoop(AgentLoop):
    \"""Shows the policy what a program and a search have said; how long its answer is counts beside the score.\"""

    async def run(self, episode: Episode) -> None:
        episode.trajectory.metrics[f"on_{{socket.gethostname()}}"] = 1.0
        question = episode.sample.prompt[-1]["content"]
        waited = 0.0
        while waited < slowness():
            await asyncio.sleep(0.1)
            waited += 0.1
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
    """Machines, the first of which is that of the command and of the user's files, and Ray on those that join."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.said = (folder / "said.txt").open("w+")
        self.network = Network(names, self.shared)
        self.head = names[0]
        self.address = f"{self.network.addresses[self.head]}:6379"

    def begin(self, cpus: int) -> None:
        """Start Ray's head, with so many CPUs."""
        place = ["--head", f"--node-ip-address={self.network.addresses[self.head]}", "--port=6379"]
        words = [*RAY, *place, f"--num-cpus={cpus}", "--include-dashboard=false"]
        self.network.machines[self.head].run(words, ENVIRONMENT)

    def join(self, name: str, cpus: int) -> None:
        """Have a machine join it."""
        place = [f"--address={self.address}", f"--node-ip-address={self.network.addresses[name]}"]
        self.network.machines[name].run([*RAY, *place, f"--num-cpus={cpus}"], ENVIRONMENT)

    def give(self, name: str, **files: Path) -> None:
        """Copy files or folders into a machine's home, under other names."""
        for to, source in files.items():
            target = self.network.machines[name].path(HOME / to)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)

    def serve(self, name: str, *words: str) -> None:
        """Start a server on a machine, at its address."""
        address = self.network.addresses[name]
        serving = [sys.executable, "-m", *words, "--host", address]
        self.network.machines[name].popen(serving, ENVIRONMENT, stdout=self.said, stderr=subprocess.STDOUT)

    def train(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command on the first machine."""
        words = [sys.executable, "-m", "agentrl.train", "ray_init.address=auto", *arguments]
        return self.network.machines[self.head].popen(words, ENVIRONMENT, stdout=self.said, stderr=subprocess.STDOUT)

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


def serve_tools(cluster: Cluster, name: str, data_dir: Path) -> None:
    """Start the retriever and the sandbox on a machine."""
    cluster.give(name, **{"corpus.jsonl": data_dir / "corpus.jsonl"})
    machine = cluster.network.machines[name]
    machine.run([sys.executable, "-m", "tools.retriever", "index", "corpus.jsonl", "wiki"], ENVIRONMENT)
    machine.run(["sh", "-c", f"mount -t tmpfs tmpfs {EXPOSED} && printf {name} > {EXPOSED}/name"])
    cluster.serve(name, "tools.retriever", "serve", "wiki", "--workers", "1")
    cluster.serve(name, "sandbox.server", "--expose", str(EXPOSED))


def give_programs(cluster: Cluster, name: str, data_dir: Path) -> list[str]:
    """Give the first machine rows whose loop asks both servers of `name`, a program and a search. Returns keys."""
    address = cluster.network.addresses[name]
    home = cluster.network.machines[cluster.head].path(HOME)
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


def paths_of_the_first_machine() -> list[str]:
    """Return overrides of a small run, whose relative paths are those of the first machine's home."""
    return [
        "data.train_files=train.parquet",
        "data.val_files=null",
        f"actor_rollout_ref.model.path={HOME}/policy",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
        "custom_reward_function.path=reward.py",
        "trainer.device=cpu",
    ]


def steps_done(run: Path) -> int:
    """Count the steps that a run has logged."""
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def vanish_and_come_back(cluster: Cluster, run: subprocess.Popen[str], name: str, **files: Path) -> tuple[int, int]:
    """Have a rollout worker's machine vanish, the others train on, and the machine come back with an empty disk.

    Returns the steps at which it was missing: the first, and the last.
    """
    folder, machine = cluster.shared / "run", cluster.network.machines[name]
    machine.vanish()
    cluster.wait(run, lambda: "no machine of the cluster has room for rollout worker" in cluster.output())
    first = steps_done(folder) + 2  # after what was under way
    cluster.wait(run, lambda: steps_done(folder) >= first + 2)
    last = steps_done(folder)
    (cluster.shared / SLOW.name).write_text("60")  # its server takes a minute and more to start
    cluster.network.start(name)
    cluster.give(name, **files)
    cluster.join(name, 1)
    cluster.wait(run, lambda: "has started, and takes part from now on" in cluster.output())
    (cluster.shared / SLOW.name).unlink()
    return first, last


def assert_each_prompt_is_trained_once(run: Path, said: str, prompts: int) -> None:
    batches = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    trained = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
    assert sorted(trained) == list(range(prompts))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("async/staleness_max", 0) for line in metrics) == 1
    assert f"{prompts} prompts, each once: {prompts} trained" in said


def assert_the_servers_have_answered(trajectories: list[Trajectory], name: str) -> None:
    """Each trajectory that counts was shown what machine `name` said, and scored by it; the others have no score."""
    for one in trajectories:
        if one.status is Status.FAILED or one.score is None:
            assert (one.status, one.score) == (Status.FAILED, None)
            continue
        ran, found = one.tool_calls
        question = (found.arguments or {})["query"]
        assert isinstance(question, str)
        assert (ran.error, ran.response) == (None, f"{name} {len(question) * 1009}")
        assert found.error is None and found.response
        assert one.score in (0, 1) and one.score_extra["pass_fraction"] == one.score
