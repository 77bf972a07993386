"""Checkpoints of a worker: exact, and refused when they do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import CheckpointError
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from tests.naming import Names, assert_names, naming
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp, same_weights, weights

SHARD = "shard-00001-of-00001.safetensors"
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
        batch = batch.with_fields(old_logprobs=straight.compute_log_probs(batch)[0])
        straight.update(batch, step=step)
    straight.save(tmp_path)
    resumed.load(tmp_path)
    assert same_weights(straight, resumed)
    saved = weights(straight)
    for worker in (straight, resumed):
        batch = make_batch(seed=3)
        batch = batch.with_fields(old_logprobs=worker.compute_log_probs(batch)[0])
        worker.update(batch, step=3)
    assert same_weights(straight, resumed)
    assert any(not torch.equal(saved[name], tensor) for name, tensor in fsdp(resumed).named_tensors())


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
    with naming(CheckpointError, "gate_proj.weight", "float32", "[96, 32]", "[64, 32]"):
        worker.load(saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in fsdp(worker).named_tensors())


def test_a_deeper_model_is_refused(make_worker: WorkerMaker, saved: Path, tmp_path: Path) -> None:
    shape = TinyShape(vocab=320, hidden=32, layers=3, heads=2, kv_heads=1, intermediate=64)
    worker = make_worker(model=ModelConfig(path=str(make_tiny_policy(tmp_path / "deep", 0, shape=shape))))
    with naming(CheckpointError, "layers.2.", "float32"):
        worker.load(saved)


@pytest.mark.parametrize("name", [SHARD, "state.json"])
def test_a_half_written_checkpoint_is_refused(make_worker: WorkerMaker, saved: Path, name: str) -> None:
    worker = make_worker()
    before = weights(worker)
    path = saved / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with naming(CheckpointError, name, "broken"):
        worker.load(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        worker.load(saved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in fsdp(worker).named_tensors())


def test_optimizer_state_that_lost_a_tensor_is_refused(make_worker: WorkerMaker, saved: Path) -> None:
    with safe_open(saved / SHARD, "pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        header = shard.metadata()
    lost = next(name for name in tensors if name.endswith("/exp_avg"))
    del tensors[lost]
    save_file(tensors, saved / SHARD, header)
    with pytest.raises(CheckpointError, match=f"half-written, '{lost}' is missing"):
        make_worker().load(saved)


def rewrite(saved: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change what the shard holds, and have state.json name just that."""
    with safe_open(saved / SHARD, "pt") as shard:
        tensors = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
        header = shard.metadata()
    change(tensors)
    where = json.loads(header["DCP_SHARDING_INFO"])
    offsets = {name: where.get(name, {"saved_offsets": [0] * tensor.ndim}) for name, tensor in tensors.items()}
    save_file(tensors, saved / SHARD, {**header, "DCP_SHARDING_INFO": json.dumps(offsets)})
    described = json.loads((saved / "state.json").read_text())
    described["optimizer_tensors"] = {
        name: f"float32 {list(tensor.shape)}" for name, tensor in tensors.items() if "/" in name
    }
    (saved / "state.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.norm.weight", math.nan, ("'model.norm.weight'", "found nan")),
        ("model.norm.weight", -math.inf, ("'model.norm.weight'", "found -inf")),
        ("model.norm.weight/exp_avg", math.inf, "'model.norm.weight/exp_avg'"),
        ("model.norm.weight/exp_avg_sq", -1e-9, ("'model.norm.weight/exp_avg_sq'", "found -1e-09")),
        ("model.norm.weight/step", -1.0, ("'model.norm.weight/step'", "found -1")),
    ],
)
def test_values_that_no_training_holds_are_refused(
    make_worker: WorkerMaker, saved: Path, name: str, value: float, said: Names
) -> None:
    worker = make_worker()
    before = weights(worker)
    rewrite(saved, lambda tensors: tensors[name].reshape(-1)[-1:].fill_(value))
    with naming(CheckpointError, "broken", said):
        worker.load(saved)
    assert all(torch.equal(tensor, before[key]) for key, tensor in fsdp(worker).named_tensors())


