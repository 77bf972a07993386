"""examples/logs: a made-up log, and the command that makes a model of it, with a policy that knows nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from data_prep.traces.__main__ import main as traces

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "examples" / "logs"
SMALL = (
    *("data.train_batch_size=4", "data.max_prompt_length=300", "data.max_response_length=48"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.rollout.n=2", "trainer.test_freq=-1"),
    *("trainer.val_before_train=false", "trainer.total_training_steps=1", "trainer.device=cpu"),
)


def make(folder: Path, conversations: int) -> list[dict[str, str | None]]:
    """Make a log; return which conversations are bad."""
    words = [sys.executable, str(FOLDER / "make.py"), "--out", str(folder), "--conversations", str(conversations)]
    subprocess.run(words, check=True, cwd=PROJECT, capture_output=True, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    return [json.loads(line) for line in (folder / "truth.jsonl").read_text().splitlines()]


def test_the_made_up_log_is_joined_with_its_thumbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = make(tmp_path / "log", 300)
    sources = [str(tmp_path / "log" / name) for name in ("calls.jsonl", "feedback.jsonl")]
    assert traces(["--source", *sources, "--out", str(tmp_path / "data")]) == 0
    rows = pq.read_table(tmp_path / "data" / "conversations.parquet").to_pylist()
    bad = {str(one["response_id"]).split("-")[1] for one in truth if one["flaw"]}
    assert len(rows) == len({row["session"] for row in rows}) == 300 and len(bad) == 36
    down = [row["session"] for row in rows if row["feedback"] == -1]
    up = [row["session"] for row in rows if row["feedback"] == 1]
    assert len(set(down) & bad) > 20 and len(set(up) - bad) > 100
    assert len(set(down) - bad) < 10 > len(set(up) & bad), "a few users are wrong"


@pytest.mark.slice(0, "documents")
@pytest.mark.timeout(1200)
def test_the_command_goes_from_a_log_to_a_model(tmp_path: Path, policy_dir: Path) -> None:
    make(tmp_path / "log", 60)
    (tmp_path / "log" / "truth.jsonl").unlink()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(PROJECT)}
    words = ["bash", str(FOLDER / "logs.sh"), str(tmp_path / "log"), str(policy_dir), str(tmp_path / "made"), *SMALL]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "made" / "grpo" / "policy" / "config.json").exists()
    for name in ("before", "after-sft", "after-kto", "after-grpo"):
        found = json.loads((tmp_path / "made" / f"{name}.json").read_text())
        assert found["all"]["responses"] > 0 and 0 <= found["all"]["extra"]["liked"] <= 1
        assert f"{name}:" in done.stdout
