"""Layers that the backward pass computes again: as many as the key says, and all once the memory is used up."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.errors import ConfigError
from agentrl.model.compiled import text_layers
from agentrl.model.packed import token_logprobs, use_packed_attention
from agentrl.model.scores import TokenScores
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from agentrl.workers.backend import MiniBatch
from agentrl.workers.learner import checkpoint_layers
from agentrl.workers.passes import Pass
from tests.naming import assert_names, naming
from tests.workers.conftest import SHAPE, BatchMaker, WorkerMaker, fsdp, same_weights
from tests.workers.made import policy_worker

ADAMW = OptimConfig(lr=1e-2)


def test_gradients_are_the_same_bits_however_many_layers_are_computed_again(
    make_batch: BatchMaker, tmp_path: Path
) -> None:
    path = make_tiny_policy(tmp_path, seed=0, shape=replace(SHAPE, layers=4))
    batch, found = make_batch(), {}
    for value in (False, 2, 3, True):
        model = ModelConfig(path=str(path), enable_gradient_checkpointing=value)
        worker = policy_worker(model, ActorConfig(ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=100, optim=ADAMW))
        runs = count_runs(worker)
        gradients = watch_gradients(worker)
        worker.update(batch, step=1)
        micro_batches = len(fsdp(worker).micro_batches(batch))
        assert runs == [micro_batches * (2 if layer < model.recomputed(4) else 1) for layer in range(4)]
        found[value] = gradients
    assert micro_batches > 1 and len(found[False]) > 20
    for value, gradients in found.items():
        assert all(torch.equal(gradients[name], plain) for name, plain in found[False].items()), value


def test_layers_that_are_computed_again_drop_nothing_out() -> None:
    """OPT's layers call the function of dropout themselves, by their own flag."""
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    config = AutoConfig.for_model("opt", vocab_size=61, ffn_dim=48, num_attention_heads=4, dropout=0.5, **sizes)
    model = use_packed_attention(AutoModelForCausalLM.from_config(config))
    ids, offsets, found = torch.arange(24), torch.tensor([0, 9, 24]), []
    for _ in range(2):
        model.zero_grad()
        logprobs = token_logprobs(model, ids, offsets).logprobs
        logprobs.sum().backward()
        found.append([logprobs, *(param.grad for param in model.parameters() if param.grad is not None)])
        checkpoint_layers(model)
    assert len(found[0]) == len(found[1]) > 20
    assert all(torch.equal(one, again) for one, again in zip(*found, strict=True))


def test_a_model_whose_layers_cannot_be_computed_again_is_refused_by_the_key() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", vocab_size=61, num_local_experts=2, intermediate_size=16, **sizes)
    with naming(ConfigError, "enable_gradient_checkpointing", "JetMoeForCausalLM", "false"):
        checkpoint_layers(AutoModelForCausalLM.from_config(config))


def count_runs(worker: PolicyWorker) -> list[int]:
    """Count how often each layer runs, from now on."""
    layers = text_layers(fsdp(worker).model.base)
    runs = [0] * len(layers)
    for place, layer in enumerate(layers):
        layer.self_attn.register_forward_hook(lambda *_, place=place: runs.__setitem__(place, runs[place] + 1))  # type: ignore[union-attr]
    return runs


def watch_gradients(worker: PolicyWorker) -> dict[str, torch.Tensor]:
    """Copy the gradients of the next optimizer step."""
    found: dict[str, torch.Tensor] = {}
    optim, taken = fsdp(worker).optim, fsdp(worker).optim.step

    def step(at: float) -> float:
        found.update(
            {name: param.grad.clone() for name, param in fsdp(worker).params.items() if param.grad is not None}
        )
        return taken(at)

    optim.step = step  # type: ignore[method-assign,assignment]
    return found


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("of_pass", [0, 2])
def test_a_micro_batch_that_runs_out_of_memory_is_tried_again_with_all_layers_computed_again(
    where: str, of_pass: int, make_worker: WorkerMaker, make_batch: BatchMaker, caplog: pytest.LogCaptureFixture
) -> None:
    """Fault injection: the device has no room for one pass of the update as long as layers keep their activations.

    In its backward pass half of the gradients have been added by then.
    """
    config = ActorConfig(ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=100, optim=ADAMW)
    plain, worker = make_worker(config), make_worker(config)
    first = text_layers(fsdp(worker).model.base)[0]
    passes = 0

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    def watch(layer: torch.nn.Module, given: object, output: torch.Tensor) -> None:
        nonlocal passes
        if layer.gradient_checkpointing or not torch.is_grad_enabled():
            return
        passes += 1
        if passes == of_pass + 1:
            fail() if where == "forward" else output.register_hook(fail)

    first.register_forward_hook(watch)
    reports = []
    for step in (1, 2):
        batch = make_batch(seed=step)
        batch = batch.with_fields(old_logprobs=plain.compute_log_probs(batch)[0])
        reports.append([one.update(batch, step=step, by_token=True) for one in (plain, worker)])
        assert same_weights(plain, worker)
        (mine, offsets, values), (other, ends, others) = (columns(one) for one in (plain, worker))
        assert torch.equal(mine, other) and torch.equal(offsets, ends)
        assert torch.equal(values.nan_to_num(7.0), others.nan_to_num(7.0)) and len(values) == batch.num_tokens
        assert [len(one.report.findings) for each in (plain, worker) for one in each.checked()] == [0, 0]
    assert passes == of_pass + 1 and all(left == right for left, right in reports)
    (said,) = [one.getMessage() for one in caplog.records if "ran out of memory" in one.getMessage()]
    assert_names(said, "2.00", "GiB", "2 layers")


def test_a_micro_batch_that_runs_out_of_memory_with_all_layers_computed_again_ends_the_update(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    model = ModelConfig(path=str(tiny_policy), enable_gradient_checkpointing=True)
    worker = make_worker(ActorConfig(optim=ADAMW), model)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    text_layers(fsdp(worker).model.base)[0].register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        worker.update(make_batch(), step=1)


def test_a_micro_batch_is_forgotten_where_none_is_tried_again(
    make_worker: WorkerMaker, make_batch: BatchMaker, tiny_policy: Path
) -> None:
    """Its columns lie on the device, a teacher's states among them."""
    model = ModelConfig(path=str(tiny_policy), enable_gradient_checkpointing=True)
    worker = make_worker(ActorConfig(ppo_mini_batch_size=4, ppo_max_token_len_per_gpu=100, optim=ADAMW), model)
    backend, seen, alive = fsdp(worker), list[weakref.ref[torch.Tensor]](), list[int]()
    made = backend.make_pass

    def make_pass(micro: RaggedBatch, mini: MiniBatch[TokenScores]) -> Pass[TokenScores]:
        alive.append(sum(one() is not None for one in seen))
        seen.append(weakref.ref(micro.ids))
        return made(micro, mini)

    backend.make_pass = make_pass  # type: ignore[method-assign]
    batch = make_batch()
    worker.update(batch.with_fields(old_logprobs=torch.zeros(batch.num_tokens)), step=1)
    assert len(seen) > 3 and max(alive) == 1, "the one before"


def columns(worker: PolicyWorker) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss's columns of the last update."""
    found = worker.of_update()
    return found.rows, found.offsets, found.values
