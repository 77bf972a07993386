"""Products of tokens with their experts under autocast.

transformers computes them grouped by expert (`grouped_mm`), in the precision of the weights, since autocast does not
know the call. With float32 weights the largest part of a mixture of experts would then run in float32. The function
registered here in its place casts the weights as autocast casts the weights of other layers; without autocast it calls
transformers' own.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

GROUPED = "grouped_mm"
"""Name of transformers' own function, which this one replaces."""


class _Cast:
    """Presents a module with its parameters cast to another precision."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self._dtype = dtype

    def __getattr__(self, name: str) -> object:
        value: object = getattr(self._module, name)
        return value.to(self._dtype) if isinstance(value, torch.Tensor) else value


def grouped_experts(
    module: nn.Module, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Send tokens through their experts: hidden [P, H], experts [P, k] int64, weights [P, k] -> [P, H]."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return grouped_mm_experts_forward(module, hidden, experts, weights)
    dtype = torch.get_autocast_dtype(device)
    lowered = cast(nn.Module, _Cast(module, dtype))  # it reads the module's attributes alone
    return grouped_mm_experts_forward(lowered, hidden.to(dtype), experts, weights)


ExpertsInterface.register(GROUPED, grouped_experts)
