"""Mixers with a state, which runs on from token to token: linear attention, Mamba, short convolutions.

Attention keeps packed sequences apart by the layout of a forward pass. A mixer with a state has no such argument, and
its state would run on into the next sequence. Here such mixers are found by a trial (`separate_states`), and from then
on the layout carries them out, as it carries out attention (`AttentionLayout.mix`): one sequence after the other, while
norms, projections of attention and feed-forward layers stay packed.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import cast

import torch
from torch import nn
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from agentrl.model.attention import LAYOUT, AttentionLayout, Mixer
from agentrl.parallel.collectives import rank

logger = logging.getLogger(__name__)

KEEPS_STATE = "agentrl_keeps_state"
"""Attribute of a model's backbone that has mixers with a state: its sequences share no beginnings."""
_NO_BOUND = 1e-30
"""Lower bound of time steps that changes none: a softplus in float32 is larger, or its step leaves the state as it is.
Not 0, whose logarithm a new model of such a config takes."""
_CACHES = ("cache_params", "past_key_values")
"""Names that transformers' mixers have for the argument that holds their states."""


_SAID: set[str] = set()
"""Classes of mixers that the log has a line on: the roles of a process load the same model."""


class _StatefulMixer(nn.Module):
    """A base that `separate_states` adds to the class of a mixer."""

    layer_idx: int
    agentrl_cache: str
    """Name that the mixer's own forward has for its cache."""
    agentrl_layout: AttentionLayout | None
    """Layout of the running forward pass; None outside `agentrl.model.packed`."""

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        """Mix the tokens [1, P, H] -> [1, P, H] of a packed row; outside `agentrl.model.packed` as the model's own."""
        if self.agentrl_layout is None:
            return cast(torch.Tensor, super().forward(hidden_states, *args, **kwargs))
        return self.agentrl_layout.mix(self, hidden_states[0])[None]

    def run(self, hidden: torch.Tensor, states: Cache | None = None) -> torch.Tensor:
        """Mix [B, L, H] -> [B, L, H] as `Mixer.run` says."""
        arguments = {} if states is None else {self.agentrl_cache: states}
        return cast(torch.Tensor, super().forward(hidden, **arguments))


def keeps_state(config: PretrainedConfig) -> bool:
    """Check whether layers of a model have a state that runs on from token to token, as transformers' cache has it."""
    layers = DynamicCache(config=config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def unbound_time_steps(model: PreTrainedModel) -> None:
    """Take the lower bound of time steps away that transformers reads from `time_step_min` (Nemotron-H, Zamba2).

    transformers applies it where several tokens run, and not where one token runs; SGLang has no such bound. The key is
    a bound of the time steps that a new model draws, as in Mamba-2. The model's config, and so an export, has
    `_NO_BOUND` in its place, so that transformers computes the trained function.
    """
    config = model.config.get_text_config()
    least = getattr(config, "time_step_min", None)
    bound = [one for one in model.modules() if getattr(one, "time_step_limit", None) == (least, math.inf)]
    for module in bound if least is not None else ():
        module.time_step_limit = (_NO_BOUND, math.inf)  # type: ignore[assignment]
        config.time_step_min = _NO_BOUND


def stateful_mixers(model: nn.Module) -> list[Mixer]:
    """List the mixers with a state that `separate_states` found, in the order of their layers."""
    return [module for module in model.modules() if isinstance(module, _StatefulMixer)]


def separate_states(model: PreTrainedModel, forward: Callable[[], object], attended: Sequence[int]) -> None:
    """Find the mixers with a state, and let the layout of each forward pass carry them out from now on.

    `forward` runs the model over a packed row, and appends to `attended` at each attention. A part of a layer is such
    a mixer when another first token changes its output for later tokens, and no attention takes place in it.
    """
    trial = _Trial(attended, 1e-4 if model.dtype == torch.float32 else 1e-2)
    handles = [
        part.register_forward_hook(trial.repeat, with_kwargs=True)
        for layer in _layers(model)
        for part in layer.children()
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    for layer in _layers(model):
        mixers = cast(list[_StatefulMixer], [part for part in layer.children() if part in trial.found])
        for mixer in mixers:
            kind = cast(Hashable, type(mixer))  # mypy takes it for an instance, whose hash torch annotates otherwise
            mixer.__class__ = cast(type[_StatefulMixer], _stateful(kind))
        if mixers:
            layer.register_forward_pre_hook(partial(_give_layout, mixers), with_kwargs=True)
            setattr(model.base_model, KEEPS_STATE, True)
    if trial.found and rank() == 0:
        kinds = ", ".join(sorted({type(part).__name__ for part in trial.found}))
        if kinds not in _SAID:
            _SAID.add(kinds)
            logger.warning("%s keep a state: they run sequence by sequence, and no beginnings are shared", kinds)


@cache
def _stateful(kind: type[nn.Module]) -> type[nn.Module]:
    """Derive a class of mixers."""
    name = next((name for name in inspect.signature(kind.forward).parameters if name in _CACHES), "")
    members = {"__module__": kind.__module__, "agentrl_layout": None, "agentrl_cache": name}
    return type(kind.__name__, (_StatefulMixer, kind), members)


def _give_layout(
    mixers: Sequence[_StatefulMixer], layer: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> None:
    """Hand the layout in the arguments of a layer, which gradient checkpointing gives it again, to its mixers."""
    for mixer in mixers:
        mixer.agentrl_layout = cast(AttentionLayout | None, kwargs.get(LAYOUT))


def _layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Iterate over the layers of the text model, sharded or not."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            yield from module


class _Trial:
    """Runs parts of layers a second time, with another first token."""

    def __init__(self, attended: Sequence[int], tolerance: float) -> None:
        self._attended, self._tolerance = attended, tolerance
        self.found: set[nn.Module] = set()

    def repeat(self, part: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
        """Note the part of a layer if its output for later tokens depends on the first token by a state."""
        named = dict(kwargs)
        hidden = args[0] if args else named.pop("hidden_states", None)
        if not (isinstance(hidden, torch.Tensor) and isinstance(output, torch.Tensor)):
            return
        if output.ndim != 3 or output.shape[:2] != hidden.shape[:2]:
            return
        changed = hidden.clone()
        # Drawn, because the first token's own numbers may be all zero: a new embedding has none for the padding token.
        drawn = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0))
        changed[:, 0] = drawn.to(hidden) * hidden.std()
        before = len(self._attended)
        again = part.forward(changed, *args[1:], **named)
        difference = (again - output).abs().amax(-1)[0]
        if len(self._attended) == before and difference[1:].max() > self._tolerance * difference[0]:
            self.found.add(part)
