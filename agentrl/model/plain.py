"""A model as transformers itself computes it: one sequence at a time, given its weights by name.

It shares neither modules nor attention with the model that is trained. So its scores, and its gradients, are a second
computation of the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from agentrl.model.packed import prepare_own, select_attention

if TYPE_CHECKING:
    from agentrl.model.lora import Lora
    from agentrl.trajectory.batch import RaggedBatch

Weights = Mapping[str, Tensor]
"""Tensors by the names that the parameters have in the model."""


@dataclass(frozen=True, slots=True)
class Twice:
    """A model's scores of a sequence by two computations, each [T] float32 of ids [T]."""

    role: str
    column: str
    """Name of the column that has these scores."""
    plain: Callable[[Weights, Tensor], Tensor]
    """Computes them by transformers' own model from weights by name."""
    weights: Mapping[str, nn.Parameter]
    exact: bool
    """All of it is computed in float32."""
    trained: Callable[[RaggedBatch], Tensor] | None = None
    """Computes them as an update does, with gradient; None: the model does not learn."""
    relative: bool = False
    """Distances are a part of the scores' size."""


class PlainModel:
    """The model of `base`, made again from its config on the device `meta`, with weights tied as the config says."""

    def __init__(self, base: PreTrainedModel, lora: Lora | None = None) -> None:
        """lora: the adapters in `base`."""
        config = copy.deepcopy(base.config)
        with torch.device("meta"):
            self._model = type(base)(config)
        if lora is not None:
            from peft import inject_adapter_in_model  # costs half a second

            inject_adapter_in_model(lora.config, self._model)
        prepare_own(self._model)
        select_attention(self._model, "eager")
        self._base = base
        self.names = dict(self._model.named_parameters()).keys()

    def logprobs(self, weights: Weights, ids: Tensor, temperature: float, vocab: int | None = None) -> Tensor:
        """Compute log p(ids[t] | ids[:t]) of softmax(logits / temperature): ids [T] int64 -> [T] float32, first 0.

        vocab: ids from there on are impossible.
        """
        logits = self._run(weights, ids).logits[0, :-1, :vocab].float() / (temperature or 1.0)
        found: Tensor = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found])

    def states(self, weights: Weights, ids: Tensor) -> Tensor:
        """Compute the last hidden states of a backbone: ids [T] int64 -> [T, H] float32."""
        states: Tensor = self._run(weights, ids).last_hidden_state[0].float()
        return states

    def _run(self, weights: Weights, ids: Tensor) -> _Output:
        known = {name: weights[name] for name in self.names}
        buffers = dict(self._base.named_buffers())
        given = {"input_ids": ids[None], "use_cache": False}
        mixed = len({weight.dtype for weight in known.values()}) > 1  # adapters on a frozen model
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=mixed):
            output: _Output = functional_call(self._model, {**buffers, **known}, kwargs=given)
        return output


class _Output:
    """The answer of a model of transformers."""

    logits: Tensor
    last_hidden_state: Tensor
