"""docs/containers.md: its commands build an image and train, in real containers."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest
import yaml

from agentrl.config.sections.rollout import OpenAIProxyConfig
from tests.containers.conftest import LINE, Boxed, boxed, names, need_containers, root
from tests.e2e.test_docs import SMALL, blocks, commands, write_files
from tests.e2e.test_train import lines
from tests.forked import ForkedPython
from tests.runs import Overrides
from tests.waiting import wait_for
from tests.wheel import Run

__all__ = ["boxed", "root"]
PAGE = "docs/containers.md"
PROXY = "actor_rollout_ref.rollout.agent.openai_proxy"


def test_keys_of_the_page_are_keys() -> None:
    (text,) = blocks(PAGE, "yaml")
    given = yaml.safe_load(text)
    for name in PROXY.split("."):
        given = given[name]
    assert OpenAIProxyConfig.model_validate(given).container.images[1] == "localhost/coder"


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(900)
def test_the_page_trains_in_containers(run_wheel: Run, policy_dir: Path, tmp_path: Path, boxed: Boxed) -> None:
    """The image's base is a root without files, into which this machine's programs are mounted: none is downloaded."""
    need_containers()
    options = boxed()
    write_files(PAGE, tmp_path)
    (containerfile,) = blocks(PAGE, "dockerfile")
    base = f"localhost/agentrl-page-{tmp_path.name}"
    tree = subprocess.Popen(["tar", "-C", str(options.image), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run([*LINE, "import", "-", base], stdin=tree.stdout, check=True, capture_output=True)
    (tmp_path / "Containerfile").write_text(containerfile.replace("docker.io/library/python:3.12-slim", base))
    build, data, train = (shlex.split(line) for line in commands(PAGE))
    try:
        subprocess.run([*LINE, *build[1:]], cwd=tmp_path, check=True, capture_output=True)
        run_wheel(data[1:], tmp_path)
        more = [
            *SMALL,
            "data.max_prompt_length=3000",
            "data.train_batch_size=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "trainer.val_before_train=false",
            "trainer.test_freq=-1",
            "algorithm.filter_groups.enable=false",
            f"{PROXY}.container.command_line=[{','.join(LINE)}]",
            f"{PROXY}.container.arguments=[{','.join(options.arguments)}]",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ]
        run_wheel([*(word.replace("Qwen/Qwen3-4B", str(policy_dir)) for word in train[1:]), *more], tmp_path)
        words = [*LINE, "ps", "--all", "--quiet", "--filter", "ancestor=localhost/coder"]
        left = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    finally:
        subprocess.run([*LINE, "rmi", "--force", "localhost/coder", base], capture_output=True)
    metrics = lines(tmp_path / "run")[-1]
    assert metrics["left_out/failed"] == 0 and metrics["trajectory/openai_calls"] >= 1
    assert metrics["trajectory/containers"] == 2 and left == ""


ROW = {
    "prompt": [{"role": "user", "content": "2 + 3"}],
    "data_source": "agent/files",
    "agent_name": "openai_proxy",
    "reward_model": {"style": "rule", "ground_truth": ""},
}
WAITS = """
import json, os, time, urllib.request
body = json.dumps({"model": "policy", "messages": json.load(sys.stdin)["prompt"]}).encode()
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(address, body, {"content-type": "text/json"})).read()
"""


@pytest.mark.slice(0, "kill")
@pytest.mark.timeout(400)
def test_a_training_that_is_killed_leaves_its_containers_to_the_next_one(
    small_run: Overrides, tmp_path: Path, boxed: Boxed
) -> None:
    options = boxed()
    tmp_path.chmod(0o755)
    pq.write_table(pyarrow.Table.from_pylist([ROW] * 4), tmp_path / "rows.parquet")
    box = {"pool": 1, "memory_megabytes": 256, "image": options.image}
    lists = {"command_line": LINE, "arguments": options.arguments}
    keys = [f"{PROXY}.container.{name}={value}" for name, value in box.items()]
    keys += [f"{PROXY}.container.{name}=[{','.join(words)}]" for name, words in lists.items()]
    keys += [
        f"{PROXY}.start=container",
        f"{PROXY}.check=[ls]",
        "data.train_batch_size=2",
        "trainer.val_before_train=false",
    ]
    keys += [f"data.{kind}_files={tmp_path / 'rows.parquet'}" for kind in ("train", "val")]
    keys += ["trainer.total_training_steps=1", "trainer.test_freq=-1", "actor_rollout_ref.rollout.n=2"]
    keys += ["custom_reward_function.path=null", "actor_rollout_ref.rollout.multi_turn.tool_config_path=null"]

    def started(code: str) -> ForkedPython:
        (tmp_path / "agent.py").write_text("import sys\n" + code)
        place = f"{PROXY}.container.arguments=[{','.join([*options.arguments, '--volume', f'{tmp_path}:/opt:ro'])}]"
        return ForkedPython(
            ["-m", "agentrl.train", *small_run(*keys, place, f"{PROXY}.command=[python3,-S,/opt/agent.py]")], tmp_path
        )

    def of(run: ForkedPython) -> list[str]:
        return [name for name in names() if f"-{run.process.pid}-" in name]

    killed = started(WAITS + "time.sleep(600)")
    # Four sessions, and one container that is ready.
    wait_for(lambda: len(of(killed)) > 4 or not killed.process.is_alive(), 200)
    assert killed.process.is_alive(), killed.wait(1)
    assert killed.process.pid is not None
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.wait(30)
    run = started(WAITS)
    ended = run.wait(200)
    assert ended.returncode == 0, ended
    metrics = lines(tmp_path / "run")[-1]
    assert of(killed) == of(run) == []
    assert metrics["trajectory/containers"] == 2 and metrics["left_out/failed"] == 0
