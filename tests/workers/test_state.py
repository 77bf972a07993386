"""Checkpoints of a worker: exact, and refused when they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agentrl.config.schema import ActorConfig, ModelConfig, OptimConfig
from agentrl.errors import CheckpointError
from agentrl.tiny_policy import TinyShape, make_tiny_policy
from tests.workers.conftest import BatchMaker, WorkerMaker, same_weights, weights

OPTIMS = {
    "adamw": OptimConfig(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=2),
    "muon": OptimConfig(name="muon", lr=2e-2, adamw_lr=5e-3, lr_scheduler_type="linear"),
}


@pytest.mark.parametrize("optim", list(OPTIMS))
def test_save_and_load_continue_bit_for_bit(
    make_worker: WorkerMaker, make_batch: BatchMaker, tmp_path: Path, optim: str
) -> None:
    config = ActorConfig(ppo_mini_batch_size=2, optim=OPTIMS[optim])
    straight, resumed = make_worker(config), make_worker(config)
    for step in (1, 2):
        batch = make_batch(seed=step)
        batch.old_logprobs, _ = straight.compute_log_probs(batch)
        straight.update(batch, step=step)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    assert same_weights(straight, resumed)
    saved = weights(straight)
    for worker in (straight, resumed):
        batch = make_batch(seed=3)
        batch.old_logprobs, _ = worker.compute_log_probs(batch)
        worker.update(batch, step=3)
    assert same_weights(straight, resumed)
    assert any(not torch.equal(saved[name], tensor) for name, tensor in resumed.named_tensors())


@pytest.fixture
def saved(make_worker: WorkerMaker, make_batch: BatchMaker, tmp_path: Path) -> Path:
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4))
    worker.update(make_batch(), step=1)
    worker.save(tmp_path / "policy")
    return tmp_path / "policy"


def test_a_checkpoint_of_another_model_is_refused(make_worker: WorkerMaker, saved: Path, tmp_path: Path) -> None:
    other = make_tiny_policy(
        tmp_path / "other", 0, shape=TinyShape(vocab=320, hidden=32, layers=2, heads=2, kv_heads=1, intermediate=96)
    )
    worker = make_worker(model=ModelConfig(path=str(other)))
    before = weights(worker)
    with pytest.raises(
        CheckpointError,
        match=r"another.*gate_proj\.weight: this model has float32 \[96, 32\], the checkpoint has float32 \[64, 32\]",
    ):
        worker.load(saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in worker.named_tensors())


def test_a_deeper_model_is_refused(make_worker: WorkerMaker, saved: Path, tmp_path: Path) -> None:
    shape = TinyShape(vocab=320, hidden=32, layers=3, heads=2, kv_heads=1, intermediate=64)
    worker = make_worker(model=ModelConfig(path=str(make_tiny_policy(tmp_path / "deep", 0, shape=shape))))
    with pytest.raises(CheckpointError, match=r"layers\.2\..* this model has float32 .*, the checkpoint has nothing"):
        worker.load(saved)


@pytest.mark.parametrize("name", ["weights.safetensors", "optimizer.safetensors", "state.json"])
def test_a_half_written_checkpoint_is_refused(make_worker: WorkerMaker, saved: Path, name: str) -> None:
    worker = make_worker()
    before = weights(worker)
    path = saved / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=rf"{name}: broken .*delete this checkpoint"):
        worker.load(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        worker.load(saved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in worker.named_tensors())


def test_optimizer_state_that_lost_a_tensor_is_refused(make_worker: WorkerMaker, saved: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / "optimizer.safetensors")
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, saved / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match=f"half-written, '{lost}' is missing"):
        make_worker().load(saved)


def test_another_optimizer_is_refused(make_worker: WorkerMaker, saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"made with optim\.name=adamw, this run has optim\.name=muon"):
        make_worker(ActorConfig(optim=OptimConfig(name="muon"))).load(saved)


def test_another_format_is_refused(make_worker: WorkerMaker, saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(CheckpointError, match="expected format 1, found 99"):
        make_worker().load(saved)
