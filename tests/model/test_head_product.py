"""Logits in half precision: the product with the head is rounded nowhere but in its operands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentrl.model.head_product import head_products
from tests.devices import DEVICES


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
