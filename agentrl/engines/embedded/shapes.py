"""The shapes of a model's keys, values and states, and the check that the embedded engine can serve the model."""

from __future__ import annotations

import os

import torch
from transformers import DynamicCache, PreTrainedModel

from agentrl.engines.embedded.cache import StateShape
from agentrl.engines.embedded.states import state_shapes
from agentrl.errors import ConfigError
from agentrl.model.attend import Rule
from agentrl.model.attention import Mixer, PackedAttention
from agentrl.model.layout import flat_layout
from agentrl.model.packed import forward_packed, longest_context

_TRIED = 32
"""Tokens of the trial run of a mixer, of which half run one by one."""


def free_memory(device: torch.device) -> int:
    """Bytes free on the device; for the CPU, in the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _ShapeProbe(PackedAttention):
    """Records the shapes of each layer's keys and values, and the states that its mixers leave."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(flat_layout(torch.tensor([0, 1]), model.device))
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.twice: set[int] = set()
        """Layers with more than one attention."""
        self.states: DynamicCache | None = None
        """States of the mixers that have some; None in a model without such mixers."""
        self.differing: dict[str, float] = {}
        """Mixers whose output for a token depends on how many tokens run at once: by how much of its size."""
        self._config, self._tolerance = model.config, 1e-4 if model.dtype == torch.float32 else 0.05

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Attend as `PackedAttention.attend`: query [H, P, D], key and value [K, P, D] -> [P, H, D]."""
        if layer in self.shapes:
            self.twice.add(layer)
        self.shapes[layer] = (key.shape[0], key.shape[-1], value.shape[-1])
        return super().attend(layer, query, key, value, rule)

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer over the token: hidden [1, W] -> [1, W]."""
        if self.states is None:
            self.states = DynamicCache(config=self._config)
        tokens = torch.stack([hidden.roll(shift, -1) for shift in range(_TRIED)], dim=1)  # [1, L, W]
        whole = mixer.run(tokens)[0]
        alone = [mixer.run(part, self.states)[0] for part in tokens.split([_TRIED // 2, *[1] * (_TRIED // 2)], dim=1)]
        difference = float((torch.cat(alone) - whole).abs().max() / whole.abs().max())
        if not difference <= self._tolerance:
            self.differing[type(mixer).__name__] = difference
        return whole[:1]


def check_copy(model: PreTrainedModel) -> None:
    """Raise ConfigError where the engine cannot serve the model, of any length of context."""
    cache_shapes(model, 1)


@torch.no_grad()
def cache_shapes(model: PreTrainedModel, max_model_len: int) -> tuple[list[tuple[int, int, int]], list[StateShape]]:
    """Find (K, D of keys, D of values) of each layer and the shapes of its mixers' states by running one token.

    A layer without attention has zeros. Raises ConfigError when the cache cannot serve the model.
    """
    probe = _ShapeProbe(model)
    zero = torch.zeros(1, dtype=torch.int64, device=model.device)
    forward_packed(model, zero, zero, probe)
    layers = model.config.get_text_config().num_hidden_layers
    positions = longest_context(model) or max_model_len
    problem = None
    if probe.twice or any(layer >= layers for layer in probe.shapes):
        problem = f"its {layers} layers have more than {layers} caches of keys and values"
    elif positions < max_model_len:
        problem = f"it has {positions} positions, fewer than the longest context of {max_model_len}"
    if probe.differing:
        found = ", ".join(f"{name} ({difference:.2g})" for name, difference in probe.differing.items())
        raise ConfigError(
            f"{type(model).__name__} cannot run in the embedded engine: mixers give a token another output, by so much "
            f"of its size, when it runs alone than when it runs with the tokens before it: {found}. Sampling would not "
            "follow the policy that is trained. Take another model, or rollout.name=sglang where it computes alike"
        )
    if problem:
        raise ConfigError(
            f"{type(model).__name__} cannot run in the embedded engine: {problem}. Use a model with at most one "
            "attention in each layer, a shorter actor_rollout_ref.rollout.max_model_len, or rollout.name=sglang."
        )
    states = [] if probe.states is None else state_shapes(probe.states)
    return [probe.shapes.get(layer, (0, 0, 0)) for layer in range(layers)], states
