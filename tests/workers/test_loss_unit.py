"""A session is taught the same however it is cut into transcripts."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from agentrl.config.sections.actor import ActorConfig, CriticConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from tests.workers.conftest import BatchMaker, WorkerMaker, same_weights
from tests.workers.made import critic_worker


def cut(batch: RaggedBatch, seed: int) -> RaggedBatch:
    """Cut each sequence into one to four transcripts, at any place: each has all tokens before its own, unlearnt."""
    draw = random.Random(seed)
    rows: list[int] = []
    places: list[int] = []
    learnt: list[bool] = []
    lengths: list[int] = []
    for row, (start, end) in enumerate(pairwise(batch.offsets.tolist())):
        ends = sorted({*(draw.randrange(start + 1, end) for _ in range(draw.randrange(4))), end})
        for first, last in pairwise([start, *ends]):
            rows.append(row)
            places += range(start, last)
            learnt += [False] * (first - start) + [True] * (last - first)
            lengths.append(last - start)
    index, own = torch.tensor(places), torch.tensor(learnt)
    tokens = {name: values[index] for name, values in batch.tokens.items()}
    tokens["mask"] = tokens["mask"] & own
    sequences = {name: values[rows] for name, values in batch.sequences.items()}
    return RaggedBatch(torch.tensor([0, *lengths]).cumsum(0), tokens, sequences, batch.policies)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-mean"])
def test_cutting_a_session_into_transcripts_changes_no_step(
    make_worker: WorkerMaker, make_batch: BatchMaker, mode: str
) -> None:
    """KL and entropy, several micro-batches and mini-batches; and the check of the loss finds the same weights."""

    def stepped(batch: RaggedBatch, unit: str = "trajectory") -> tuple[PolicyWorker, float]:
        config = ActorConfig.model_validate(
            {
                "ppo_mini_batch_size": 2,
                "ppo_max_token_len_per_gpu": 90,
                "loss_agg_mode": mode,
                "loss_unit": unit,
                "optim": OptimConfig(lr=1e-3),
                "use_kl_loss": True,
                "entropy_coeff": 0.01,
            }
        )
        worker = make_worker(config, max_response_length=30)
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        assert batch.old_logprobs is not None
        batch = batch.with_fields(ref_logprobs=batch.old_logprobs - 0.1 * batch.ids.remainder(3))
        metrics = worker.update(batch, step=1)
        (checked,) = worker.checked()
        assert checked.report.findings == [] and checked.report.evaluated["update/gradient"] > 2
        return worker, metrics["actor/grad_norm"]

    whole = make_batch(prompts=4, n=3)
    (one, norm), (other, norm_of_cut) = stepped(whole), stepped(cut(whole, seed=1))
    assert norm_of_cut == pytest.approx(norm, rel=1e-5)
    assert same_weights(one, other, 2e-5)  # AdamW enlarges the rounding of a gradient that is almost 0
    by_transcript = stepped(cut(whole, seed=1), "transcript")[1]
    assert (by_transcript == pytest.approx(norm, rel=1e-2)) == (mode == "token-mean")


def test_the_critic_is_fitted_by_trajectory_too(tiny_policy: Path, make_batch: BatchMaker) -> None:
    def norm(batch: RaggedBatch, unit: str = "trajectory") -> float:
        worker = critic_worker(
            ModelConfig(path=str(tiny_policy)),
            CriticConfig(ppo_max_token_len_per_gpu=90, loss_agg_mode="seq-mean-token-mean", optim=OptimConfig(lr=1e-3)),
            ActorConfig.model_validate({"loss_unit": unit}),
            device="cpu",
            total_steps=10,
            seed=1,
        )
        batch = batch.with_fields(values=worker.compute_values(batch)[0])
        metrics = worker.update(batch, step=1)
        (checked,) = worker.checked()
        assert checked.report.findings == [] and checked.report.evaluated
        return float(metrics["critic/grad_norm"])

    whole = make_batch(prompts=4, n=3)
    whole = whole.with_fields(returns=whole.advantages)
    assert norm(cut(whole, seed=1)) == pytest.approx(norm(whole), rel=1e-5)
    assert norm(cut(whole, seed=1), "transcript") != pytest.approx(norm(whole), rel=1e-2)
