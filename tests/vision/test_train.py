"""Steps of GRPO with images, through the real command in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor

from agentrl.replay.__main__ import main as replay
from agentrl.train import main
from agentrl.trajectory.picture import Picture
from tests.vision.tiny import encoded

SCORE = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(sum(c.isalpha() for c in solution_str[:12])) / 12
"""


@pytest.fixture
def overrides(tmp_path: Path, vision_policy: Path) -> list[str]:
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>What is it?" if number % 3 else "Say something."}],
            "images": [{"bytes": encoded(number % 4), "path": None}] if number % 3 else None,
            "data_source": "x",
            "reward_model": {"ground_truth": "1"},
        }
        for number in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "score.py").write_text(SCORE)
    return [
        f"data.train_files={tmp_path}/rows.parquet",
        f"actor_rollout_ref.model.path={vision_policy}",
        f"custom_reward_function.path={tmp_path}/score.py",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=12",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.logger=jsonl",
        f"trainer.default_local_dir={tmp_path}/run",
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("frozen", [False, True])
def test_two_steps(overrides: list[str], tmp_path: Path, vision_policy: Path, frozen: bool) -> None:
    if frozen:
        overrides += ["actor_rollout_ref.actor.freeze_vision_tower=true", "algorithm.adv_estimator=gae"]
    assert main(overrides) == 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert all(line["rollout/logprob_gap_max_abs"] < 1e-4 for line in metrics)
    before, after = weights(vision_policy), weights(tmp_path / "run" / "policy")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("visual" not in name for name in changed)
    assert any("visual" in name for name in changed) != frozen
    assert AutoImageProcessor.from_pretrained(tmp_path / "run" / "policy").merge_size == 2
    replayed: list[str] = []
    for row in pq.read_table(tmp_path / "run" / "trajectories" / "train_000001.parquet").to_pylist():
        (images,) = row["images"]
        asked = json.loads(row["messages"][0]["other"])["content"] if row["messages"][0]["other"] else []
        assert len(images) == len(asked[:-1])
        for image in images:
            assert image["tokens"] == 6 and image["grid"] == [1, 4, 6]
            assert image["digest"] in {Picture(encoded(number)).digest.hex() for number in range(4)}
            assert image["digest"] in asked[0]["image"]
            assert (tmp_path / "run" / "images" / image["digest"]).read_bytes() in map(encoded, range(4))
            if not replayed:
                replayed.append(row["uid"])
                assert replay([str(tmp_path / "run"), "--trust", "--uid", row["uid"]]) == 0
                (tmp_path / "run" / "images" / image["digest"]).rename(tmp_path / "away")
                assert replay([str(tmp_path / "run"), "--trust", "--uid", row["uid"]]) == 2
                (tmp_path / "away").rename(tmp_path / "run" / "images" / image["digest"])
    assert replayed
