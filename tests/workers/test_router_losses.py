"""Losses of a mixture's routers, against transformers' own, however an optimizer step is cut."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from agentrl.algorithms.router_losses import RouterLosses, expert_counts, router_losses
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.sft import SFTConfig
from agentrl.errors import ConfigError
from agentrl.model.packed import token_logprobs, use_packed_attention
from agentrl.model.routing import follow_routes
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers import PolicyWorker
from agentrl.workers.learner import checkpoint_layers
from agentrl.workers.sft import SupervisedWorker
from tests.model.families import batch, make_model
from tests.naming import Names, naming
from tests.workers.conftest import BatchMaker, WorkerMaker, fsdp, same_weights

BOTH = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.01}
SOFTMAX = ("qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "gpt-oss")


def one_micro_batch(model: PreTrainedModel) -> tuple[RouterLosses, list[torch.Tensor]]:
    """The losses of one micro-batch, and the logits of each layer's router in transformers' own forward."""
    ids, offsets = batch()
    own: list[list[torch.Tensor]] = []
    with torch.no_grad():
        for start, end in itertools.pairwise(offsets.tolist()):
            own.append(list(model(input_ids=ids[None, start:end], output_router_logits=True).router_logits))
    logits = [torch.cat([one[layer].flatten(0, -2) for one in own]) for layer in range(len(own[0]))]
    shape = follow_routes(use_packed_attention(model))
    found = token_logprobs(model, ids, offsets, needs=frozenset({"experts", "router"}))
    assert found.router is not None and found.experts is not None
    counts = expert_counts(found.experts, *shape)
    assert counts.sum(1).tolist() == [2 * len(ids)] * shape[0]
    return router_losses(found.router, counts / counts.sum(1, keepdim=True), len(ids)), logits


@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("family", SOFTMAX)
def test_they_are_transformers_own_of_each_layer(family: str) -> None:
    """Whose balancing loss is k in balance for k experts a token, and ours 1."""
    found, logits = one_micro_batch(make_model(family))
    balance = sum(load_balancing_loss_func((one,), one.shape[1], top_k=2) / 2 for one in logits)
    assert found.balance.item() == pytest.approx(float(balance), rel=1e-5)
    assert found.balance > len(logits), "the random routers are not in balance"
    z = sum(router_z_loss_func(one[None]) for one in logits)
    assert found.z.item() == pytest.approx(float(z), rel=1e-5)


def test_probabilities_of_sigmoid_routers_are_their_shares() -> None:
    """DeepSeek-V3, as Megatron has it."""
    ids, offsets = batch()
    model = use_packed_attention(make_model("deepseek-v3"))
    layers, experts = follow_routes(model)
    router: Any = next(module for module in model.modules() if type(module).__name__ == "DeepseekV3TopkRouter")
    seen: list[torch.Tensor] = []
    router.register_forward_hook(lambda module, args, result: seen.append(result[0]))
    found = token_logprobs(model, ids, offsets, needs=frozenset({"router"})).router
    assert found is not None and tuple(found.shape) == (layers, experts + 1)
    assert found[:, :experts].sum(1).tolist() == pytest.approx([len(ids)] * layers, rel=1e-5)
    if len(seen[0]) == len(ids):
        scores = seen[0].sigmoid()
        assert torch.allclose(found[0, :experts], (scores / scores.sum(-1, keepdim=True)).sum(0), rtol=1e-4)


def test_both_have_the_gradient_of_transformers_own_also_when_layers_are_recomputed() -> None:
    """Of a model of one layer, whose loss transformers' own backward goes through."""
    ids = torch.arange(3, 40)
    own = make_model("qwen3-moe", num_hidden_layers=1)
    logits = own(input_ids=ids[None], output_router_logits=True).router_logits
    parts = load_balancing_loss_func(logits, 4, top_k=2), router_z_loss_func(logits[0][None])
    balance, z = map(torch.as_tensor, parts)
    (balance / 2 + z).backward()
    for recompute in (False, True):
        model = use_packed_attention(make_model("qwen3-moe", num_hidden_layers=1))
        shape = follow_routes(model)
        if recompute:
            checkpoint_layers(model)
        found = token_logprobs(model, ids, torch.tensor([0, len(ids)]), needs=frozenset({"experts", "router"}))
        assert found.router is not None and found.experts is not None
        counts = expert_counts(found.experts, *shape)
        losses = router_losses(found.router, counts / counts.sum(1, keepdim=True), len(ids))
        (losses.balance + losses.z).backward()
        for (name, one), other in zip(own.named_parameters(), model.parameters(), strict=True):
            if one.grad is not None and one.grad.abs().max() > 0:
                assert other.grad is not None and torch.allclose(other.grad, one.grad, rtol=1e-3, atol=1e-6), name


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, vocab_size: int) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    make_model("qwen3-moe", vocab_size=vocab_size).save_pretrained(path)
    return path


