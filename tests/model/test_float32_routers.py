"""Routers of mixtures of experts compute in float32, also where all other layers compute in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from agentrl.model.attention import PackedAttention
from agentrl.model.compiled import compile_layers, text_layers
from agentrl.model.layout import flat_layout
from agentrl.model.packed import empty_model, forward_packed, load_model, token_logits, use_packed_attention
from tests.model.families import make_model
from tests.model.test_routing import MIXTURES, routers


@contextmanager
def seen(model: nn.Module) -> Iterator[list[tuple[nn.Module, torch.Tensor, Any]]]:
    """Collect each router with its states [P, H] and its answer."""
    found: list[tuple[nn.Module, torch.Tensor, Any]] = []
    hooks = [
        one.register_forward_hook(lambda router, args, answer: found.append((router, args[0], answer)))
        for one in routers(model)
    ]
    yield found
    for hook in hooks:
        hook.remove()


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(1, 61)
    layout = flat_layout(torch.tensor([0, 25, 60]), ids.device)
    return token_logits(model, forward_packed(model, ids, layout.positions, PackedAttention(layout)))


def in_precision(family: str, kind: str) -> tuple[Any, bool]:
    """A model as the trainer has it (float32 weights under autocast), or as the engine has it (bfloat16 weights)."""
    model = use_packed_attention(make_model(family))
    if kind == "engine":
        torch.nn.Module.to(model, torch.bfloat16)
        for router in routers(model):  # what transformers keeps when it loads a model
            if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
                bias.data = bias.data.float()
    return model, kind == "trainer"


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("kind", ["trainer", "engine"])
def test_logits_and_gates_are_not_rounded(family: str, kind: str) -> None:
    model, autocast = in_precision(family, kind)
    with seen(model) as found, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits(model)
    assert found
    for router, hidden, answer in found:
        exact = copy.deepcopy(router).double()
        exact.__class__ = type(router).__base__  # type: ignore[assignment]  # transformers' own
        for weight in exact.parameters():
            weight.data = weight.data.bfloat16().double()
        with torch.no_grad():
            _, gates, experts = exact(hidden.reshape(-1, hidden.shape[-1]).bfloat16().double())
        own_logits, own_gates, own_experts = answer
        assert own_logits.dtype == own_gates.dtype == torch.float32
        assert torch.equal(own_experts.sort(-1).values, experts.sort(-1).values)
        order, own_order = experts.argsort(-1), own_experts.argsort(-1)
        assert torch.allclose(own_gates.gather(1, own_order).double(), gates.gather(1, order).double(), atol=1e-5)


@pytest.mark.parametrize("family", MIXTURES)
def test_gradients_reach_the_router(family: str) -> None:
    model, _ = in_precision(family, "trainer")
    with torch.autocast("cpu", torch.bfloat16):
        logits(model).logsumexp(-1).sum().backward()
    gradients = [router.weight.grad for router in routers(model)]
    plain = use_packed_attention(make_model(family))
    logits(plain).logsumexp(-1).sum().backward()
    for found, router in zip(gradients, routers(plain), strict=True):
        wanted: Any = router.weight.grad
        assert isinstance(found, torch.Tensor) and found.dtype == torch.float32
        assert torch.cosine_similarity(found.flatten(), wanted.flatten(), dim=0) > 0.9


def test_a_model_that_is_loaded_by_shards_has_them_once(tmp_path: Path) -> None:
    make_model("qwen3-moe").save_pretrained(tmp_path)
    model = use_packed_attention(load_model(str(tmp_path)))
    assert list(map(type, routers(model))) == list(map(type, routers(empty_model(str(tmp_path)))))
    own = Qwen3MoeTopKRouter
    assert all(type(router).__base__ is own and type(router).__name__ == own.__name__ for router in routers(model))


@pytest.mark.slice(0, "matrix")
def test_layers_share_a_compiled_program() -> None:
    torch.compiler.reset()
    torch.compiler.set_default_backend("eager")
    made = []
    for layers in (2, 4):
        model = use_packed_attention(make_model("qwen3-moe", num_hidden_layers=layers))
        compile_layers(text_layers(model), "cpu")
        torch.compiler.reset()
        counters.clear()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits(model)
        made.append(counters["stats"]["unique_graphs"])
    torch.compiler.set_default_backend(None)
    torch.compiler.reset()
    assert made[0] == made[1] > 0
