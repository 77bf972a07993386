"""The reward model's worker against transformers' own scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from agentrl.config.sections.reward import RewardModelConfig
from agentrl.errors import ConfigError
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.reward_model import RewardModelWorker
from tests.naming import naming
from tests.reward.tiny_reward_model import make_reward_model
from tests.workers.conftest import BatchMaker


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward-model"))


def worker(path: Path, dtype: str = "float32", **config: Any) -> RewardModelWorker:
    return RewardModelWorker(RewardModelConfig(model={"path": str(path)}, **config), dtype=dtype, device="cpu")


def own_scores(path: Path, batch: RaggedBatch) -> torch.Tensor:
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=ids[None]).logits[0, 0] for ids in batch.ids.split(batch.lengths.tolist())])


@pytest.mark.parametrize("budget", [1, 40, 100_000])
def test_scores_are_transformers_own(reward_model: Path, make_batch: BatchMaker, budget: int) -> None:
    batch = make_batch(prompts=3, n=2)
    scores = worker(reward_model, forward_max_token_len_per_gpu=budget).compute_scores(batch)[0]
    last = batch.offsets[1:] - 1
    expected = own_scores(reward_model, batch)
    assert expected.std() > 0.01
    assert torch.allclose(scores[last], expected, rtol=0, atol=1e-6)
    scores[last] = 0
    assert not scores.any()


def test_bfloat16_is_near(reward_model: Path, make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=2, n=2)
    scores = worker(reward_model, dtype="bfloat16").compute_scores(batch)[0]
    assert scores.dtype == torch.float32
    assert torch.allclose(scores[batch.offsets[1:] - 1], own_scores(reward_model, batch), rtol=0.05, atol=0.01)


def test_what_is_no_reward_model_is_refused(tiny_policy: Path, tmp_path: Path) -> None:
    two_labels = make_reward_model(tmp_path / "two", labels=2)
    for path, says in (
        (two_labels, "a reward model has one label, and this one 2"),
        (tmp_path, "expected a sequence classification model"),
    ):
        with pytest.raises(ConfigError, match=rf"reward_model\.model\.path=.*: {says}"):
            worker(path)
    text = (tiny_policy / "config.json").read_text()
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes((tiny_policy / "model.safetensors").read_bytes())
    (policy / "config.json").write_text(text.rstrip().removesuffix("}") + ', "id2label": {"0": "x"}}')
    with naming(ConfigError, "score.weight"):
        worker(policy)
