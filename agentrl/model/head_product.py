"""A model's head: logits of hidden states. Sums of its products in half precision stay in float32.

A logit that is rounded to bfloat16 is off by up to 1/256 of its size, and engine and trainer round differently.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

Logits = Callable[[torch.Tensor], torch.Tensor]
"""From hidden states [M, H], or the products [M, V] of a head with them, to logits [M, V] float32."""


def head_of(model: PreTrainedModel) -> Logits:
    """Return the model's head as a function of hidden states.

    An engine applies it for each token. So the config is read here: transformers takes 20 microseconds to answer.
    """
    layer, scaled = model.get_output_embeddings(), scale_of(model.config.get_text_config())
    return lambda states: scaled(head_products(layer, states))


def scale_of(config: PretrainedConfig) -> Logits:
    """Return the scale and cap of a head's products, as the text model's config says."""
    factor: float = getattr(config, "logit_scale", 1.0)
    divisor: float = getattr(config, "logits_scaling", 1.0)
    cap: float | None = getattr(config, "final_logit_softcapping", None)

    def scaled(products: torch.Tensor) -> torch.Tensor:
        logits = products.float()
        if factor != 1.0:  # each pass over the logits costs as the softmax does
            logits = logits * factor
        if divisor != 1.0:
            logits = logits / divisor
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return scaled


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
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        states, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        gradient = gradient.to(states.dtype)
        of_states = _sums(gradient, weight.to(states.dtype)).to(states.dtype)
        return of_states, _sums(gradient.t(), states).to(weight.dtype)


def _sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply matrices in half precision: float32."""
    if left.is_cuda and torch.version.hip is None and left.numel():
        return torch.mm(left, right, out_dtype=torch.float32)
    with torch.autocast(left.device.type, enabled=False):  # no such kernel: the products are exact in float32, too
        return left.float() @ right.float()
