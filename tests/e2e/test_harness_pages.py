"""docs/harnesses.md and the pages of coding programs: their commands train, with the real programs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from agentrl.agents.harness import Harness
from agentrl.config.registries import HARNESSES
from tests.containers.conftest import LINE, Boxed, boxed, need_containers, root
from tests.e2e.test_container_page import PROXY
from tests.e2e.test_docs import SMALL, blocks, commands
from tests.e2e.test_train import lines
from tests.programs import program
from tests.wheel import Run

__all__ = ["boxed", "root"]
PAGES = {
    "harnesses": "pi",
    **{f"agents/{name}": name for name in ("claude_code", "codex", "mini_swe_agent", "opencode", "pi")},
}
"""The harness of each page's commands."""


def harness_of(page: str) -> type[Harness]:
    return cast(type[Harness], HARNESSES.get(PAGES[page]))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_installs_the_version_that_was_tried(page: str) -> None:
    install, data, train = commands(f"docs/{page}.md")[:3]
    harness = harness_of(page)
    assert install == harness.install and install.endswith(harness.version)
    assert data == "python -m data_prep.repairs --out data/repairs" and f"harness={PAGES[page]}" in train


def test_the_table_of_programs_is_what_was_tried() -> None:
    table = (Path(__file__).parents[2] / "docs" / "harnesses.md").read_text()
    for page, name in list(PAGES.items())[1:]:
        assert f"| [`{name}`]({page}.md) |" in table and f" | {harness_of(page).version} | " in table


def test_a_harness_of_ones_own_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks("docs/harnesses.md", "python")
    (tmp_path / "my_harness.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    HARNESSES.check("my_harness.py:Mine", {"arguments": ["--fast"]})


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_the_page_trains_its_program(
    run_wheel: Run, policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str
) -> None:
    place = program(harness_of(page).program)
    found = tmp_path / "bin"
    found.mkdir()
    (found / place.name).symlink_to(place)
    (found / "python").symlink_to(sys.executable)
    node = shutil.which("node")
    monkeypatch.setenv("PATH", f"{found}:{Path(node).parent if node else ''}:{os.environ['PATH']}")
    _, data, train = (shlex.split(line) for line in commands(f"docs/{page}.md")[:3])
    run_wheel(data[1:], tmp_path)
    run_wheel([*with_policy(train, policy_dir, tmp_path), *LITTLE], tmp_path)
    check(tmp_path)


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(900)
def test_claude_code_trains_in_a_container(run_wheel: Run, policy_dir: Path, tmp_path: Path, boxed: Boxed) -> None:
    """The image is a root without files, into which this machine's programs are mounted: none is downloaded."""
    need_containers()
    place = program("claude").resolve()
    (containerfile,) = blocks("docs/agents/claude_code.md", "dockerfile")
    assert HARNESSES.get("claude_code").install.split()[-1] in containerfile  # type: ignore[attr-defined]
    options = boxed()
    folder = str(place.parents[1])
    _, data, _, build, train = (shlex.split(line) for line in commands("docs/agents/claude_code.md")[:5])
    image = build[build.index("--tag") + 1]
    tree = subprocess.Popen(["tar", "-C", str(options.image), "-c", "."], stdout=subprocess.PIPE)
    subprocess.run([*LINE, "import", "-", image], stdin=tree.stdout, check=True, capture_output=True)
    mounts = ["--volume", f"{folder}:{folder}:ro", *options.arguments]
    more = [
        f"{PROXY}.command=[{place}]",
        f"{PROXY}.container.command_line=[{','.join(LINE)}]",
        f"{PROXY}.container.arguments=[{','.join(mounts)}]",
    ]
    try:
        run_wheel(data[1:], tmp_path)
        run_wheel([*with_policy(train, policy_dir, tmp_path), *LITTLE, *more], tmp_path)
    finally:
        subprocess.run([*LINE, "rmi", "--force", image], capture_output=True)
    assert check(tmp_path)["trajectory/containers"] == 2


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(900)
def test_tasks_of_ones_own_come_to_a_step_and_an_evaluation(
    run_wheel: Run, policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained policy stands in for the quickstart's, whose warm-up takes minutes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "claude").symlink_to(program("claude"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for number in range(6):
        task = tmp_path / "tasks" / f"task_{number}"
        for path, text in (
            ("instruction.md", f"Write {number} into answer.txt."),
            ("files/read.me", "Nothing is here yet."),
            ("tests/test.py", f"assert open('answer.txt').read().strip() == '{number}'"),
        ):
            (task / path).parent.mkdir(parents=True, exist_ok=True)
            (task / path).write_text(text)
    data, train, view, evaluate = (shlex.split(line) for line in commands("docs/agents/claude_code.md")[5:])
    run_wheel(data[1:], tmp_path)
    more = [f"actor_rollout_ref.model.path={tmp_path / 'policy'}", "data.max_response_length=32", "trainer.device=cpu"]
    run_wheel([*with_policy(train, policy_dir, tmp_path), *more], tmp_path)
    folder = Path(view[-1])
    metrics = lines(tmp_path / folder)[-1]
    assert metrics["left_out/failed"] == metrics["score/mean"] == 0 and metrics["trajectory/openai_calls"] >= 1
    assert "trajectory/openai_unseen_tools" not in metrics
    run_wheel(evaluate[1:], tmp_path)
    assert lines(tmp_path / folder / "val_only")[-1]["val/success_greedy"] == 0


LITTLE = [
    *SMALL,
    "data.max_prompt_length=100000",  # in tokens of a tiny vocabulary
    "data.train_batch_size=1",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=300000",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=300000",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
    "algorithm.filter_groups.enable=false",
    "trainer.default_local_dir=run",
]


def with_policy(train: list[str], policy_dir: Path, folder: Path) -> list[str]:
    """Return the words of a page's training with a tiny policy of a long window."""
    long = shutil.copytree(policy_dir, folder / "policy")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 18}))
    return [word.replace("Qwen/Qwen3-4B", str(long)) for word in train[1:]]


def check(folder: Path) -> dict[str, float]:
    """Check that the program's calls were trained on; return the metrics of the last step."""
    metrics = lines(folder / "run")[-1]
    assert metrics["left_out/failed"] == 0 and metrics["trajectory/openai_calls"] >= 1
    assert metrics.get("trajectory/openai_bad_requests", 0) == 0
    return metrics
