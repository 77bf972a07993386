"""docs/vision.md: its files as they stand, its command on the tiny model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.train import main
from tests.e2e.test_docs import commands, write_files

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(c.isalpha() for c in solution_str[:12])) / 12
"""
SMALL = [
    "data.train_batch_size=2",
    "data.max_prompt_length=200",
    "data.max_response_length=12",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=1",
]


def test_the_page_of_images(tmp_path: Path, vision_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert write_files("docs/vision.md", tmp_path) == ["shapes_data.py", "zoom.py", "zoom.yaml"]
    (tmp_path / "my_score.py").write_text(SCORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    _, making, training = commands("docs/vision.md")
    assert making == "python shapes_data.py"
    runpy.run_path(str(tmp_path / "shapes_data.py"))
    command = training.replace("Qwen/Qwen2.5-VL-3B-Instruct", str(vision_policy)).split()
    assert command[:3] == ["python", "-m", "agentrl.train"]
    assert main([*command[3:], *SMALL]) == 0
    rows = pq.read_table(tmp_path / "runs" / "shapes" / "trajectories" / "train_000001.parquet").to_pylist()
    assert all(len(row["images"][0]) == 1 for row in rows)
    assert all("zoom" in row["messages"][0]["other"] for row in rows)
    metrics = [json.loads(line) for line in (tmp_path / "runs" / "shapes" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 1
