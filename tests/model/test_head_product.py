"""A model's head: its products in half precision are rounded nowhere but in the operands, and its scale is measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from agentrl.model.head_product import HeadScale, head_products, scale_of
from agentrl.model.packed import use_packed_attention
from agentrl.model.vision import auto_class
from tests.devices import DEVICES
from tests.model.families import LATENT, MAMBA, SIZES

TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
ATTENDS = {name: LATENT[name] for name in LATENT if name.endswith(("_rank", "_head_dim", "_heads"))}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["autocast", "bfloat16"])
def test_logits_are_sums_in_float32(kind: str, bias: bool, device: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(256, 500, bias=bias, device=device, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    states = (4 * torch.randn(40, 256, device=device)).bfloat16().requires_grad_()
    wanted = torch.randn(40, 500, device=device)
    with torch.autocast(device, torch.bfloat16, enabled=kind == "autocast"):
        found = head_products(head, states)
        found.backward(wanted)
        rounded = head(states).double()
    weight, exact_states = head.weight.detach().bfloat16().double(), states.detach().double()
    exact = exact_states @ weight.t() + (head.bias.detach().double() if bias else 0.0)
    assert found.dtype == torch.float32
    error = (found.detach().double() - exact).abs().max()
    assert error < 1e-5 < 1e-3 < (rounded.detach() - exact).abs().max()
    gradient = wanted.bfloat16().double()
    assert states.grad is not None and head.weight.grad is not None
    assert torch.allclose(states.grad.double(), gradient @ weight, rtol=1e-2, atol=1e-2)
    of_weight = gradient.t() @ exact_states
    rtol, atol = (1e-2, 1e-1) if kind == "bfloat16" else (1e-5, 1e-4)
    assert torch.allclose(head.weight.grad.double(), of_weight, rtol=rtol, atol=atol)


@pytest.mark.parametrize("rows", [0, 3])
def test_float32_and_other_heads_are_as_they_were(rows: int) -> None:
    head, states = nn.Linear(8, 5), torch.randn(rows, 8)
    assert torch.equal(head_products(head, states), head(states))
    layers = nn.Sequential(head)
    with torch.autocast("cpu", torch.bfloat16):
        assert head_products(layers, states).dtype == torch.bfloat16
        assert head_products(head, states).shape == (rows, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes", "scale"),
    [
        ("llama", {}, HeadScale()),
        ("granite", {"logits_scaling": 8.0}, HeadScale(divisor=8.0)),
        ("cohere2", {"logit_scale": 0.0625}, HeadScale(factor=0.0625)),
        ("falcon_h1", {"lm_head_multiplier": 0.0390625, "mamba_d_ssm": 64, **MAMBA}, HeadScale(factor=0.0390625)),
        ("hyperclovax", {"logits_scaling": 0.3}, HeadScale(factor=0.3)),  # Granite's name, and no divisor
        ("gemma2", {"final_logit_softcapping": 3.0}, HeadScale(cap=3.0)),
        # The head's input is divided by hidden_size / dim_model_base.
        ("minicpm3", {**ATTENDS, "dim_model_base": 4}, HeadScale(divisor=8.0)),
        (
            "muse_glimmer",
            {
                "text_config": {**SIZES, "final_logit_softcapping": 3.0, "output_multiplier": 0.196},
                # The family's own tower has 1.9 billion parameters, and its projections 42 million.
                "vision_config": {**TOWER, "layer_types": ["window_attention", "full_attention"]},
                "out_hidden_size": 32,
                "projector_hidden_size": 32,
            },
            HeadScale(0.196, 1.0, 3.0),
        ),
    ],
)
def test_a_heads_scale_is_measured_whatever_its_name(
    family: str, changes: dict[str, Any], scale: HeadScale, dtype: torch.dtype
) -> None:
    """The exact number is the config's, also where logits are rounded to bfloat16."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = auto_class(config).from_config(config, dtype=dtype, attn_implementation="eager")
    for weight in model.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.25)
    assert scale_of(use_packed_attention(model)) == scale


def test_a_factor_that_no_number_of_the_config_is_stays_as_measured() -> None:
    config, products = AutoConfig.for_model("llama", **SIZES), torch.randn(8, 61)
    assert HeadScale.measured(config, products, products * 0.123).factor == pytest.approx(0.123, rel=1e-6)
