"""docs/containers.md: its commands build an image and train, in real containers."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from agentrl.config.sections.rollout import OpenAIProxyConfig
from tests.containers.conftest import LINE, Boxed, boxed, need_containers, root
from tests.e2e.test_docs import SMALL, blocks, commands, write_files
from tests.e2e.test_train import lines
from tests.wheel import Run
from tools.container_shell import ContainerShell

__all__ = ["boxed", "root"]
PAGE = "docs/containers.md"
PROXY = "actor_rollout_ref.rollout.agent.openai_proxy"


def test_keys_of_the_page_are_keys() -> None:
    images, tools = map(yaml.safe_load, blocks(PAGE, "yaml"))
    for name in PROXY.split("."):
        images = images[name]
    assert OpenAIProxyConfig.model_validate(images).container.images[1] == "localhost/coder"
    (entry,) = tools["tools"]
    shell = ContainerShell(entry["config"])
    assert shell.options.container.workdir == "/app" and shell.options.check == ["sh", "tests/run.sh"]


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
