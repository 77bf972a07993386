"""Teachers of a real tiny Qwen3: their scores, and what the policy learns from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.algorithms.distillation import with_teacher_advantages
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import ConfigError, TrainingError
from agentrl.model import packed
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.teacher import LoadedTeacher, TeacherWorker
from tests.conftest import PROJECT
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp, same_weights

ADAMW = OptimConfig(lr=1e-2)
SCOPES: list[dict[str, Any]] = [
    {"scope": "sampled"},
    {"scope": "sampled", "use": "loss", "estimator": "k2"},
    {"scope": "top_k", "top_k": 8, "divergence": "forward_kl"},
    {"scope": "full", "divergence": "js", "divergence_options": {"beta": 0.3}},
]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model of the same vocabulary: wider, and of one layer."""
    shape = TinyShape(vocab=320, hidden=48, layers=1, heads=2, kv_heads=1, intermediate=64)
    return make_tiny_policy(tmp_path_factory.mktemp("teacher"), seed=5, shape=shape)


def config_of(teacher: Path, **keys: Any) -> DistillationConfig:
    return DistillationConfig.model_validate({"teacher": {"path": str(teacher)}, **keys})


def scored(batch: RaggedBatch, config: DistillationConfig, policy: Path, temperature: float = 0.7) -> RaggedBatch:
    """The batch with the first teacher's scores of all sequences, or with those that it says."""
    worker = TeacherWorker(config, ModelConfig(path=str(policy)), device="cpu", temperature=temperature)
    if batch.teacher is None:
        batch = batch.with_fields(teacher=torch.zeros(batch.num_tokens, dtype=torch.int32))
    return batch.with_fields(teacher_scores=worker.compute_teacher_scores(batch)[0])


def tables(path: Path, batch: RaggedBatch, temperature: float) -> torch.Tensor:
    """Log-probs [T, V] by transformers' own forward, one sequence at a time; rows of first tokens are 0."""
    model = AutoModelForCausalLM.from_pretrained(path)
    found = torch.zeros(batch.num_tokens, model.config.vocab_size)
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=batch.ids[None, start:end]).logits[0] / temperature
        found[start + 1 : end] = logits.log_softmax(-1)[:-1]
    return found


