"""Experts that are recorded in one forward pass and replayed in another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from agentrl.engines.contract import Generation, SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.errors import ConfigError
from agentrl.model.attention import PackedAttention
from agentrl.model.layout import flat_layout
from agentrl.model.packed import forward_packed, token_logprobs, use_packed_attention
from agentrl.model.routing import Routes, follow_routes
from agentrl.trajectory import Trajectory, Transcript, Turn
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.collate import from_trajectories
from agentrl.workers.learner import checkpoint_layers
from tests.model.families import batch, make_model
from tests.naming import naming

MIXTURES = ("qwen2-moe", "qwen3-moe", "mixtral", "olmoe", "gpt-oss", "deepseek-v2", "deepseek-v3", "qwen3-next")


def mixture(family: str = "qwen3-moe", **changes: Any) -> PreTrainedModel:
    model = use_packed_attention(make_model(family, **changes))
    follow_routes(model)
    return model


def routers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if type(module).__name__.lower().endswith("router")]


def recorded(model: PreTrainedModel, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """What the routers choose: [T, L, k]."""
    routes, layout = Routes(), flat_layout(offsets, ids.device)
    with torch.no_grad():
        forward_packed(model, ids, layout.positions, PackedAttention(layout), None, routes)
    return routes.recorded()


def swap_twins(model: PreTrainedModel) -> None:
    """Make routers find experts 0 and 1 about equally good, and the other one of them the better one."""
    with torch.no_grad():
        for router in routers(model):
            assert isinstance(router.weight, nn.Parameter)
            router.weight[[0, 1]] = router.weight[[1, 0]].clone()


def with_twins(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for router in routers(model):
            assert isinstance(router.weight, nn.Parameter)
            noise = torch.randn(router.weight.shape[1], generator=torch.Generator().manual_seed(5))
            router.weight[1] = router.weight[0] + 1e-5 * noise
            if isinstance(bias := getattr(router, "bias", None), nn.Parameter):
                bias[1] = bias[0]
    return model


@pytest.mark.slice(3, "matrix")
@pytest.mark.parametrize("family", MIXTURES)
def test_another_router_is_made_to_choose_what_was_recorded(family: str) -> None:
    model = mixture(family)
    ids, offsets = batch()
    experts = recorded(model, ids, offsets)
    assert experts.shape[0] == len(ids) and experts.shape[2] == 2 and experts.dtype == torch.uint8
    own = token_logprobs(model, ids, offsets).logprobs
    assert torch.allclose(token_logprobs(model, ids, offsets, experts=experts).logprobs, own, rtol=0, atol=1e-5)
    with_twins(model)
    experts = recorded(model, ids, offsets)
    own = token_logprobs(model, ids, offsets, experts=experts).logprobs
    swap_twins(model)
    other = token_logprobs(model, ids, offsets).logprobs
    assert (other - own).abs().max() > 0.05, "the swapped experts are others"
    replayed = token_logprobs(model, ids, offsets, experts=experts).logprobs
    assert (replayed - own).abs().max() < 2e-3 and (replayed - own).abs().max() < 0.05 * (other - own).abs().max()


def test_any_experts_can_be_replayed_and_each_counts_by_its_gate() -> None:
    """Of one layer: the probabilities of the replayed experts, whose sum is 1 again."""
    model = mixture(num_hidden_layers=1, norm_topk_prob=True)
    block: Any = model.get_submodule("model.layers.0.mlp")
    seen: list[tuple[torch.Tensor, ...]] = []
    block.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    ids, offsets = torch.arange(3, 9), torch.tensor([0, 6])
    chosen = torch.tensor([[0, 3], [1, 2], [2, 0], [3, 1], [1, 0], [2, 3]])
    token_logprobs(model, ids, offsets, experts=chosen[:, None].to(torch.uint8))
    hidden, experts, gates = seen[-1]
    assert torch.equal(experts, chosen)
    probabilities = (hidden @ block.gate.weight.T).softmax(-1).gather(1, chosen)
    assert torch.allclose(gates, probabilities / probabilities.sum(-1, keepdim=True), atol=1e-6)


def test_routers_learn_through_the_gates_of_replayed_experts_also_when_layers_are_recomputed() -> None:
    ids, offsets = batch()
    generator = torch.Generator().manual_seed(1)
    experts = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(2 * len(ids))]).view(-1, 2, 2)
    found = []
    for recompute in (False, True):
        model = mixture()
        if recompute:
            checkpoint_layers(model)
        loss = token_logprobs(model, ids, offsets, experts=experts).logprobs.sum()
        token_logprobs(model, ids, offsets)  # a forward without routes in between
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert all(gradients[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 1e-3 for layer in (0, 1))
        found.append((loss.item(), gradients))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        assert torch.allclose(gradient, found[1][1][name], rtol=1e-4, atol=1e-5), name


def test_equal_beginnings_with_other_experts_are_not_computed_once() -> None:
    model = mixture()
    ids, offsets = torch.tensor([5, 6, 7, 8, 5, 6, 7, 8]), torch.tensor([0, 4, 8])
    experts = torch.tensor([[0, 1]] * 4 + [[2, 3]] * 4)[:, None].expand(-1, 2, -1)
    both = token_logprobs(model, ids, offsets, experts=experts).logprobs
    for part in (slice(0, 4), slice(4, 8)):
        alone = token_logprobs(model, ids[part], torch.tensor([0, 4]), experts=experts[part]).logprobs
        assert torch.allclose(both[part], alone, atol=1e-5)
    assert (both[1:4] - both[5:8]).abs().max() > 0.01


def test_models_without_such_routers_are_refused() -> None:
    with naming(ConfigError, "router_replay.mode", "Qwen3ForCausalLM"):
        follow_routes(use_packed_attention(make_model("qwen3")))
    model = mixture()
    router: Any = routers(model)[0]
    router.num_experts = 5  # stands for a router that chooses in another way
    with naming(ConfigError, "torch.topk"):
        recorded(model, *batch())


async def dialogues(engine: EmbeddedEngine) -> list[Transcript]:
    """Three of one prompt and one of another, each of three turns, at once; one is thrown out of the cache."""

    async def dialogue(name: int) -> Transcript:
        transcript = Transcript()
        transcript.append_prompt([7, 8, 9, 10, 11] if name < 3 else list(range(20, 60)))
        for turn in range(3):
            params = SamplingParams(max_new_tokens=3 + name + turn, seed=10 * name + turn)
            generation: Generation = await engine.generate(transcript.ids, params, f"session {name}")
            transcript.append_sampled(generation.ids, generation.logprobs, generation.versions, generation.experts)
            if turn == 0 and name == 1:
                await engine.flush_cache()
            transcript.append_observed([12, 13 + name, 14])
        return transcript

    return list(await asyncio.gather(*map(dialogue, range(4))))


def batch_of(transcripts: list[Transcript]) -> RaggedBatch:
    trajectories = []
    for index, transcript in enumerate(transcripts):
        turns = [Turn("assistant", "", 0, span.start, span.end) for span in transcript.versions]
        trajectories.append(Trajectory(f"{index}", index, transcripts=[transcript], turns=turns, score=0.0))
    return from_trajectories(trajectories, turn_reward_coef=1.0, experts=True)


async def test_the_trainers_log_probs_are_the_engines_where_its_router_would_choose_otherwise() -> None:
    model = with_twins(use_packed_attention(make_model("qwen3-moe")))
    engine = EmbeddedEngine(model, max_num_seqs=3, max_model_len=128, records_experts=True)
    transcripts = await dialogues(engine)
    await engine.close()
    batch = batch_of(transcripts)
    assert batch.experts is not None and batch.experts.dtype == torch.uint8
    assert tuple(batch.experts.shape) == (batch.num_tokens, 2, 2)
    trainer = with_twins(mixture())
    swap_twins(trainer)

    def gap(experts: torch.Tensor | None) -> float:
        scores = token_logprobs(trainer, batch.ids, batch.offsets, needed=batch.mask, experts=experts)
        return float((scores.logprobs.detach() - batch.rollout_logprobs)[batch.mask].abs().max())

    assert gap(None) > 0.05
    assert gap(batch.experts) < 1e-3
    swap_twins(trainer)
    assert gap(batch.experts) < 1e-5, "with the engine's own weights to rounding"
