"""Teachers that read another prompt than the policy: what they say of a token stays with that token."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.algorithms.distillation import with_teacher_advantages
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import TrainingError
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.runtime.ranks import LocalRanks
from agentrl.trainer.teachers import teachers_of
from agentrl.trajectory.batch import RaggedBatch, TeacherPrompts
from agentrl.workers.groups import TeacherGroup
from agentrl.workers.teacher import TeacherWorker
from tests.naming import naming
from tests.workers.conftest import BatchMaker, WorkerMaker, same_weights

PRIVILEGED = "The answer is {ground_truth}."
ITSELF: dict[str, Any] = {"teacher": {"path": "policy", "privileged": PRIVILEGED}}
SAMPLED = ActorConfig(ppo_mini_batch_size=4, optim=OptimConfig(lr=1e-2))


def config_of(**keys: Any) -> DistillationConfig:
    return DistillationConfig.model_validate(keys)


def prompts_of(batch: RaggedBatch) -> list[torch.Tensor]:
    """The policy's prompts: what comes before its first token."""
    starts = batch.offsets[:-1].tolist()
    return [batch.ids[start : start + int(batch.mask[start:].nonzero()[0, 0])] for start in starts]


def privileged(batch: RaggedBatch, shown: list[list[int]]) -> RaggedBatch:
    """The batch whose teacher reads the ids `shown` behind each prompt; nothing where there are none."""
    prompts = prompts_of(batch)
    ids = [np.array([*own.tolist(), *more] if more else [], np.int64) for own, more in zip(prompts, shown, strict=True)]
    shown_prompts = TeacherPrompts(tuple(ids), np.array([len(own) for own in prompts], np.int64))
    return replace(batch, teacher_prompts=shown_prompts)


def shown_to(batch: RaggedBatch) -> list[list[int]]:
    """Something else for each sequence, of every length, longer than the sequence too; nothing for the third."""
    return [[] if row == 2 else [3 + (7 * row + at) % 300 for at in range(1 + 11 * row)] for row in range(len(batch))]


def owned(batch: RaggedBatch) -> RaggedBatch:
    """The batch with the column teacher: the first one's, but where it is shown nothing."""
    return batch.with_fields(**teachers_of(batch, dict.fromkeys(batch.group.tolist(), 0), {0})[0])