def test_scores_are_those_of_the_model(
    make_batch: BatchMaker, tiny_policy: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    expected = tables(teacher, batch, 0.7)
    own = expected.gather(1, batch.ids[:, None])
    monkeypatch.setattr(packed, "CHUNK_LOGITS", 2000)  # six tokens
    found: dict[str, torch.Tensor] = {}
    for scope, width in SHAPES.items():
        scores = scored(batch, config_of(teacher, scope=scope), tiny_policy).teacher_scores
        assert scores is not None and scores.shape == (batch.num_tokens, 1 + width)
        assert (scores[:, :1] - own * batch.mask[:, None]).abs().max() < 1e-5
        assert (scores[~batch.mask] == 0).all()
        found[scope] = scores
    ids, logprobs = found["top_k"][batch.mask, 1:].chunk(2, dim=1)
    best = expected[batch.mask].topk(64)
    assert (expected[batch.mask].gather(1, ids.long()) - best.values).abs().max() < 1e-5, "near ties may change places"
    assert all(len(set(row)) == 64 for row in ids.tolist())
    assert (logprobs - best.values).abs().max() < 1e-5


SHAPES = {"sampled": 0, "top_k": 128, "full": 48}


def test_full_divergences_are_those_of_all_log_probs_and_their_gradient(
    make_worker: WorkerMaker,
    make_batch: BatchMaker,
    tiny_policy: Path,
    teacher: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against whole tables of log-probs, which are never in memory here: chunks have six tokens."""
    monkeypatch.setattr(packed, "CHUNK_LOGITS", 2000)
    config = config_of(teacher, scope="full", divergence="reverse_kl", policy_loss_coef=0)
    batch = scored(make_batch(), config, tiny_policy)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4, optim=ADAMW), temperature=0.7, distillation=config)
    metrics = worker.update(batch.with_fields(old_logprobs=torch.zeros(batch.num_tokens)), step=1)

    model = AutoModelForCausalLM.from_pretrained(tiny_policy)
    told, total = tables(teacher, batch, 0.7), torch.zeros(())
    for start, end in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        own = (model(input_ids=batch.ids[None, start:end]).logits[0] / 0.7).log_softmax(-1)[:-1]
        by_token = (own.exp() * (own - told[start + 1 : end])).sum(-1)
        total = total + by_token[batch.mask[start + 1 : end]].sum()
    loss = total / int(batch.mask.sum())
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert metrics["actor/teacher_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def test_the_policy_as_its_own_teacher_teaches_nothing(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    for keys in SCOPES[1:]:
        config = config_of(tiny_policy, policy_loss_coef=0, **keys)
        batch = scored(make_batch(), config, tiny_policy)
        worker = make_worker(ActorConfig(ppo_mini_batch_size=4), temperature=0.7, distillation=config)
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        metrics = worker.update(batch, step=1)
        assert abs(metrics["actor/teacher_loss"]) < 1e-5 and metrics["actor/grad_norm"] < 2e-5, keys


@pytest.mark.parametrize("keys", SCOPES, ids=["advantage", "sampled", "top_k", "full"])
def test_numbers_at_tool_tokens_change_no_bit(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, teacher: Path, keys: dict[str, Any]
) -> None:
    """Of prompts and tools, NaN included; at tokens of the policy they do."""
    config = config_of(teacher, **keys)
    batch = scored(make_batch(), config, tiny_policy)
    actor = ActorConfig(ppo_mini_batch_size=2, optim=ADAMW)
    batch = batch.with_fields(old_logprobs=make_worker(actor, temperature=0.7).compute_log_probs(batch)[0])
    assert batch.teacher_scores is not None
    noise = torch.where(batch.mask, 0.0, torch.nan)[:, None]
    nudge = 0.1 * batch.mask[:, None] * (torch.arange(batch.teacher_scores.shape[1]) % 9 == 0)
    workers = []
    for scores in (batch.teacher_scores, batch.teacher_scores + noise, batch.teacher_scores - nudge):
        worker = make_worker(actor, temperature=0.7, distillation=config)
        changed, _ = with_teacher_advantages(batch.with_fields(teacher_scores=scores), config)
        worker.update(changed, step=1)
        workers.append(worker)
    plain, disturbed, moved = workers
    assert same_weights(plain, disturbed)
    assert not same_weights(plain, moved, 1e-5)


@pytest.mark.parametrize("keys", SCOPES[2:], ids=["top_k", "full"])
def test_micro_batches_and_chunks_change_nothing(
    make_worker: WorkerMaker,
    make_batch: BatchMaker,
    tiny_policy: Path,
    teacher: Path,
    keys: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of(teacher, **keys)
    batch = scored(make_batch(), config, tiny_policy)
    metrics = []
    for budget, logits in ((64, 1 << 24), (100_000, 2000)):
        monkeypatch.setattr(packed, "CHUNK_LOGITS", logits)
        actor = ActorConfig(ppo_mini_batch_size=2, ppo_max_token_len_per_gpu=budget, optim=OptimConfig(lr=1e-3))
        worker = make_worker(actor, temperature=0.7, distillation=config)
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        metrics.append(worker.update(batch, step=1))
    assert metrics[0] == pytest.approx(metrics[1], abs=2e-5)


@pytest.mark.parametrize("keys", SCOPES, ids=["advantage", "sampled", "top_k", "full"])
def test_the_policy_comes_nearer_to_its_teacher(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, teacher: Path, keys: dict[str, Any]
) -> None:
    """Over the same tokens: as an advantage, what the teacher thinks likelier gets likelier."""
    config = config_of(teacher, policy_loss_coef=0, **keys)
    batch = scored(make_batch(), config, tiny_policy)
    worker = make_worker(
        ActorConfig(ppo_mini_batch_size=4, optim=OptimConfig(lr=2e-3)), temperature=0.7, distillation=config
    )
    losses, sizes = [], []
    for step in range(1, 6):
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        assert batch.old_logprobs is not None and batch.teacher_scores is not None
        sizes.append(float((batch.old_logprobs - batch.teacher_scores[:, 0])[batch.mask].abs().mean()))
        changed, _ = with_teacher_advantages(batch, config)
        losses.append(worker.update(changed, step=step).get("actor/teacher_loss", math.nan))
    if config.in_loss:
        assert losses[-1] < 0.9 * losses[0]
    else:
        assert sizes[-1] < 0.9 * sizes[0] and math.isnan(losses[0])


def test_each_teacher_scores_its_own_sequences(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, teacher: Path
) -> None:
    """Of another width, in one update with sequences that have no teacher; and a share without any of one."""
    sources = {"a/*": {"path": str(teacher)}, "b": {"path": str(tiny_policy)}}
    both = DistillationConfig.model_validate({"by_source": sources, "scope": "full", "policy_loss_coef": 0})
    assert [both.teacher_of(source) for source in ("a/1", "b", "c")] == [0, 1, -1]
    batch = make_batch()
    owners = torch.arange(len(batch)) % 3 - 1
    batch = batch.with_fields(teacher=owners.repeat_interleave(batch.lengths).int())
    found = scored(batch, both, tiny_policy).teacher_scores
    assert found is not None and found.shape[1] == 49
    for index, path in enumerate((teacher, tiny_policy)):
        alone = scored(make_batch(), config_of(path, scope="full"), tiny_policy).teacher_scores
        assert alone is not None
        mine = batch.teacher == index
        assert (found[mine][:, : alone.shape[1]] - alone[mine]).abs().max() < 1e-5
    assert (found[batch.teacher == -1] == 0).all()
    batch = batch.with_fields(teacher_scores=found)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4), temperature=0.7, distillation=both)
    taught = worker.update(batch.with_fields(old_logprobs=torch.zeros(batch.num_tokens)), step=1)
    first = batch.select((owners == 0).nonzero()[:, 0].tolist())
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4), temperature=0.7, distillation=both)
    alone_taught = worker.update(first.with_fields(old_logprobs=torch.zeros(first.num_tokens)), step=1)
    share = int(first.mask.sum()) / int(batch.mask.sum())
    assert taught["actor/teacher_loss"] == pytest.approx(alone_taught["actor/teacher_loss"] * share, rel=1e-4), (
        "the policy as its own teacher adds 0, and so do sequences without one"
    )


def test_what_cannot_be_compared(make_batch: BatchMaker, tiny_policy: Path, teacher: Path) -> None:
    with pytest.raises(ConfigError, match=r"distillation\.top_k=5000 is more than the vocabulary's \d+ tokens"):
        scored(make_batch(), config_of(teacher, scope="top_k", top_k=5000), tiny_policy)
    worker = TeacherWorker(config_of(teacher), ModelConfig(path=str(tiny_policy)), device="cpu", temperature=1.0)
    loaded = worker.teachers[0]
    assert isinstance(loaded, LoadedTeacher)
    with torch.no_grad():
        loaded.model.base.get_output_embeddings().weight[7] = torch.nan
    batch = make_batch()
    with pytest.raises(TrainingError, match=r"the teacher .* gives numbers that are not finite for \d+ tokens"):
        worker.compute_teacher_scores(batch.with_fields(teacher=torch.zeros(batch.num_tokens, dtype=torch.int32)))


def test_a_policy_with_adapters_learns_from_a_teacher(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, teacher: Path
) -> None:
    config = config_of(teacher, scope="full", policy_loss_coef=0)
    batch = scored(make_batch(), config, tiny_policy)
    model = ModelConfig(path=str(tiny_policy), lora_rank=4)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4, optim=ADAMW), model, temperature=0.7, distillation=config)
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    losses = [worker.update(batch, step=step)["actor/teacher_loss"] for step in (1, 2, 3)]
    assert losses[2] < losses[0]
    assert fsdp(worker).model.lora is not None


def test_the_divergence_of_the_docs_teaches(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path, teacher: Path, tmp_path: Path
) -> None:
    page = (PROJECT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("## Distillation")[2]
    (tmp_path / "own.py").write_text(page.partition("```python\n")[2].partition("```")[0], encoding="utf-8")
    keys = {"scope": "top_k", "divergence": f"{tmp_path}/own.py:skewed", "divergence_options": {"alpha": 0.2}}
    config = config_of(teacher, policy_loss_coef=0, **keys)
    batch = scored(make_batch(), config, tiny_policy)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4, optim=ADAMW), temperature=0.7, distillation=config)
    batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
    losses = [worker.update(batch, step=step)["actor/teacher_loss"] for step in (1, 2, 3)]
    assert 0 < losses[2] < losses[0]
