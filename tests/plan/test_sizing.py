"""The arithmetic of docs/scale.md, against models as transformers makes them and cases worked by hand."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.phi3.configuration_phi3 import Phi3Config
from transformers.models.starcoder2.configuration_starcoder2 import Starcoder2Config

from agentrl.model.packed import hidden_states, use_packed_attention
from agentrl.plan.counts import counted
from agentrl.plan.sizing import (
    ModelShape,
    Work,
    activation_bytes,
    attention_flops,
    forward_flops,
    fsdp_bytes,
    gathered_bytes,
    kv_bytes,
    layer_activation_bytes,
    logits_bytes,
    ring,
    state_bytes,
    ulysses_bytes,
    update_flops,
)
from agentrl.system.json_value import JSON

SMALL = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=10)
SEVEN = ModelShape(28, 3584, 28, 4, 128, 18944, 152064)
"""Qwen2.5-7B."""
SEVENTY = ModelShape(80, 8192, 64, 8, 128, 28672, 128256)
"""Llama-3.3-70B."""


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(hidden_size=256, intermediate_size=700, num_hidden_layers=3, vocab_size=999, num_key_value_heads=8),
        Qwen3Config(
            hidden_size=256,
            intermediate_size=700,
            num_hidden_layers=3,
            vocab_size=999,
            head_dim=64,
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        ),
        LlamaConfig(hidden_size=256, intermediate_size=700, num_hidden_layers=3, vocab_size=999),
        Qwen3MoeConfig(
            hidden_size=256,
            moe_intermediate_size=96,
            num_hidden_layers=2,
            vocab_size=999,
            num_experts=8,
            num_experts_per_tok=2,
        ),
        AutoConfig.for_model(
            "glm4_moe",
            hidden_size=256,
            moe_intermediate_size=96,
            num_hidden_layers=2,
            vocab_size=999,
            n_routed_experts=8,
            n_shared_experts=0,
            first_k_dense_replace=0,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=32,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_are_those_of_the_real_model_but_for_norms_and_biases(config: PretrainedConfig) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    matrices = sum(param.numel() for param in model.parameters() if param.ndim > 1)
    assert ModelShape.from_config(config.to_dict()).params == matrices


UNLIKE_LLAMA: dict[str, dict[str, Any]] = {
    "arcee": {},  # an MLP without a gate
    "starcoder2": {},  # the same, and the head is the embedding where config.json does not say so
    "lfm2": {"full_attn_idxs": [0, 1, 2]},  # an MLP narrower than intermediate_size
    "gemma2": {"head_dim": 32},  # a tied head by the class's default
    "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 300},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 96, "first_k_dense_replace": 1, "head_dim": 32},
}


@pytest.mark.parametrize("family", UNLIKE_LLAMA)
def test_a_model_unlike_llama_is_counted_as_its_code_makes_it(family: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 700, "num_hidden_layers": 3, "vocab_size": 999}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": None}
    config = AutoConfig.for_model(family, **sizes, **heads, **UNLIKE_LLAMA[family])
    shape = counted(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    every = dict(model.named_parameters())
    assert shape.params == sum(param.numel() for param in every.values() if param.ndim > 1)
    layers = {name: param for name, param in every.items() if ".layers." in name and param.ndim > 1}
    experts = sum(param.numel() for param in layers.values() if param.ndim == 3)
    share = Fraction(shape.experts_per_token, shape.experts)
    assert shape.active_params == sum(map(torch.numel, layers.values())) - experts + experts * share
    head = 0 if model.config.tie_word_embeddings else 999 * 256
    assert shape.backbone_params == shape.params - head
    linear = [
        module for name, module in model.named_modules() if ".layers." in name and type(module) is torch.nn.Linear
    ]
    assert shape.lora_params(4) == 4 * sum(one.in_features + one.out_features for one in linear)


def test_experts_have_several_names_and_layers_of_states_are_not_counted() -> None:
    keys: dict[str, JSON] = {
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    shape = ModelShape.from_config({**keys, "moe_num_experts": 4, "moe_k": 3, "moe_intermediate_size": 5})
    assert (shape.experts, shape.experts_per_token, shape.intermediate) == (4, 3, 5)
    with pytest.raises(ValueError, match="mamba_d_state"):
        ModelShape.from_config({**keys, "mamba_d_state": 16})


def test_known_models_have_the_size_that_they_are_called_by() -> None:
    assert SEVEN.params == pytest.approx(7.6156e9, rel=1e-4)
    assert SEVENTY.params == pytest.approx(70.55e9, rel=1e-4)
    assert SEVEN.lora_params(32) == pytest.approx(80.7e6, rel=1e-3)


def test_flops_of_a_hand_worked_case() -> None:
    layer = 2 * 8 * (8 + 4) + 3 * 8 * 16  # 576: attention 192, MLP 384
    assert SMALL.active_params == 2 * layer
    work = Work.from_lengths([3, 5], scored=2)
    pairs = 9 + 25
    attention = 2 * 2 * 8 * pairs  # two products of 2 FLOPs, half of the pairs, 2 layers, 8 wide
    assert attention_flops(SMALL, work) == attention
    head = 2 * 80 * 2
    assert forward_flops(SMALL, work) == 2 * 2 * layer * 8 + attention + head
    assert update_flops(SMALL, work, recompute=False, recompute_head=False) == 3 * forward_flops(SMALL, work)
    again = update_flops(SMALL, work, recompute=True) - update_flops(SMALL, work, recompute=False)
    assert again == 2 * 2 * layer * 8 + attention
    adapters = update_flops(SMALL, work, recompute=False, lora=True, recompute_head=False)
    assert adapters == 2 * (2 * 2 * layer * 8 + head) + 3 * attention


def test_memory_of_hand_worked_cases() -> None:
    assert state_bytes(1000, 4, trained=True) == {"weights": 1000, "gradients": 1000, "optimizer": 2000}
    assert state_bytes(1000, 4, trained=False) == {"weights": 500}
    assert kv_bytes(SEVEN) == 57_344  # 2 x 28 x 4 x 128 x 2
    assert kv_bytes(SEVENTY) == 327_680
    assert gathered_bytes(SMALL, cast=False) == 160 * 4 + 2 * 576 * 4 + 576 * 4
    assert gathered_bytes(SMALL, dtype=2, cast=False) == 160 * 4 + 2 * 576 * 2 + 576 * 4
    assert logits_bytes(SEVEN, 32768, 1 << 24) == 3 * 64 * 2**20
    assert logits_bytes(SEVEN, 32768, None) == 3 * 4 * 152064 * 32768
    layer = layer_activation_bytes(SMALL, autocast=False)
    assert activation_bytes(SMALL, 10, autocast=False, recomputed=0) == 20 * layer
    assert activation_bytes(SMALL, 10, autocast=False, recomputed=2) == 10 * layer + 2 * 4 * 8 * 10
    assert activation_bytes(SMALL, 10, autocast=False, recomputed=1) == 10 * layer + 4 * 8 * 10, "one keeps all"
    seven = [activation_bytes(SEVEN, 100, autocast=True, recomputed=count) for count in range(29)]
    assert seven[:-1] == sorted(seven[:-1], reverse=True) and seven[-1] > seven[-2], "all keep one more input"


def test_bytes_that_travel_in_hand_worked_cases() -> None:
    assert ring(800, 8) == 700
    assert fsdp_bytes(100, 4, 3, trained=False, dtype=2) == 3 * 150
    assert fsdp_bytes(100, 4, 3, trained=True, dtype=2) == 3 * (2 * 150 + 300)
    # 12 tokens over 4 ranks: 3 each; queries and result 8 wide, keys and values 4; 3 of 4 parts leave; 2 layers.
    assert ulysses_bytes(SMALL, 12, 4, passes=1) == 2 * 3 * (8 + 4 + 4 + 8) * 2 * 3 / 4


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", [Qwen2Config, Qwen3Config])
def test_a_layer_keeps_the_activations_that_are_counted(kind: type[PretrainedConfig], autocast: bool) -> None:
    one, two = (kept_bytes_by_token(kind, layers, autocast) for layers in (1, 2))
    shape = ModelShape.from_config(config_of(kind, 1).to_dict())
    assert two - one == pytest.approx(layer_activation_bytes(shape, autocast=autocast), rel=0.01)


@pytest.mark.parametrize("autocast", [False, True])
def test_an_mlp_without_a_gate_keeps_half_as_much(autocast: bool) -> None:
    one, two = (kept_bytes_by_token(Starcoder2Config, layers, autocast) for layers in (1, 2))
    shape = counted(config_of(Starcoder2Config, 1))
    # Its norms keep their normalised values as inputs of linear layers alone.
    assert two - one == pytest.approx(layer_activation_bytes(shape, autocast=autocast), rel=0.25)


@pytest.mark.parametrize(
    ("kind", "gated"),
    [
        (GPTNeoXConfig, False),
        (Starcoder2Config, False),
        (Qwen3Config, True),
        (Qwen3MoeConfig, True),
        (Phi3Config, True),
    ],
)
def test_a_gate_is_found_in_the_model_itself(kind: type[PretrainedConfig], gated: bool) -> None:
    assert counted(config_of(kind, 1)).gated == gated


def config_of(kind: type[PretrainedConfig], layers: int) -> PretrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    return kind(**sizes)


def kept_bytes_by_token(kind: type[PretrainedConfig], layers: int, autocast: bool, tokens: int = 200) -> float:
    """Of all tensors kept for the backward pass that have a row for each token."""
    model = use_packed_attention(AutoModelForCausalLM.from_config(config_of(kind, layers), dtype=torch.float32))
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in weights and tokens in tensor.shape:
            kept[storage] = tensor
        return tensor

    ids = torch.arange(tokens) % 60
    with saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden = hidden_states(model, ids, torch.tensor([0, tokens]))
    assert len(hidden) == tokens
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / tokens
