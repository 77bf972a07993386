"""States of mixers (linear attention, Mamba, convolutions) in the embedded engine, next to its keys and values.

A row of a store of keys and values also holds the states after the row's last token (`KVRows.states`). A step runs the
model's own mixers over them, with a cache of transformers that is filled from the rows. Sequences that take equally
many new tokens run as one batch, as all sessions do that decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from agentrl.engines.embedded.cache import STATE_KINDS, Prefix, Session, StateShape, Store
from agentrl.model.attention import Mixer

_Members = list[tuple[int, int]]
"""Row of each sequence, and the place of its first new token in the step."""


def state_shapes(states: Cache) -> list[StateShape]:
    """List the tensors that mixers have left in a cache of one sequence."""
    return [
        StateShape(layer, kind, index, tuple(tensor.shape[1:]), tensor.dtype)
        for layer, held in enumerate(states.layers)
        if isinstance(held, LinearAttentionCacheLayerMixin)
        for kind in STATE_KINDS
        for index, tensor in getattr(held, kind).items()
        if tensor is not None
    ]


class _Batch:
    """Sequences of one store that take equally many new tokens in a step."""

    def __init__(self, config: PretrainedConfig, store: Store, fresh: bool, new: int, members: _Members) -> None:
        """`fresh`: the sequences begin with these `new` tokens each; else they continue from their row's states."""
        self.store = store
        rows, places = zip(*members, strict=True)
        self.rows = torch.tensor(rows, device=store.device)  # [B]
        self.tokens = torch.tensor(places, device=store.device)[:, None] + torch.arange(new, device=store.device)
        """[B, L]: places of the new tokens in the step."""
        self._states = DynamicCache(config=config)
        self._unread: set[int] = set()
        """Layers whose states are not in the cache yet; later steps of the same sessions find them there."""
        if not fresh:
            for layer in {shape.layer for shape in store.state_shapes}:
                self._unread.add(layer)
                held = cast(LinearAttentionCacheLayerMixin, self._states.layers[layer])
                held.has_previous_state = dict.fromkeys(held.has_previous_state, True)

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer over the batch's tokens of a step, and keep the states: hidden [T, W] -> [B * L, W]."""
        layer = mixer.layer_idx
        held = cast(LinearAttentionCacheLayerMixin, self._states.layers[layer])
        stored = [
            (s, rows) for s, rows in zip(self.store.state_shapes, self.store.states, strict=True) if s.layer == layer
        ]
        if layer in self._unread:
            self._unread.remove(layer)
            for shape, rows in stored:
                update = held.update_conv_state if shape.kind == "conv_states" else held.update_recurrent_state
                update(rows[self.rows], shape.index)
        mixed = mixer.run(hidden[self.tokens], self._states).flatten(0, 1)
        for shape, rows in stored:
            rows[self.rows] = getattr(held, shape.kind)[shape.index]
        return mixed


class StepStates:
    """Runs the mixers in steps of the same sequences: new prompts from nothing, sessions from their states."""

    def __init__(
        self,
        config: PretrainedConfig,
        sessions: Sequence[Session],
        prompts: Sequence[Prefix],
        own: Store,
        shared: Store,
    ) -> None:
        """`sessions` and `prompts`: in the order of their tokens in the step."""
        self._own, self._shared = own, shared
        first = [(s.row, s.prefix.row) for s in sessions if not s.held and s.prefix is not None]
        self._first = torch.tensor(first, device=own.device).view(-1, 2).unbind(1) if first else None
        """Rows of the sessions whose new tokens are the first after their prompt, and rows of the prompts."""
        news = [len(s.ids) - s.cached for s in sessions]
        lengths = [len(prefix.ids) for prefix in prompts]
        places = [*accumulate(news + lengths, initial=0)]
        self._sessions = _batches(config, own, False, news, [s.row for s in sessions], places)
        self._prompts = _batches(config, shared, True, lengths, [p.row for p in prompts], places[len(news) :])
        order = torch.cat([batch.tokens.flatten() for batch in (*self._prompts, *self._sessions)])
        self._back = order.argsort()

    def settle(self) -> None:
        """Note that the first of the steps is over: all its sessions have states of their own."""
        self._first = None

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer over a step's T tokens, and keep the states after them: hidden [T, W] -> [T, W]."""
        mixed = [batch.mix(mixer, hidden) for batch in self._prompts]
        if self._first is not None:
            to, source = self._first
            for shape, own, shared in zip(self._own.state_shapes, self._own.states, self._shared.states, strict=True):
                if shape.layer == mixer.layer_idx:
                    own[to] = shared[source]
        mixed += [batch.mix(mixer, hidden) for batch in self._sessions]
        return torch.cat(mixed)[self._back]


def _batches(
    config: PretrainedConfig,
    store: Store,
    fresh: bool,
    lengths: Sequence[int],
    rows: Sequence[int],
    places: Sequence[int],
) -> list[_Batch]:
    """Join the sequences that take equally many tokens: tokens, row and first place in the step of each."""
    groups: dict[int, _Members] = {}
    for length, row, place in zip(lengths, rows, places, strict=False):
        groups.setdefault(length, []).append((row, place))
    return [_Batch(config, store, fresh, length, members) for length, members in groups.items()]
