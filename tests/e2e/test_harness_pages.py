"""docs/harnesses.md and the pages of coding programs: their commands train, with the real programs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import cast

import pytest

from agentrl.config.registries import HARNESSES
from agentrl.openai_api.harness import Harness
from tests.e2e.test_docs import SMALL, blocks, commands
from tests.e2e.test_train import lines
from tests.programs import program
from tests.wheel import Run

PAGES = {
    "harnesses": "pi",
    **{f"agents/{name}": name for name in ("claude_code", "codex", "mini_swe_agent", "opencode", "pi")},
}
"""The harness of each page's commands."""


def harness_of(page: str) -> type[Harness]:
    return cast(type[Harness], HARNESSES.get(PAGES[page]))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_installs_the_version_that_was_tried(page: str) -> None:
    install, data, train = commands(f"docs/{page}.md")
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
    _, data, train = (shlex.split(line) for line in commands(f"docs/{page}.md"))
    run_wheel(data[1:], tmp_path)
    long = shutil.copytree(policy_dir, tmp_path / "policy")
    config = json.loads((long / "config.json").read_text())
    (long / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 18}))
    words = [word.replace("Qwen/Qwen3-4B", str(long)) for word in train[1:]]
    more = [
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
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    run_wheel([*words, *more], tmp_path)
    metrics = lines(tmp_path / "run")[-1]
    assert metrics["left_out/failed"] == 0 and metrics["trajectory/openai_calls"] >= 1
    assert metrics.get("trajectory/openai_bad_requests", 0) == 0
