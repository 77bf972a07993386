"""The files of docs/extending.md are written as shown, its commands are accepted, and all its parts train."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.trajectory.parquet import trajectory_files
from tests.e2e.test_docs import SMALL, blocks, commands, write_files
from tests.e2e.test_train import lines
from tests.forked import forked
from tests.wheel import Run

pytestmark = pytest.mark.slice(3, "documents")

PAGE = "docs/extending.md"
ACCEPT = """
import shlex
import sys
from agentrl.config import load_config

for words in sys.argv[1:]:
    load_config(shlex.split(words))
"""
LATE = """
import sys
import agentrl.trainer.build
from my_source import OneStepLate
from agentrl.train import main

agentrl.trainer.build.AsyncSource = OneStepLate
sys.exit(main(sys.argv[1:]))
"""
"""No key names a source: what the page says to edit, done to the running process."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_files(PAGE, tmp_path)
    for text in blocks(PAGE, "jinja"):
        named = re.match(r"\{#- (\S+\.jinja) -#\}\n", text)
        assert named, text
        (tmp_path / named.group(1)).write_text(text)
    return tmp_path


def trainings() -> list[list[str]]:
    """The arguments of the page's trainings."""
    return [words[1:] for words in map(shlex.split, commands(PAGE)) if words[1] == "-m"]


def small(policy_dir: Path) -> list[str]:
    sizes = [word for word in SMALL if "val_" not in word and "prompt_length" not in word]
    return [*sizes, f"actor_rollout_ref.model.path={policy_dir}", "data.max_prompt_length=700"]


def test_every_command_is_accepted(folder: Path) -> None:
    assert len(trainings()) == 19
    (folder / "accept.py").write_text(ACCEPT)
    done = forked(["accept.py", *map(shlex.join, (words[2:] for words in trainings()))], folder)
    assert done.returncode == 0, done.stderr


def test_the_parts_train_together(run_wheel: Run, folder: Path, policy_dir: Path) -> None:
    """Every key of the page in one run, but SGLang's and the loop's, which takes the place of tools and interaction."""
    others = ("agent_loop_config_path", "agent_name", "name=sglang", "server_urls", "update_weights_transport")
    together = [word for words in trainings() for word in words[6:] if not any(other in word for other in others)]
    head = ["-m", "agentrl.train", "--config-path", ".", "--config-name", "my_logged_run"]
    room = ["data.max_response_length=120", "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=16"]
    room += ["actor_rollout_ref.rollout.n=4", "trainer.show_trajectory_freq=1"]
    run_wheel([*head, *together, *small(policy_dir), *room], folder)
    done = folder / "runs" / "lengths"
    step = lines(done)[-1]
    assert step["left_out/failed"] == 0 and step["actor/grad_norm"] > 0
    assert 0 <= step["actor/bounded_frac"] <= 1 and "score/cost" in step and "score/characters" in step
    assert (done / "my_rewards.txt").read_text() == f"1 {step['reward/mean']}\n"
    (file,) = trajectory_files(done / "trajectories")
    assert (done / "unsolved.txt").read_text().startswith("1 [") and step["unsolved/prompts"] >= 0
    shown = str(pq.read_table(file).to_pylist())
    assert "train/1/0/" in (done / "long_turns.txt").read_text()
    assert "Are you sure?" in shown, "the interaction"
    assert "How many metres are 2 miles?" in shown, "the sampler's first row"
    written = {file.name for file in done.glob("checkpoints/step_*/policy/*")}
    assert written == {"all.safetensors", "checksums.json"}, "the writer"


def test_the_loop_trains(run_wheel: Run, folder: Path, policy_dir: Path) -> None:
    (words,) = (words for words in trainings() if "my_loops.yaml" in str(words))
    run_wheel([*words, *small(policy_dir), "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8"], folder)
    step = lines(folder / "runs" / "lengths")[-1]
    assert step["turns/mean"] == 2.0


def test_the_source_is_a_step_late_and_goes_on(run_wheel: Run, folder: Path, policy_dir: Path) -> None:
    (folder / "late.py").write_text(LATE)
    words = [*trainings()[0][2:], *(word for word in small(policy_dir) if "total_training_steps" not in word)]
    words += ["trainer.save_freq=1"]
    for steps in (2, 4):
        run_wheel(["late.py", *words, f"trainer.total_training_steps={steps}"], folder)
    done = folder / "runs" / "lengths"
    assert [step["step"] for step in lines(done)] == [1, 2, 3, 4]
    assert versions(done) == {1: 0, 2: 0, 3: 2, 4: 2, 5: 3}, "the second process begins with trajectories of its own"


def versions(run_dir: Path) -> dict[int, int]:
    """Version of the weights that sampled each step's trajectories."""
    found = {}
    for file in trajectory_files(run_dir / "trajectories"):
        row = pq.read_table(file).to_pylist()[0]
        ((span,),) = row["versions"]
        found[row["step"]] = span["version"]
    return found


def test_the_script_of_policies_prints_what_the_page_says(folder: Path) -> None:
    done = forked(["my_policies.py"], folder)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said == ["solver [7, 7, 7] 0.0", "critic [2, 2, 2] 1.0"]
