"""The precision of mixtures of experts: products of tokens with their experts under autocast, and routers.

transformers computes the products grouped by expert (`grouped_mm`), in the precision of the weights, since autocast
does not know the call. With float32 weights the largest part of a mixture of experts would then run in float32. The
function registered here in its place casts the weights as autocast casts the weights of other layers; without autocast
it calls transformers' own.

Routers compute in float32. In half precision their logits would be rounded, and engine and trainer, which round
differently, would choose different experts for more tokens. Autocast also lowers the routers that transformers keeps in
float32 on purpose (DeepSeek's, GLM's).
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import cast

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

GROUPED = "grouped_mm"
"""Name of transformers' own function, which this one replaces."""


class _Cast:
    """Presents a module with its parameters cast to other precisions, one after the other."""

    def __init__(self, module: nn.Module, *dtypes: torch.dtype) -> None:
        self._module = module
        self._dtypes = dtypes

    def __getattr__(self, name: str) -> object:
        value: object = getattr(self._module, name)
        return _cast(value, *self._dtypes) if isinstance(value, nn.Parameter) else value


def _cast(value: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    for dtype in dtypes:
        value = value.to(dtype)
    return value


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


def is_router(module: nn.Module) -> bool:
    numbers = (getattr(module, "top_k", None), getattr(module, "num_experts", None))
    return all(isinstance(number, int) for number in numbers) and isinstance(
        getattr(module, "weight", None), nn.Parameter
    )


def route_in_float32(model: nn.Module) -> None:
    """Have the routers of a model compute in float32, from weights and states that are rounded as other layers' are."""
    for router in model.modules():
        if is_router(router) and not hasattr(router, "rounds_inputs_only"):
            kind = cast(Hashable, type(router))  # mypy takes it for an instance, whose hash torch annotates otherwise
            router.__class__ = _float32_router(kind)


@cache
def _float32_router(kind: type[nn.Module]) -> type[nn.Module]:
    """Derive a class of routers. It is one for all layers, so that they share compiled programs."""

    def forward(self: nn.Module, hidden: torch.Tensor, *args: torch.Tensor) -> object:
        device = hidden.device.type
        weight = cast(nn.Parameter, self.weight)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        if dtype == torch.float32:
            return kind.forward(self, hidden, *args)
        with torch.autocast(device, enabled=False):
            return kind.forward(_Cast(self, dtype, torch.float32), _cast(hidden, dtype, torch.float32), *args)

    return type(kind.__name__, (kind,), {"forward": forward, "rounds_inputs_only": True})
