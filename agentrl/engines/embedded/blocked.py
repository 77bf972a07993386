"""Linear layers of the embedded engine on a CPU, with their weights in oneDNN's blocked layout.

A decoding step reads every weight for a few tokens. In float32 torch calls a product that first copies each weight into
an order that it can read, in every call. Here the copies are made once for each version of the weights. On a model of
135 million parameters the products then take 0.6 to 0.75 of the time (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

LEAST = 1 << 24
"""Numbers in the linear layers of a model, below which its weights may stay in the processor's cache between steps."""

_reorder = torch.ops.mkldnn._reorder_linear_weight.default
_linear = torch.ops.mkldnn._linear_pointwise.default


class BlockedLayers:
    """The linear layers of a model, which compute with blocked copies of their weights inside `used`.

    The copies take as much memory as the weights, and follow them when they change.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = [layer for layer in model.modules() if type(layer) is nn.Linear and _is_plain(layer)]
        self._forwards: list[Callable[[torch.Tensor], torch.Tensor]] = []
        self._made_of: list[tuple[int, int]] = []
        """Address and version of each weight that was copied."""

    @staticmethod
    def from_model(model: PreTrainedModel) -> BlockedLayers | None:
        """Find the layers of a model; None where copies of their weights would not help."""
        blocked = BlockedLayers(model)
        large = sum(layer.weight.numel() for layer in blocked._layers) >= LEAST
        return blocked if large and torch.backends.mkldnn.is_available() else None

    def drop(self) -> None:
        """Free the copies; the next `used` makes them again."""
        self._forwards, self._made_of = [], []

    @contextmanager
    def used(self) -> Iterator[None]:
        """Compute with the copies inside the block, without gradient."""
        weights = [layer._parameters["weight"] for layer in self._layers]  # `layer.weight` takes four times as long
        present = [(weight.data_ptr(), weight._version) for weight in weights if weight is not None]
        if present != self._made_of:
            self.drop()
            self._forwards = [partial(_multiply, _reorder(layer.weight), layer.bias) for layer in self._layers]
            self._made_of = present
        for layer, forward in zip(self._layers, self._forwards, strict=True):
            layer.__dict__["forward"] = forward  # nn.Module's own assignment looks the value over, 200 times a step
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.__dict__["forward"]


def _is_plain(layer: nn.Linear) -> bool:
    weight = layer.weight
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _multiply(weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    """Apply a layer: blocked weight [O, I], bias [O], states [..., I] -> [..., O]."""
    return _linear(states, weight, bias, "none", [], "")