def by_transformers(path: Path, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs [L] of ids [L] at temperature 0.7; that of the first one is 0."""
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids[None]).logits[0] / 0.7
    found = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found])


def test_a_sequence_as_its_teacher_reads_it(make_batch: BatchMaker) -> None:
    batch = make_batch()
    batch = privileged(batch, shown_to(batch))
    read = batch.as_taught()
    assert torch.equal(read.ids[read.mask], batch.ids[batch.mask])
    assert torch.equal(read.policy_tokens, batch.policy_tokens)
    assert torch.equal(read.lengths - batch.lengths, torch.tensor([len(more) for more in shown_to(batch)]))
    third = slice(*batch.offsets[2:4].tolist())
    assert torch.equal(read.ids[slice(*read.offsets[2:4].tolist())], batch.ids[third])


def test_prompts_go_with_their_sequences(make_batch: BatchMaker) -> None:
    """Selected, put together and sent elsewhere."""
    batch = make_batch()
    batch = privileged(batch, shown_to(batch))
    rows = [5, 0, 2, 7]
    parts = [batch.select(rows[:3]), batch.select([]), batch.select(rows[3:])]
    joined = pickle.loads(pickle.dumps(RaggedBatch.concat(parts)))
    whole, read = batch.as_taught(), joined.as_taught()
    assert torch.equal(read.ids, whole.select(rows).ids) and torch.equal(read.offsets, whole.select(rows).offsets)


def test_a_teacher_that_is_shown_nothing_says_what_the_policy_says(
    make_worker: WorkerMaker, make_batch: BatchMaker
) -> None:
    """Bit for bit, where it is asked in spite of that: its prompts are the policy's own."""
    batch = make_batch()
    batch = privileged(batch, [[] for _ in range(len(batch))])
    worker = make_worker(SAMPLED, temperature=0.7, distillation=config_of(**ITSELF))
    batch = batch.with_fields(teacher=torch.zeros(batch.num_tokens, dtype=torch.int32))
    scores, _ = worker.compute_teacher_scores(batch)
    assert torch.equal(scores[:, 0], worker.compute_log_probs(batch)[0])
    assert batch.teacher_prompts is not None
    again = TeacherPrompts(tuple(one.numpy() for one in prompts_of(batch)), batch.teacher_prompts.replaced)
    assert torch.equal(worker.compute_teacher_scores(replace(batch, teacher_prompts=again))[0], scores)


def test_what_it_says_is_what_the_model_says_behind_the_other_prompt(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    """By transformers' own forward, one sequence at a time; tokens of tools and prompts have 0."""
    batch = make_batch()
    batch = owned(privileged(batch, shown_to(batch)))
    worker = make_worker(SAMPLED, temperature=0.7, distillation=config_of(**ITSELF))
    found, _ = worker.compute_teacher_scores(batch)
    assert found.shape == (batch.num_tokens, 1) and (found[~batch.mask] == 0).all()
    prompts = prompts_of(batch)
    for row, (more, prompt) in enumerate(zip(shown_to(batch), prompts, strict=True)):
        span = slice(*batch.offsets[row : row + 2].tolist())
        mask = batch.mask[span]
        if not more:
            assert (found[span] == 0).all()
            continue
        behind = batch.ids[span][len(prompt) :]
        said = by_transformers(tiny_policy, torch.cat([prompt, torch.tensor(more), behind]))[-len(behind) :]
        assert (found[span][mask, 0] - said[mask[len(prompt) :]]).abs().max() < 1e-5


@pytest.mark.parametrize("keys", [{"scope": "sampled"}, {"scope": "top_k", "top_k": 8}, {"scope": "full"}])
def test_other_weights_may_be_shown_more_too(
    make_batch: BatchMaker, tiny_policy: Path, tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Whole distributions stay with their tokens as log-probs of sampled ones do."""
    path = make_tiny_policy(
        tmp_path / "t", seed=5, shape=TinyShape(vocab=320, hidden=48, layers=1, heads=2, kv_heads=1, intermediate=64)
    )
    config = config_of(teacher={"path": str(path), "privileged": PRIVILEGED}, **keys)
    worker = TeacherWorker(config, ModelConfig(path=str(tiny_policy)), device="cpu", temperature=0.7)
    batch = make_batch()
    batch = owned(privileged(batch, shown_to(batch)))
    read = batch.as_taught()
    plain = read.with_fields(teacher=torch.zeros(read.num_tokens, dtype=torch.int32))
    found, expected = worker.compute_teacher_scores(batch)[0], worker.compute_teacher_scores(plain)[0]
    told = batch.mask & (batch.teacher == 0)
    taught = read.mask & (read.sequence_ids() != 2)
    assert (found[told] - expected[taught]).abs().max() < 1e-5 and (found[~told] == 0).all()


def test_the_policy_teaches_beside_others(make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path) -> None:
    """By data source; the others read what the policy reads."""
    both = config_of(by_source={"a": {"path": str(tiny_policy)}, "b": {"path": "policy", "privileged": PRIVILEGED}})
    batch = make_batch()
    batch = privileged(batch, [more if batch.group[row] else [] for row, more in enumerate(shown_to(batch))])
    batch = batch.with_fields(**teachers_of(batch, {group: min(group, 1) for group in range(4)}, {1})[0])
    policy = make_worker(SAMPLED, temperature=0.7, distillation=both)
    others = TeacherWorker(both, ModelConfig(path=str(tiny_policy)), device="cpu", temperature=0.7)
    found = TeacherGroup(LocalRanks(others), LocalRanks(policy)).scores(batch).teacher_scores
    assert found is not None
    own, _ = policy.compute_teacher_scores(batch)
    plain, _ = policy.compute_log_probs(batch)
    assert torch.equal(found[batch.teacher == 1], own[batch.teacher == 1])
    assert (found[batch.teacher == 0, 0] - plain[batch.teacher == 0]).abs().max() < 1e-5


def test_rows_that_show_a_teacher_nothing_learn_from_rewards_alone(
    make_worker: WorkerMaker, make_batch: BatchMaker
) -> None:
    batch = make_batch()
    config = config_of(**ITSELF)
    weights = []
    nothing: list[list[int]] = [[] for _ in range(len(batch))]
    for shown in (nothing, shown_to(batch)):
        worker = make_worker(SAMPLED, temperature=0.7, distillation=config)
        told = owned(privileged(batch, shown))
        told = told.with_fields(old_logprobs=worker.compute_log_probs(told)[0])
        told = told.with_fields(teacher_scores=worker.compute_teacher_scores(told)[0])
        mixed, metrics = with_teacher_advantages(told, config)
        assert metrics["distill/taught_fraction"] < 1
        third = mixed.sequence_ids() == 2
        assert mixed.advantages is not None and batch.advantages is not None
        assert torch.equal(mixed.advantages[third], batch.advantages[third])
        worker.update(mixed, step=1)
        weights.append(worker)
    plain = make_worker(SAMPLED, temperature=0.7)
    plain.update(batch.with_fields(old_logprobs=plain.compute_log_probs(batch)[0]), step=1)
    assert same_weights(weights[0], plain) and not same_weights(weights[1], plain, 1e-5)


def test_it_is_the_policy_as_it_is_now(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch()
    batch = owned(privileged(batch, shown_to(batch)))
    worker = make_worker(SAMPLED, temperature=0.7, distillation=config_of(**ITSELF))
    before, _ = worker.compute_teacher_scores(batch)
    worker.update(batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0]), step=1)
    after, _ = worker.compute_teacher_scores(batch)
    assert (before - after).abs().max() > 1e-3


def test_broken_weights_are_told(make_worker: WorkerMaker, make_batch: BatchMaker) -> None:
    batch = make_batch()
    batch = owned(privileged(batch, [[3] for _ in range(len(batch))]))
    worker = make_worker(SAMPLED, distillation=config_of(**ITSELF))
    with torch.no_grad():
        next(iter(worker.backend.model.parameters())).fill_(torch.nan)  # type: ignore[attr-defined]
    with naming(TrainingError, "teacher policy", "not finite"):
        worker.compute_teacher_scores(batch)