def test_optimizer_state_that_is_not_whole_is_refused_and_none_is_told(
    make_worker: WorkerMaker, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker()
    worker.load(saved)
    assert not caplog.records
    rewrite(saved, lambda tensors: tensors.update({"model.norm.weight/more": torch.zeros(32)}))
    with naming(CheckpointError, "step, exp_avg, exp_avg_sq", "model.norm.weight"):
        worker.load(saved)
    rewrite(saved, lambda tensors: [tensors.pop(f"model.norm.weight/{kind}") for kind in ("more", "exp_avg")])
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight/exp_avg' is missing"):
        worker.load(saved)
    rewrite(saved, lambda tensors: [tensors.pop(name) for name in [*tensors] if "/" in name])
    worker.load(saved)
    count = len(weights(worker))
    assert_names(caplog.text, count, "critic_warmup")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing/exp_avg", r" of shape \[7\] is not the state of a parameter"),
        ("model.norm.weight/more", ": adamw remembers step, exp_avg, exp_avg_sq of model.norm.weight"),
    ],
)
def test_state_of_no_parameter_is_refused(make_worker: WorkerMaker, saved: Path, name: str, said: str) -> None:
    """A checkpoint from elsewhere cannot make the optimizer hold what it does not know."""
    places = {name: {"saved_offsets": [0]}}
    save_file({name: torch.zeros(7)}, saved / "more.safetensors", {"DCP_SHARDING_INFO": json.dumps(places)})
    described = json.loads((saved / "state.json").read_text())
    described["optimizer_tensors"][name] = "float32 [7]"
    (saved / "state.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=rf"broken \({name}{said}\)"):
        make_worker().load(saved)


def test_written_in_the_background_it_is_what_it_was(
    make_worker: WorkerMaker, make_batch: BatchMaker, tmp_path: Path
) -> None:
    """Updates that come before the files are written do not reach them, and what went wrong with them is told."""
    worker, resumed = make_worker(ActorConfig(ppo_mini_batch_size=4)), make_worker()
    worker.update(make_batch(), step=1)
    before = weights(worker)
    worker.save(tmp_path / "policy", background=True)
    worker.update(make_batch(), step=2)
    assert worker.finish_save()
    resumed.load(tmp_path / "policy")
    assert all(torch.equal(tensor, before[name]) for name, tensor in fsdp(resumed).named_tensors())
    (tmp_path / "file").touch()
    worker.save(tmp_path / "file" / "policy", background=True)
    with pytest.raises(NotADirectoryError):
        worker.finish_save()
    assert worker.finish_save(wait=False)


def test_another_optimizer_is_refused(make_worker: WorkerMaker, saved: Path) -> None:
    with naming(CheckpointError, "optim.name=adamw", "optim.name=muon"):
        make_worker(ActorConfig(optim=OptimConfig(name="muon"))).load(saved)


@pytest.mark.parametrize(
    "text",
    ["[1]", "null", '"x"', "{}", "[" * 100_000, '{"format": 2, "ranks": "1"}', '{"format": 2, "ranks": -1}', "\xff"]
    + [f'{{"format": 2, "ranks": 1, "optimizer": "adamw", "mark": {{}}, "weights": {wrong}}}' for wrong in ("[]", "1")],
)
def test_a_description_of_wrong_types_is_refused(make_worker: WorkerMaker, saved: Path, text: str) -> None:
    (saved / "state.json").write_text(text, encoding="latin-1")
    with naming(CheckpointError, "state.json"):
        make_worker().load(saved)


def test_another_format_is_refused(make_worker: WorkerMaker, saved: Path) -> None:
    state = json.loads((saved / "state.json").read_text())
    (saved / "state.json").write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(CheckpointError, match=r"has format 99.* reads 2"):
        make_worker().load(saved)
