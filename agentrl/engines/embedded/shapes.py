"""The shapes of a model's keys and values, and the check that the embedded engine can serve the model."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.model.attend import Rule
from agentrl.model.attention import PackedAttention
from agentrl.model.layout import flat_layout
from agentrl.model.packed import forward_packed, longest_context


def free_memory(device: torch.device) -> int:
    """Bytes free on the device; for the CPU, in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _ShapeProbe(PackedAttention):
    """Records the shapes of each layer's keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(flat_layout(torch.tensor([0, 1]), model.device))
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Attend as `PackedAttention.attend`: query [H, P, D], key and value [K, P, D] -> [P, H, D]."""
        self.shapes[layer] = (key.shape[0], key.shape[-1], value.shape[-1])
        return super().attend(layer, query, key, value, rule)


@torch.no_grad()
def attention_shapes(model: PreTrainedModel, max_model_len: int) -> list[tuple[int, int, int]]:
    """Find (K, D of keys, D of values) of each layer by running one token.

    Raises ConfigError when the cache cannot serve the model.
    """
    probe = _ShapeProbe(model)
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    forward_packed(model, zero, zero, probe)
    layers = model.config.get_text_config().num_hidden_layers
    positions = longest_context(model) or max_model_len
    problem = None
    if sorted(probe.shapes) != list(range(layers)):
        problem = f"only {len(probe.shapes)} of its {layers} layers have attention with a cache of their own"
    elif positions < max_model_len:
        problem = f"it has {positions} positions, fewer than the longest context of {max_model_len}"
    if problem:
        raise ConfigError(
            f"{type(model).__name__} cannot run in the embedded engine: {problem}. Use a model with attention in every "
            "layer, a shorter actor_rollout_ref.rollout.max_model_len, or rollout.name=sglang."
        )
    return [probe.shapes[layer] for layer in range(layers)]
