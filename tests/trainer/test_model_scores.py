"""A run with a reward model: what is added to the rewards, and that it is trained on."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from agentrl.reward.model_input import ModelInput
from agentrl.train import main
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.parquet import read_trajectories
from agentrl.workers.reward_model import RewardModelWorker
from tests.e2e.test_train import lines
from tests.naming import assert_names
from tests.reward.tiny_reward_model import make_reward_model
from tests.runs import Overrides


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    """All answers are alike to it."""
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(solution_str):\n    return 0.25\n")
    return path


def test_its_scores_are_trained_on(small_run: Overrides, tmp_path: Path) -> None:
    path = make_reward_model(tmp_path / "reward-model", template=None)
    run = small_run(
        "reward_model.enable=true",
        f"reward_model.model.path={path}",
        "reward_model.model.coef=2.0",
        "algorithm.turn_reward_coef=0",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "data.val_batch_size=4",
    )
    assert main(run) == 0
    first, *steps = lines(tmp_path / "run")
    for line in steps:
        assert line["score/mean"] == 0.25
        assert line["reward/mean"] == pytest.approx(0.25 + 2 * line["score/reward_model"])
        assert line["group/zero_variance"] == 0
        assert line["actor/grad_norm"] > 0, "the scorer's rewards alone are all equal"
        assert line["time/reward_model"] > 0
        assert line["trajectory/reward_model_cut"] == 0
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    reading = ModelInput(str(path), None)

    def mean_score(file: Path) -> float:
        read = [reading.ids(trajectory.messages)[0] for trajectory in read_trajectories(file)]
        with torch.no_grad():
            return float(torch.stack([model(input_ids=torch.tensor([ids])).logits for ids in read]).mean())

    folder = tmp_path / "run" / "trajectories"
    (file,) = folder.glob("train_*1.parquet")
    assert steps[0]["score/reward_model"] == pytest.approx(mean_score(file), abs=1e-5)
    written = pq.read_table(file, columns=["score", "reward", "model_reward"]).to_pandas()
    assert written["reward"].mean() == pytest.approx(steps[0]["reward/mean"], abs=1e-9)
    assert (written["reward"] == written["score"] + written["model_reward"]).all(), "turns have no weight here"
    validated = pq.read_table(sorted(folder.glob("val_000000_*")), columns=["reward"])["reward"]
    assert len(validated) == 6 * (2 + 1) and not validated.null_count
    greedy = [mean_score(file) for file in sorted(folder.glob("val_*0_greedy*"))]
    expected = (4 * greedy[0] + 2 * greedy[1]) / 6
    assert first["val/reward_greedy"] == pytest.approx(0.25 + 2 * expected, abs=1e-5)
    assert (first["val/success_greedy"], first["val/score_greedy"]) == (0, 0.25)


@pytest.mark.parametrize("every", [4, 1])
def test_trajectories_whose_score_is_not_finite_fail(
    small_run: Overrides,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    every: int,
) -> None:
    """As those whose scorer fails: some are left out and counted, too many end the run."""
    path = make_reward_model(tmp_path / "reward-model", template=None)
    healthy = RewardModelWorker.compute_scores

    def compute_scores(worker: RewardModelWorker, batch: RaggedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        scores, metrics = healthy(worker, batch)
        scores[batch.offsets[1:][::every] - 1] = torch.nan
        return scores, metrics

    monkeypatch.setattr(RewardModelWorker, "compute_scores", compute_scores)
    run = small_run(
        "reward_model.enable=true",
        f"reward_model.model.path={path}",
        "trainer.total_training_steps=1",
        "data.val_files=null",
    )
    if every == 1:
        assert main(run) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "step 1: 16 of 16 trajectories failed" in said
        assert_names(said, "reward_model", "quickstart/", "nan")
        return
    assert main(run) == 0
    step = lines(tmp_path / "run")[-1]
    assert step["failure/reward_model"] == step["left_out/failed"] == 4
    assert step["status/failed"] == 0.25
    assert step["actor/skipped_updates"] == 0
    assert step["actor/grad_norm"] > 0
    assert 0.25 + step["score/reward_model"] == pytest.approx(step["reward/mean"])