Update = tuple[PolicyWorker, dict[str, float]]


def updated(make_worker: WorkerMaker, mixture: Path, batch: RaggedBatch, **actor: object) -> Update:
    worker = make_worker(ActorConfig.model_validate({"optim": {"lr": 1e-3}, **actor}), ModelConfig(path=str(mixture)))
    return worker, worker.update(batch, step=1)


def test_micro_batches_change_nothing(make_worker: WorkerMaker, make_batch: BatchMaker, mixture: Path) -> None:
    """A product of means by micro-batch would. Common beginnings are computed once, and count as often as they are."""
    found = [
        updated(make_worker, mixture, make_batch(), ppo_max_token_len_per_gpu=size, strategy_options=BOTH)
        for size in (10_000, 60)
    ]
    (whole, metrics), (cut, same) = found
    assert same == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    assert metrics["actor/moe_aux_loss"] > 2 and metrics["actor/moe_z_loss"] > 0, "two layers"
    for (name, one), (_, other) in zip(fsdp(whole).named_tensors(), fsdp(cut).named_tensors(), strict=True):
        differ = (one - other).abs() > 1e-5  # AdamW's first step has the sign of a gradient that is all but 0
        assert differ.float().mean() < 1e-2, name
    plain, without = updated(make_worker, mixture, make_batch())
    assert "actor/moe_aux_loss" not in without and not same_weights(whole, plain, 1e-4)
    assert without["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"], rel=1e-6)


def test_the_load_of_replayed_experts_is_known(make_worker: WorkerMaker, make_batch: BatchMaker, mixture: Path) -> None:
    """The experts of the pass before the update give what the pass that counts them gives."""
    batch, metrics = make_batch(), []
    for mode in ("disabled", "R2"):
        actor = ActorConfig.model_validate({"strategy_options": BOTH, "router_replay": {"mode": mode}})
        worker = make_worker(actor, ModelConfig(path=str(mixture)))
        if mode == "R2":
            worker.compute_log_probs(batch)
            batch = batch.with_fields(experts=worker.of_log_probs().values)
        metrics.append(worker.update(batch, step=1))
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-6)


def test_experts_are_used_more_alike(make_worker: WorkerMaker, make_batch: BatchMaker, mixture: Path) -> None:
    batch = make_batch()
    batch = batch.with_fields(advantages=torch.zeros(batch.num_tokens))
    actor = {"optim": {"lr": 1e-2}, "strategy_options": {"moe_aux_loss_coeff": 1.0}}
    worker = make_worker(ActorConfig.model_validate(actor), ModelConfig(path=str(mixture)))
    losses = [worker.update(batch, step=step)["actor/moe_aux_loss"] for step in range(1, 13)]
    assert losses[-1] - 2 < 0.5 * (losses[0] - 2), "2 is balance in two layers"


def test_supervised_training_has_them_too(make_batch: BatchMaker, mixture: Path) -> None:
    made = make_batch(prompts=3, n=1)
    rows = RaggedBatch.unsampled(made.offsets, made.ids, made.mask, made.group, made.trajectory)
    tree: dict[str, Any] = {"data": {"train_files": "none"}, "model": {"path": str(mixture)}}
    plain, weighed = (
        SupervisedWorker(SFTConfig.model_validate(tree | more), device="cpu", total_steps=10).update(rows, step=1)
        for more in ({}, {"strategy_options": BOTH})
    )
    assert weighed["sft/moe_aux_loss"] > 2 and weighed["sft/loss"] == pytest.approx(plain["sft/loss"], rel=1e-6)
    assert weighed["sft/grad_norm"] != pytest.approx(plain["sft/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("actor", "why"),
    [
        ({"strategy_options": {"moe_aux_loss": 1}}, ("key 'moe_aux_loss'", "'moe_aux_loss_coeff'", "unknown")),
        ({"strategy_options": BOTH, "use_torch_compile": True}, "use_torch_compile=true"),
        ({"strategy_options": BOTH}, "Qwen3ForCausalLM"),
    ],
)
def test_what_cannot_be_is_refused(make_worker: WorkerMaker, actor: dict[str, object], why: Names) -> None:
    with naming(ConfigError, why):
        make_worker(ActorConfig.model_validate(actor))
