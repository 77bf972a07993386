"""Attention of one step of the embedded engine, over the rows of keys and values.

The step's tokens are packed in one row. First comes one token of each decoding session, then the new tokens of sessions
that extend their cache by several, then the tokens of new prompts. All of them are written to the cache first. Decoding
runs over views of the stores, without copies. It reads each session's own row, and each prompt's row once for all
sessions that share it (arXiv:2402.05099).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

import torch

from agentrl.engines.embedded.cache import KVRows, Places, Prefix, Session, Store
from agentrl.engines.embedded.states import StepStates
from agentrl.model.attend import Rule, attend_part, attend_tail, join_parts, sink_share
from agentrl.model.attention import Mixer, PackedAttention
from agentrl.model.layout import PackedLayout


class _Part:
    """Attention of T tokens to one row of a store each, with the tokens sorted by row.

    One call of the kernel serves all tokens: they are laid out as `outer` rows of `inner` places each, padded. A row
    that many more tokens share than others appears repeatedly, or all others would be padded to its length.
    """

    def __init__(self, store: KVRows, rows: Sequence[int]) -> None:
        """`rows`: the row of each of the T tokens."""
        self.store = store
        members: dict[int, list[int]] = {}
        for token, row in enumerate(rows):
            members.setdefault(row, []).append(token)
        size = max(8, 2 * -(-len(rows) // len(members)))
        pieces = [(row, some[i : i + size]) for row, some in members.items() for i in range(0, len(some), size)]
        # To read a few unwanted rows in a view of the first ones costs less than to copy the wanted ones.
        self.view = len(pieces) == len(members) and max(members) < 1.5 * len(members)
        if self.view:
            pieces = [(row, members.get(row, [])) for row in range(max(members) + 1)]
        self.outer, self.inner = len(pieces), max(len(some) for _, some in pieces)
        self.chosen = torch.tensor([row for row, _ in pieces], device=store.device)
        self.plain = [some for _, some in pieces] == [[token] for token in range(len(rows))]
        padded = [some + [0] * (self.inner - len(some)) for _, some in pieces]  # token 0 as padding
        self._source = torch.tensor(padded, device=store.device).flatten()  # [outer * inner] -> token
        back = [0] * len(rows)
        for index, (_, some) in enumerate(pieces):
            for place, token in enumerate(some):
                back[token] = index * self.inner + place
        self.back = torch.tensor(back, device=store.device)  # [T] -> place

    def attend(
        self, layer: int, query: torch.Tensor, columns: int, mask: torch.Tensor, rule: Rule
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the first `columns` of each token's row: output [T, K, G, D] and log-sum-exp [T, K, G].

        query [T, K, G, D]; mask [outer, 1, 1 or inner, columns].
        """
        key, value = self.store.keys[layer], self.store.values[layer]
        if self.view:
            key, value = key[: self.outer, :, :columns], value[: self.outer, :, :columns]
        else:
            key, value = key[self.chosen, :, :columns], value[self.chosen, :, :columns]
        if self.plain:
            return attend_part(query, key, value, mask, rule)
        grid = query.index_select(0, self._source).unflatten(0, (self.outer, self.inner)).transpose(1, 2).flatten(2, 3)
        if mask.shape[2] > 1:
            mask = mask.repeat_interleave(query.shape[2], dim=2)
        out, lse = (  # the layout undone: [outer, K, inner * G, *] -> [T, K, G, *]
            laid.unflatten(2, (self.inner, -1)).transpose(1, 2).flatten(0, 1).index_select(0, self.back)
            for laid in attend_part(grid, key, value, mask, rule)
        )
        return out, lse

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Lay out one value a token, [T] -> [outer, 1, inner, 1], with 1 where there is no token."""
        grid = torch.ones(self.outer * self.inner, dtype=values.dtype, device=values.device)
        grid[self.back] = values
        return grid.view(self.outer, 1, self.inner, 1)


class Part(Protocol):
    """Attention of sessions that extend their cache, by T tokens in all."""

    size: int
    """T"""
    places: Places
    """The places of the tokens' keys and values in the store."""
    positions: torch.Tensor
    """[T] int64"""

    @property
    def sessions(self) -> Sequence[Session]:
        """The sessions in the order of their tokens."""
        ...

    def attend(self, layer: int, query: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Attend to own rows and prompts: query [H, T, D] -> [T, H, D]. Keys of the new tokens are stored already."""
        ...


class RowBatch:
    """Attention of sessions that extend their cache by one token, or a few each, side by side in padded rows.

    T is the number of all their new tokens. A batch of sessions that decode is built when they change, and advanced
    from step to step.
    """

    def __init__(self, sessions: Sequence[Session], own: KVRows, shared: KVRows) -> None:
        self.own, self.sessions = own, sessions
        device = own.device
        spans = [(session, len(session.ids) - session.cached) for session in sessions]
        owners = [session for session, new in spans for _ in range(new)]
        columns = [session.held + place for session, new in spans for place in range(new)]
        self.size = len(owners)
        self.places = own.places([session.row for session in owners], columns)
        self.columns = self.places[1]  # [T]
        starts = torch.tensor([session.prompt_length for session in owners], device=device)
        in_sequence = self.columns + starts
        self.positions = in_sequence + torch.tensor([session.shift for session in owners], device=device)
        self.longest = max(columns) + 1
        self._own_part = _Part(own, [session.row for session in owners])
        self._visible = self._own_part.spread(self.columns + 1)
        self._prompt_part = _Part(shared, [session.prefix.row for session in owners if session.prefix is not None])
        self._distance = self._prompt_part.spread(in_sequence)  # of each token from the prompt's first column
        holders = [shared.holders[row] for row in self._prompt_part.chosen.tolist()]
        held = [max(1, holder.held) if holder is not None else 1 for holder in holders]
        self._held = torch.tensor(held, device=device).view(-1, 1, 1, 1)
        self._prompt_columns = max(held)
        self._prompt_mask = self._masked(self._held, self._prompt_columns)
        self._prepare()

    def _prepare(self) -> None:
        """Make room for the step's tokens and mask what each of them must not see."""
        self.own.reserve(0, self.longest)
        self._masks: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {
            None: (self._masked(self._visible, self.longest), self._prompt_mask)
        }

    def _mask(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Build or look up the masks of own rows and of prompts, for tokens that see the last `window` tokens."""
        if window is not None and window not in self._masks:
            own = self._masked(self._visible, self.longest, self._visible - window)
            prompt = self._masked(self._held, self._prompt_columns, self._distance + 1 - window)
            self._masks[window] = own, prompt
        return self._masks[window]

    def _masked(self, end: torch.Tensor, columns: int, first: torch.Tensor | None = None) -> torch.Tensor:
        """Build an additive mask [outer, 1, 1 or inner, columns]: 0 in the columns [first, end), lowest outside."""
        index = torch.arange(columns, device=end.device)
        outside = index >= end if first is None else (index >= end) | (index < first)
        return torch.zeros(outside.shape, dtype=self.own.dtype, device=end.device).masked_fill_(
            outside,
            torch.finfo(self.own.dtype).min / 2,  # finite: attention to no key at all must not give NaN
        )

    def advance(self) -> None:
        """Follow a decoding step, after which each session has one token more."""
        for count in (self.columns, self.positions, self._visible, self._distance):
            count += 1
        self.longest += 1
        self._prepare()

    def attend(self, layer: int, query: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Attend to own rows and prompts: query [H, T, D] -> [T, H, D]. Keys of the new tokens are stored already."""
        heads, tokens, width = query.shape
        kinds = self.own.keys[layer].shape[1]
        q = query.view(kinds, heads // kinds, tokens, width).permute(2, 0, 1, 3)  # [T, K, G, D]
        mask, prompt_mask = self._mask(rule.window)
        out, lse = self._own_part.attend(layer, q, self.longest, mask, rule)
        prompt, prompt_lse = self._prompt_part.attend(layer, q, self._prompt_columns, prompt_mask, rule)
        # Weights of the two parts by their log-sum-exp: exp(p) / (exp(p) + exp(own)) = sigmoid(p - own).
        share = torch.sigmoid(prompt_lse - lse).unsqueeze(-1)
        out = torch.lerp(out, prompt, share.to(out.dtype)).flatten(1, 2)
        if rule.sinks is None:
            return out
        return out * sink_share(torch.logaddexp(lse, prompt_lse).flatten(1, 2), rule.sinks).to(out.dtype).unsqueeze(-1)


class Segments:
    """Attention of sessions that extend their cache by many tokens, with calls of their own for each session.

    Sessions of one prompt lie side by side, so that one call attends to the prompt for all of them. m is the number of
    new tokens of all sessions.
    """

    def __init__(self, sessions: Sequence[Session], own: Store, shared: Store) -> None:
        self.own, self.shared = own, shared
        self.sessions = sorted(sessions, key=lambda s: (s.prefix.row if s.prefix is not None else -1, s.row))
        device = own.device
        own.extend(sessions, [len(s.ids) - s.prompt_length for s in sessions])
        self.spans: list[tuple[int, int]] = []
        self._masks: dict[int | None, tuple[list[torch.Tensor | None], list[torch.Tensor | None]]] = {}
        size = 0
        rows: list[int] = []
        columns: list[int] = []
        for session in self.sessions:
            total, new = len(session.ids) - session.prompt_length, len(session.ids) - session.cached
            self.spans.append((size, size + new))
            size += new
            rows += [session.row] * new
            columns += range(total - new, total)
        self.size = size
        self.places = own.places(rows, columns)
        self.columns = torch.tensor(columns, device=device)
        lengths = [session.prompt_length for session in self.sessions]
        starts = torch.tensor([length for length, (a, b) in zip(lengths, self.spans, strict=True) for _ in range(a, b)])
        self._in_sequence = self.columns + starts.to(device)
        shifts = [
            torch.full((b - a,), session.shift) for session, (a, b) in zip(self.sessions, self.spans, strict=True)
        ]
        self.positions = self._in_sequence + torch.cat(shifts).to(device)
        self.groups: list[tuple[Prefix, int, int]] = []  # each prompt with its queries [first, last)
        for prefix, members in groupby(zip(self.sessions, self.spans, strict=True), key=lambda pair: pair[0].prefix):
            spans = [span for _, span in members]
            assert prefix is not None
            self.groups.append((prefix, spans[0][0], spans[-1][1]))

    def _mask(self, window: int | None) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Build or look up the masks of own rows and of prompts, for tokens that see the last `window` tokens."""
        if window not in self._masks:
            own = [self._masked(self.columns[a:b], int(self.columns[b - 1]) + 1, window) for a, b in self.spans]
            prompts = [
                None if window is None else self._masked(self._in_sequence[a:b], len(prefix.ids), window)
                for prefix, a, b in self.groups
            ]
            self._masks[window] = own, prompts
        return self._masks[window]

    def _masked(self, places: torch.Tensor, columns: int, window: int | None) -> torch.Tensor | None:
        """Build the additive mask [1, 1, Q, columns] of Q queries at `places` [Q]; None when nothing is masked."""
        distance = places[:, None] - torch.arange(columns, device=places.device)
        outside = distance < 0 if window is None else (distance < 0) | (distance >= window)
        if not outside.any():
            return None
        mask = torch.zeros(outside.shape, dtype=self.own.dtype, device=places.device)
        return mask.masked_fill_(outside, torch.finfo(self.own.dtype).min / 2)[None, None]

    def attend(self, layer: int, query: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Attend to own rows and prompts: query [H, m, D] -> [m, H, D]. Keys of the new tokens are stored already."""
        if query.device.type != "cpu" or not isinstance(self.own, KVRows) or not isinstance(self.shared, KVRows):
            return self._attend_one_by_one(layer, query, rule)
        key, value = self.own.keys[layer], self.own.values[layer]
        heads, groups = key.shape[1], query.shape[0] // key.shape[1]
        q = query.unflatten(0, (heads, groups))  # [K, G, m, D]
        output = q.new_empty(self.size, heads, groups, value.shape[-1])
        out, lse = output.permute(1, 2, 0, 3), q.new_empty(heads, groups, self.size, dtype=torch.float32)
        masks, prompt_masks = self._mask(rule.window)
        for session, (start, end), mask in zip(self.sessions, self.spans, masks, strict=True):
            total = len(session.ids) - session.prompt_length
            k, v = (x[session.row, :, None, :total].expand(-1, groups, -1, -1) for x in (key, value))
            out[:, :, start:end], lse[:, :, start:end] = attend_part(q[:, :, start:end], k, v, mask, rule)
        key, value = self.shared.keys[layer], self.shared.values[layer]
        for (prefix, start, end), mask in zip(self.groups, prompt_masks, strict=True):
            k, v = (x[prefix.row, :, None, : len(prefix.ids)].expand(-1, groups, -1, -1) for x in (key, value))
            part = attend_part(q[:, :, start:end], k, v, mask, rule)
            join_parts(out[:, :, start:end], lse[:, :, start:end], *part)
        if rule.sinks is not None:
            out *= sink_share(lse, rule.sinks.view(heads, groups, 1)).unsqueeze(-1)
        return output.flatten(1, 2)

    def _attend_one_by_one(self, layer: int, query: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Attend with one call for each session, over the keys of its prompt and its own, copied together."""
        outputs = []
        for session, (start, end) in zip(self.sessions, self.spans, strict=True):
            assert session.prefix is not None
            prompt, total = session.prompt_length, len(session.ids) - session.prompt_length
            parts = self.shared.read(layer, session.prefix.row, prompt), self.own.read(layer, session.row, total)
            key, value = (torch.cat(both, dim=1) for both in zip(*parts, strict=True))
            outputs.append(attend_tail(query[:, start:end], key, value, rule))
        return torch.cat(outputs, dim=1).transpose(0, 1)


class StepAttention:
    """Implements `AttentionLayout` for one step: the tokens of its parts in order, then new prompts."""

    def __init__(
        self,
        parts: Sequence[Part],
        prompts: Sequence[Prefix],
        prompt_layout: PackedLayout | None,
        own: Store,
        shared: Store,
        states: StepStates | None = None,
    ) -> None:
        """`states`: of a model that has mixers with a state."""
        self.parts = parts
        self.own, self.shared, self.states = own, shared, states
        self.tree = None if prompt_layout is None else PackedAttention(prompt_layout)
        self.continuing = sum(part.size for part in parts)
        """Number of tokens of all parts, which lie before the new prompts' tokens."""
        if len(parts) == 1:
            self.places = parts[0].places  # the part's own, which it advances
        elif parts:
            self.places = tuple(torch.cat(some) for some in zip(*(part.places for part in parts), strict=True))
        if prompts:
            rows = [prefix.row for prefix in prompts for _ in prefix.ids]
            self.prompt_places = shared.places(rows, [column for p in prompts for column in range(len(p.ids))])

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Store the new keys and values and attend: query [H, T, D], key and value [K, T, D] -> [T, H, D]."""
        split = self.continuing
        if split:
            self.own.write(layer, self.places, key[:, :split], value[:, :split])
        if self.tree is not None:
            expand = self.tree.layout.expand
            k, v = key[:, split:], value[:, split:]
            self.shared.write(layer, self.prompt_places, k[:, expand], v[:, expand])
        outputs = []
        start = 0
        for part in self.parts:
            outputs.append(part.attend(layer, query[:, start : start + part.size], rule))
            start += part.size
        if self.tree is not None:
            outputs.append(self.tree.attend(layer, query[:, split:], k, v, rule))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        """Run a mixer with a state over the step's tokens, and keep the states: hidden [T, W] -> [T, W]."""
        assert self.states is not None, "the engine's cache has room for the states of every mixer"
        return self.states.mix(mixer, hidden)
