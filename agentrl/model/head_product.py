"""A model's head: logits of hidden states. Sums of its products in half precision stay in float32.

A logit that is rounded to bfloat16 is off by up to 1/256 of its size, and engine and trainer round differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

Logits = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states [M, H] to logits [M, V] float32."""
_SCALE = "agentrl_head_scale"
"""Attribute of a model that keeps its `HeadScale`."""


_TOLERANCE, _HALF_TOLERANCE = 1e-5, 1e-3
"""Relative difference of a measured factor from the exact one, in float32 and in half precision."""


@dataclass(frozen=True, slots=True)
class HeadScale:
    """Scale and cap of a head's products with hidden states: products [M, V] -> logits [M, V] float32."""

    factor: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, products: torch.Tensor) -> torch.Tensor:
        logits = products.float()
        if self.factor != 1.0:  # each pass over the logits costs as the softmax does
            logits = logits * self.factor
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap

    @classmethod
    def measured(cls, config: PretrainedConfig, products: torch.Tensor, logits: torch.Tensor) -> HeadScale:
        """Find the scale by which a text model's own forward pass made logits [M, V] of its head's products with the
        hidden states [M, V].

        Families name the factor differently, and `logits_scaling` divides in one and multiplies in another. A number
        of the config that equals the measured factor, or its inverse, is the exact one. Products that are all zero
        leave it at 1.
        """
        cap: float | None = getattr(config, "final_logit_softcapping", None)
        made, wanted = products.double().flatten(), logits.double().flatten()
        if cap is not None:
            inside = wanted.abs() < 0.9 * cap  # beyond, rounding decides
            made, wanted = made[inside], torch.atanh(wanted[inside] / cap) * cap
        if not made.any():
            return cls(cap=cap)
        factor = float(made @ wanted / (made @ made))
        numbers = [float(one) for one in vars(config).values() if type(one) in (int, float) and one]
        scales = [cls(cap=cap), *(scale for one in numbers for scale in (cls(one, 1.0, cap), cls(1.0, one, cap)))]
        nearest = min(scales, key=lambda scale: abs(scale.factor / scale.divisor - factor))
        tolerance = _TOLERANCE if products.dtype == torch.float32 else _HALF_TOLERANCE
        exact = abs(nearest.factor / nearest.divisor - factor) <= tolerance * abs(factor)
        return nearest if exact else cls(factor, 1.0, cap)


def keep_scale(model: PreTrainedModel, scale: HeadScale) -> None:
    """Let `head_of` and `scale_of` apply a scale that was measured on the model."""
    setattr(model, _SCALE, scale)


def scale_of(model: PreTrainedModel) -> HeadScale:
    """Return the scale that was measured on a model when its packed attention was checked."""
    return cast(HeadScale, getattr(model, _SCALE))


def head_of(model: PreTrainedModel) -> Logits:
    """Return the model's head as a function of hidden states.

    An engine applies it for each token.
    """
    layer, scaled = model.get_output_embeddings(), scale_of(model)
    return lambda states: scaled(head_products(layer, states))


def head_products(head: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """Apply a head to states [M, H]: [M, V], float32 where it is a plain linear layer.

    The operands are of the precision that the head would compute in: autocast's, or its weights'.
    """
    if type(head) is nn.Linear:
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.weight.dtype
        if dtype != torch.float32:
            return linear_products(states.to(dtype), head.weight, head.bias)
    products: torch.Tensor = head(states)
    return products


def linear_products(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply states [M, H] by weight [V, H], rounded to the states' precision, and add bias [V]: [M, V] float32."""
    if states.dtype == torch.float32:
        return nn.functional.linear(states, weight, bias)
    found: torch.Tensor = HeadProduct.apply(states, weight)
    return found if bias is None else found + bias.float()


class HeadProduct(torch.autograd.Function):
    """Product of states [M, H] in half precision with a weight [V, H]: [M, V] float32.

    The backward pass rounds the gradient of the logits, as autocast's does, and gives the weight's in its precision.
    """

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        return _sums(states, weight.to(states.dtype).t())

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        states, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = gradient.to(states.dtype)
        of_states, of_weight = ctx.needs_input_grad  # type: ignore[attr-defined]  # adapters leave the head as it is
        return (
            _sums(gradient, weight.to(states.dtype)).to(states.dtype) if of_states else None,
            _sums(gradient.t(), states).to(weight.dtype) if of_weight else None,
        )


def _sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply matrices in half precision: float32."""
    if left.is_cuda and torch.version.hip is None and left.numel():
        return torch.mm(left, right, out_dtype=torch.float32)
    with torch.autocast(left.device.type, enabled=False):  # no such kernel: the products are exact in float32, too
        return left.float() @ right.float()
