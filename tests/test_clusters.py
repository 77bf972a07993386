"""Scripts for clusters and container files: their logic with fakes of Slurm's, Ray's and Python's commands.

None of the real commands is there. The fakes write down what they are called with, and answer as the page says.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from agentrl.config import Config, load_config
from agentrl.system.json_value import JSON
from tests.conftest import PROJECT
from tests.naming import assert_names

CLUSTERS = PROJECT / "examples" / "clusters"


class Fakes:
    """A folder of fake programs, first on PATH, and the lines that they wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        folder.mkdir()
        self.add("sleep", "true")

    def add(self, name: str, body: str) -> None:
        """Add a program that writes its words down before it runs `body`."""
        program = self.folder / name
        program.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.log}\n{body}\n', encoding="utf-8")
        program.chmod(0o755)

    def run(self, script: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *words], env=self.environment(environment), capture_output=True, text=True, timeout=60
        )

    def environment(self, more: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", **more}

    def lines(self, *programs: str) -> list[str]:
        said = self.log.read_text(encoding="utf-8").splitlines()
        return [line for line in said if line.split()[0] in programs]


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    return Fakes(tmp_path / "fakes")


def joined_after(fakes: Fakes, calls: int, nodes: int, train: str = "true") -> None:
    """A fake python: one machine is alive in its first `calls` answers, then all are."""
    count = fakes.folder / "count"
    counting = f"echo x >> {count}; if (($(wc -l < {count}) > {calls})); then echo {nodes}; else echo 1; fi"
    fakes.add("python", f"if [[ $1 == -c ]]; then {counting}; else {train}; fi")


def test_one_machine_needs_no_ray(fakes: Fakes) -> None:
    fakes.add("python", "exit 7")
    fakes.add("ray", "exit 1")
    done = fakes.run(CLUSTERS / "start.sh", "a.b=c d", RANK="0", NODES="1", HEAD="10.0.0.1", GPUS="1")
    assert done.returncode == 7, "the run's own status"
    assert fakes.lines("python", "ray") == ["python -m agentrl.train trainer.n_gpus_per_node=1 a.b=c d"]


def test_the_head_waits_for_all_machines_and_trains(fakes: Fakes) -> None:
    joined_after(fakes, 2, 3, train="exit 5")
    fakes.add("ray", "true")
    done = fakes.run(CLUSTERS / "start.sh", "a=b", RANK="0", NODES="3", HEAD="10.0.0.1", GPUS="8")
    assert done.returncode == 5, done.stderr
    assert fakes.lines("ray") == [
        "ray start --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=8",
        "ray stop",
    ]
    assert len(fakes.lines("sleep")) == 2
    train = "python -m agentrl.train ray_init.address=auto trainer.nnodes=3 trainer.n_gpus_per_node=8 a=b"
    assert fakes.lines("python")[-1] == train


def test_a_worker_tries_until_the_head_listens(fakes: Fakes) -> None:
    count = fakes.folder / "count"
    fakes.add("ray", f"echo x >> {count}; (($(wc -l < {count}) == 3))")
    fakes.add("python", "exit 1")
    done = fakes.run(CLUSTERS / "start.sh", RANK="1", NODES="2", HEAD="10.0.0.1", GPUS="4", PORT="7000")
    assert done.returncode == 0, done.stderr
    assert fakes.lines("ray", "python") == ["ray start --address=10.0.0.1:7000 --num-gpus=4 --block"] * 3


@pytest.mark.parametrize(
    ("rank", "message"),
    [("0", "1 of 2 machines joined in 0 s"), ("1", "machine 1: no Ray at 10.0.0.1:6379 after 0 s")],
)
def test_patience_ends_in_words(fakes: Fakes, rank: str, message: str) -> None:
    joined_after(fakes, 99, 2)
    fakes.add("ray", "[[ $2 == --head || $1 == stop ]]")
    done = fakes.run(CLUSTERS / "start.sh", RANK=rank, NODES="2", HEAD="10.0.0.1", GPUS="1", PATIENCE="0")
    assert (done.returncode, done.stderr.strip()) == (1, message)


def test_a_missing_word_and_a_missing_environment_end_at_once_in_words(fakes: Fakes) -> None:
    given = {"RANK": "1", "NODES": "2", "HEAD": "10.0.0.1"}
    done = fakes.run(CLUSTERS / "start.sh", **given)
    assert_names(done.stderr, "GPUS", "GPUs")
    assert done.returncode != 0
    done = subprocess.run(
        ["/bin/bash", str(CLUSTERS / "start.sh")],
        env={**given, "GPUS": "1", "PATH": str(fakes.folder)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (1, "no ray on PATH: activate the environment of agentrl\n")


def test_a_batch_script_without_its_start_script_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(CLUSTERS / "slurm.sbatch")], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert_names(done.stderr, "START")
    assert done.returncode == 1


def test_a_signal_reaches_the_run_which_saves(fakes: Fakes) -> None:
    there = fakes.folder / "training"
    training = f"trap 'echo saved >> {fakes.log}; exit 143' TERM; touch {there}; while true; do /bin/sleep 0.05; done"
    joined_after(fakes, 0, 2, train=training)
    fakes.add("ray", "true")
    words = {"RANK": "0", "NODES": "2", "HEAD": "10.0.0.1", "GPUS": "1"}
    process = subprocess.Popen(["bash", str(CLUSTERS / "start.sh")], env=fakes.environment(words))
    try:
        while not there.exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
    assert fakes.lines("saved", "ray")[-2:] == ["saved", "ray stop"]


@pytest.mark.parametrize("nodes", [1, 3])
def test_slurm_starts_each_machine_once_with_the_heads_address(fakes: Fakes, tmp_path: Path, nodes: int) -> None:
    hosts = " ".join(f"gpu{number}" for number in range(nodes))
    fakes.add("scontrol", f'[[ "$*" == "show hostnames gpu-list" ]] && printf "%s\\n" {hosts}')
    fakes.add("hostname", 'echo "10.0.0.1 172.17.0.1 "')
    drop = "while [[ $1 == --* ]]; do shift; done; for id in $(seq 0 $((SLURM_JOB_NUM_NODES - 2)))"
    fakes.add("srun", f'{drop}; do SLURM_PROCID=$id "$@"; done')
    start = tmp_path / "start"
    start.write_text(
        f'echo "machine $RANK of $NODES, $GPUS GPUs, head $HEAD: $# $2" >> {fakes.log}\n', encoding="utf-8"
    )
    fixed = {"SLURM_JOB_NODELIST": "gpu-list", "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_GPUS_ON_NODE": "8"}
    subprocess.run(
        ["bash", "-c", f"bash {CLUSTERS}/slurm.sbatch a=b 'c=d e'; wait"],
        env=fakes.environment({**fixed, "START": str(start)}),
        cwd=tmp_path,
        check=True,
    )
    expected = sorted(f"machine {rank} of {nodes}, 8 GPUs, head 10.0.0.1: 2 c=d e" for rank in range(nodes))
    while len(found := fakes.lines("machine")) < nodes:  # the other machines' are started in the background
        time.sleep(0.02)
    assert sorted(found) == expected
    others = [f"srun --nodes={nodes - 1} --ntasks={nodes - 1} --exclude=gpu0"] if nodes > 1 else []
    assert [line.split(" bash")[0] for line in fakes.lines("srun")] == others


def test_skypilots_task_starts_the_same_script(fakes: Fakes, tmp_path: Path) -> None:
    task = read(CLUSTERS / "skypilot.yaml")
    assert task["num_nodes"] == 1
    fakes.add("python", "true")
    script = tmp_path / "run.sh"
    script.write_text(str(task["run"]).replace("source ~/agentrl-env/bin/activate\n", ""), encoding="utf-8")
    variables = {"NODE_RANK": "0", "NUM_NODES": "1", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.7\n10.0.0.8"}
    environment = fakes.environment({f"SKYPILOT_{name}": value for name, value in variables.items()})
    subprocess.run(["bash", str(script)], env=environment, cwd=PROJECT, check=True)
    (line,) = fakes.lines("python")
    assert line.startswith("python -m agentrl.train trainer.n_gpus_per_node=8 actor_rollout_ref.rollout.name=sglang ")
    assert_keys(line.split()[3:])


def test_kuberays_job_asks_for_the_machines_that_its_run_uses() -> None:
    job = read(CLUSTERS / "kuberay.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = mapping(job["spec"])
    program, *words = shlex.split(str(spec["entrypoint"]))
    assert (program, words[:2]) == ("python", ["-m", "agentrl.train"])
    given = dict(word.split("=", 1) for word in words[2:])
    cluster = mapping(spec["rayClusterSpec"])
    groups = cluster["workerGroupSpecs"]
    assert isinstance(groups, list)
    (group,) = map(mapping, groups)
    assert str(group["replicas"]) == given["trainer.nnodes"]
    (worker,), (head,) = containers(group), containers(mapping(cluster["headGroupSpec"]))
    limits = mapping(mapping(worker["resources"])["limits"])
    assert limits["nvidia.com/gpu"] == given["trainer.n_gpus_per_node"]
    assert worker["image"] == head["image"] and worker["volumeMounts"] == head["volumeMounts"]
    assert given["trainer.default_local_dir"].startswith("/runs/"), "the folder that all machines share"
    assert_keys(words[2:])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_container_files_are_clean(name: str) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (the extra `dev` has it)")
    done = subprocess.run([hadolint, str(CLUSTERS / f"{name}.Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_container_files_name_extras_and_files_that_are_there(name: str) -> None:
    text = (CLUSTERS / f"{name}.Dockerfile").read_text(encoding="utf-8")
    (extras,) = [line.split("[")[1].split("]")[0] for line in text.splitlines() if "'.[" in line]
    assert set(extras.split(",")) <= set(declared_extras())
    for word in text.split():
        if word.startswith("constraints/"):
            assert (PROJECT / word).is_file()


def test_the_table_of_versions_names_what_tests_run_on() -> None:
    rows = re.findall(r"^\| (\S+) \| ([\d.]+) \|", (PROJECT / "docs" / "clusters.md").read_text(encoding="utf-8"), re.M)
    pinned = "".join((PROJECT / "constraints" / f"{name}.txt").read_text() for name in ("cpu", "sglang-cpu"))
    versions = dict(rows)
    for name, version in re.findall(r"^(torch|transformers|sglang)==([\d.]+)$", pinned, re.M):
        assert versions[{"sglang": "SGLang"}.get(name, name)] == version


def declared_extras() -> dict[str, list[str]]:
    """Read the extras of pyproject.toml."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def assert_keys(words: list[str]) -> None:
    """Check that words are keys of a training. SGLang need not be installed for that."""
    other = [word for word in words if word != "actor_rollout_ref.rollout.name=sglang"]
    load_config([*other, "trainer.device=cpu"], "train", Config)


def read(file: Path) -> dict[str, JSON]:
    found: dict[str, JSON] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return found


def mapping(value: JSON) -> dict[str, JSON]:
    assert isinstance(value, dict)
    return value


def containers(group: dict[str, JSON]) -> list[dict[str, JSON]]:
    spec = mapping(mapping(group["template"])["spec"])
    found = spec["containers"]
    assert isinstance(found, list)
    return [mapping(one) for one in found]


@pytest.mark.parametrize("name", ["start.sh", "slurm.sbatch"])
def test_the_page_has_the_scripts_for_an_installed_wheel(name: str) -> None:
    page = (PROJECT / "docs" / "clusters.md").read_text(encoding="utf-8")
    assert f"`{name}`:\n\n```text\n{(CLUSTERS / name).read_text(encoding='utf-8')}```\n" in page
