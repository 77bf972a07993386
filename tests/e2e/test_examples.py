"""The recipes of examples/: their tiny versions run whole, with real servers, and their configs are valid."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.conftest import PROJECT
from tests.e2e.test_docs import commands
from tests.e2e.test_train import lines

SMALL = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.val_max_samples=2")
STEPS = ("trainer.total_training_steps=2", "trainer.test_freq=2", "actor_rollout_ref.rollout.n=2")
EXAMPLES = {"search_r1": (8000, ()), "retool": (8080, ("critic.ppo_mini_batch_size=2",))}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder like the project's, in which an example may be changed and leave what it makes."""
    for part in ("agentrl", "configs", "data_prep", "sandbox", "tools"):
        (tmp_path / part).symlink_to(PROJECT / part)
    shutil.copytree(PROJECT / "examples", tmp_path / "examples")
    return tmp_path


def on_port(project: Path, example: str, usual: int) -> None:
    """Another port for its server: the usual one may be somebody's."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for file in (project / "examples" / example).glob("*.*"):
        if file.suffix in (".sh", ".yaml"):
            file.write_text(file.read_text().replace(str(usual), str(port)))


@pytest.mark.slice(1, "long run")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", EXAMPLES)
def test_the_tiny_version_runs_whole(example: str, project: Path) -> None:
    usual, overrides = EXAMPLES[example]
    on_port(project, example, usual)
    environment = {**os.environ, "CONVERSATIONS": "64", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = ["bash", f"examples/{example}/tiny.sh", *SMALL, *STEPS, *overrides]
    running = subprocess.Popen(
        script, cwd=project, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = running.communicate(timeout=240)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, said[-4000:]
    steps = lines(project / "runs" / f"{example.replace('_', '-')}-tiny")
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert ends(running.pid), "its server, or what that started, outlives it"


def test_a_taken_port_is_told_instead_of_using_what_listens_there(project: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for file in (project / "examples" / "retool").glob("tiny.sh"):
            script = file.read_text().replace("8080", str(taken.getsockname()[1]))
            file.write_text("\n".join(line for line in script.splitlines() if "examples.tiny" not in line))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        words = ["bash", "examples/retool/tiny.sh"]
        done = subprocess.run(
            words, cwd=project, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 1 and "is taken" in done.stderr


def ends(group: int) -> bool:
    """No process of the group is left, after a moment for those that have been told to end."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_full_recipe_is_a_valid_config(example: str) -> None:
    (training,) = (line for line in commands(f"examples/{example}/README.md") if "agentrl.train" in line)
    arguments = [word for word in training.split() if "rollout.name" not in word and "num_servers" not in word]
    done = subprocess.run(
        [sys.executable, *arguments[1:], "--cfg", "job"], cwd=PROJECT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"tool_config_path: examples/", done.stdout)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_command_of_the_readme_is_one_that_exists(example: str) -> None:
    for line in commands(f"examples/{example}/README.md"):
        words = line.split()
        if words[0] == "bash":
            assert (PROJECT / words[1]).exists()
        elif words[2] != "agentrl.train":
            done = subprocess.run(
                [sys.executable, "-m", words[2], "--help"], cwd=PROJECT, capture_output=True, text=True, timeout=60
            )
            options = [word for word in words if word.startswith("--")]
            assert done.returncode == 0 and all(option in done.stdout for option in options if "retriever" not in line)
