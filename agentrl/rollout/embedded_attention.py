"""Attention of one step of the embedded engine, over the rows of keys and values.

The step's tokens are packed in one row: first one token of each decoding session, then the new tokens of sessions that
extend their cache by several, then the tokens of new prompts. All of them are written to the cache first. Decoding runs
over views of the stores, without copying them: each session's own row, and each prompt's row once for all sessions
that share it (arXiv:2402.05099).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from agentrl.model.attention import PackedAttention, attend_part, attend_tail, join_parts
from agentrl.model.layout import PackedLayout
from agentrl.rollout.embedded_cache import KVRows, Prefix, Session


class _Part:
    """The rows of a store that T tokens attend to, one row each, and the tokens sorted by them.

    The store's first rows are used as a view where most of them are wanted, else the wanted ones are copied. Tokens
    are laid out as `outer` rows of `inner` places; a row that many more tokens share than others appears repeatedly.
    """

    def __init__(self, store: KVRows, rows: Sequence[int]) -> None:
        """rows: [T], the row of each token."""
        self.store = store
        members: dict[int, list[int]] = {}
        for token, row in enumerate(rows):
            members.setdefault(row, []).append(token)
        size = max(8, 2 * -(-len(rows) // len(members)))
        pieces = [(row, some[i : i + size]) for row, some in members.items() for i in range(0, len(some), size)]
        self.view = len(pieces) == len(members) and max(members) < 1.5 * len(members)
        if self.view:
            pieces = [(row, members.get(row, [])) for row in range(max(members) + 1)]
        self.outer, self.inner = len(pieces), max(len(some) for _, some in pieces)
        self.chosen = torch.tensor([row for row, _ in pieces], device=store.device)
        self.plain = [some for _, some in pieces] == [[token] for token in range(len(rows))]
        padded = [some + [0] * (self.inner - len(some)) for _, some in pieces]  # token 0 where there is none
        self._source = torch.tensor(padded, device=store.device).flatten()  # [outer * inner] -> token
        back = [0] * len(rows)
        for index, (_, some) in enumerate(pieces):
            for place, token in enumerate(some):
                back[token] = index * self.inner + place
        self.back = torch.tensor(back, device=store.device)  # [T] -> place

    def attend(
        self, layer: int, query: torch.Tensor, columns: int, mask: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention to the first `columns` of each token's row: output [T, K, G, D] and log-sum-exp [T, K, G].

        query [T, K, G, D]; mask [outer, 1, 1 or inner, columns].
        """
        key, value = (
            (rows[: self.outer] if self.view else rows[self.chosen])[:, :, :columns]
            for rows in (self.store.keys[layer], self.store.values[layer])
        )
        if self.plain:
            return attend_part(query, key, value, mask, scale)
        grid = query.index_select(0, self._source).unflatten(0, (self.outer, self.inner)).transpose(1, 2).flatten(2, 3)
        if mask.shape[2] > 1:
            mask = mask.repeat_interleave(query.shape[2], dim=2)
        out, lse = attend_part(grid, key, value, mask, scale)
        return self._collect(out), self._collect(lse)

    def _collect(self, grid: torch.Tensor) -> torch.Tensor:
        """[outer, K, inner * G, *] -> [T, K, G, *]"""
        return grid.unflatten(2, (self.inner, -1)).transpose(1, 2).flatten(0, 1).index_select(0, self.back)


class RowBatch:
    """Sessions that extend their cache by one token, or a few each, side by side.

    A batch of sessions that decode is built when they change and advanced from step to step.
    """

    def __init__(self, sessions: Sequence[Session], own: KVRows, shared: KVRows) -> None:
        self.own, self.sessions = own, sessions
        device = own.device
        spans = [(session, len(session.ids) - session.cached) for session in sessions]
        owners = [session for session, new in spans for _ in range(new)]
        columns = [session.held + place for session, new in spans for place in range(new)]
        self.size = len(owners)
        self.rows = torch.tensor([session.row for session in owners], device=device)  # [T]
        self.columns = torch.tensor(columns, device=device)  # [T]
        self.positions = self.columns + torch.tensor([session.prompt_length for session in owners], device=device)
        self.longest = max(columns) + 1
        self._own_part = _Part(own, [session.row for session in owners])
        self._visible = torch.ones(self._own_part.outer * self._own_part.inner, dtype=torch.int64, device=device)
        self._visible[self._own_part.back] = self.columns + 1

        self._prompt_part = _Part(shared, [session.prefix.row for session in owners if session.prefix is not None])
        holders = [shared.holders[row] for row in self._prompt_part.chosen.tolist()]
        held = [holder.held if holder is not None else 0 for holder in holders]
        self._prompt_columns = max(held)
        prompt_mask = _length_mask(torch.tensor(held, device=device), self._prompt_columns, own.dtype)
        self._prompt_mask = prompt_mask[:, None, None]
        self._prepare()

    @property
    def ids(self) -> list[int]:
        return [token for session in self.sessions for token in session.ids[session.cached :]]

    def _prepare(self) -> None:
        """Make room for the step's tokens and mask what each of them must not see."""
        self.own.reserve(0, self.longest)
        mask = _length_mask(self._visible, self.longest, self.own.dtype)
        self._mask = mask.unflatten(0, (self._own_part.outer, 1, self._own_part.inner))

    def advance(self) -> None:
        """After a decoding step: each session has one token more."""
        for count in (self.columns, self.positions, self._visible):
            count += 1
        self.longest += 1
        self._prepare()

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """query [H, T, D] -> [T, H, D]."""
        q = query.unflatten(0, (self.own.keys[layer].shape[1], -1)).permute(2, 0, 1, 3)  # [T, K, G, D]
        out, lse = self._own_part.attend(layer, q, self.longest, self._mask, scale)
        prompt, prompt_lse = self._prompt_part.attend(layer, q, self._prompt_columns, self._prompt_mask, scale)
        share = torch.sigmoid(prompt_lse - lse).unsqueeze(-1)
        return torch.lerp(out, prompt, share.to(out.dtype)).flatten(1, 2)


def _length_mask(lengths: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, columns]: 0 in the first lengths[b] columns (at least one), minus infinity after them."""
    outside = torch.arange(columns, device=lengths.device) >= lengths.clamp(min=1)[:, None]
    return torch.zeros(outside.shape, dtype=dtype, device=lengths.device).masked_fill_(outside, -math.inf)


class Segments:
    """Sessions that extend their cache by many tokens, one after the other; those of one prompt side by side."""

    def __init__(self, sessions: Sequence[Session], own: KVRows, shared: KVRows) -> None:
        self.own, self.shared = own, shared
        self.sessions = sorted(sessions, key=lambda s: (s.prefix.row if s.prefix is not None else -1, s.row))
        device = own.device
        own.reserve(0, max(len(s.ids) - s.prompt_length for s in sessions))
        self.spans: list[tuple[int, int]] = []
        self.masks: list[torch.Tensor | None] = []
        size = 0
        rows: list[int] = []
        columns: list[int] = []
        for session in self.sessions:
            total, new = len(session.ids) - session.prompt_length, len(session.ids) - session.cached
            self.spans.append((size, size + new))
            size += new
            rows += [session.row] * new
            columns += range(total - new, total)
            self.masks.append(_tail_mask(new, total, own.dtype, device))
        self.size = size
        self.rows, self.columns = torch.tensor(rows, device=device), torch.tensor(columns, device=device)
        lengths = [session.prompt_length for session in self.sessions]
        starts = torch.tensor([length for length, (a, b) in zip(lengths, self.spans, strict=True) for _ in range(a, b)])
        self.positions = self.columns + starts.to(device)
        # The queries [first, last) of each prompt.
        self.groups: list[tuple[Prefix, int, int]] = []
        for prefix, members in groupby(zip(self.sessions, self.spans, strict=True), key=lambda pair: pair[0].prefix):
            spans = [span for _, span in members]
            assert prefix is not None
            self.groups.append((prefix, spans[0][0], spans[-1][1]))

    @property
    def ids(self) -> list[int]:
        return [token for session in self.sessions for token in session.ids[session.cached :]]

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """query [H, m, D] -> [m, H, D]."""
        if query.device.type != "cpu":
            return self._attend_one_by_one(layer, query, scale)
        key, value = self.own.keys[layer], self.own.values[layer]
        heads, groups = key.shape[1], query.shape[0] // key.shape[1]
        q = query.unflatten(0, (heads, groups))  # [K, G, m, D]
        output = q.new_empty(self.size, heads, groups, value.shape[-1])
        out, lse = output.permute(1, 2, 0, 3), q.new_empty(heads, groups, self.size, dtype=torch.float32)
        for session, (start, end), mask in zip(self.sessions, self.spans, self.masks, strict=True):
            total = len(session.ids) - session.prompt_length
            k, v = (x[session.row, :, None, :total].expand(-1, groups, -1, -1) for x in (key, value))
            out[:, :, start:end], lse[:, :, start:end] = attend_part(q[:, :, start:end], k, v, mask, scale)
        key, value = self.shared.keys[layer], self.shared.values[layer]
        for prefix, start, end in self.groups:
            k, v = (x[prefix.row, :, None, : len(prefix.ids)].expand(-1, groups, -1, -1) for x in (key, value))
            part = attend_part(q[:, :, start:end], k, v, None, scale)
            join_parts(out[:, :, start:end], lse[:, :, start:end], *part)
        return output.flatten(1, 2)

    def _attend_one_by_one(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """The same with one call for all of a session's keys, put together."""
        outputs = []
        for session, (start, end) in zip(self.sessions, self.spans, strict=True):
            assert session.prefix is not None
            prompt, total = session.prompt_length, len(session.ids) - session.prompt_length
            key, value = (
                torch.cat([shared[layer][session.prefix.row, :, :prompt], own[layer][session.row, :, :total]], dim=1)
                for shared, own in ((self.shared.keys, self.own.keys), (self.shared.values, self.own.values))
            )
            outputs.append(attend_tail(query[:, start:end], key, value, scale, None, None))
        return torch.cat(outputs, dim=1).transpose(0, 1)


def _tail_mask(new: int, total: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """[1, 1, new, total]: the last `new` of `total` tokens attend causally. None when nothing is masked."""
    if new == 1:
        return None
    mask = torch.full((new, total), -math.inf, dtype=dtype, device=device)
    return mask.triu_(total - new + 1)[None, None]


class StepAttention:
    """The `AttentionLayout` of one step: the tokens of some parts in order, then those of new prompts."""

    def __init__(
        self,
        parts: Sequence[RowBatch | Segments],
        prompts: Sequence[Prefix],
        prompt_layout: PackedLayout | None,
        own: KVRows,
        shared: KVRows,
    ) -> None:
        self.parts = parts
        self.own, self.shared = own, shared
        self.tree = None if prompt_layout is None else PackedAttention(prompt_layout)
        self.continuing = sum(part.size for part in parts)
        """Tokens of all parts, before those of new prompts."""
        if parts:
            self.rows = torch.cat([part.rows for part in parts]) if len(parts) > 1 else parts[0].rows
            self.columns = torch.cat([part.columns for part in parts]) if len(parts) > 1 else parts[0].columns
        if prompts:
            lengths = torch.tensor([len(prefix.ids) for prefix in prompts])
            rows = torch.tensor([prefix.row for prefix in prompts]).repeat_interleave(lengths)
            columns = torch.cat([torch.arange(length) for length in lengths.tolist()])
            self.prompt_rows, self.prompt_columns = rows.to(own.device), columns.to(own.device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """The engine has refused models with a softcap, or a window shorter than its longest context."""
        split = self.continuing
        if split:
            self.own.write(layer, self.rows, self.columns, key[:, :split], value[:, :split])
        if self.tree is not None:
            expand = self.tree.layout.expand
            k, v = key[:, split:], value[:, split:]
            self.shared.write(layer, self.prompt_rows, self.prompt_columns, k[:, expand], v[:, expand])
        outputs = []
        start = 0
        for part in self.parts:
            outputs.append(part.attend(layer, query[:, start : start + part.size], scale))
            start += part.size
        if self.tree is not None:
            outputs.append(self.tree.attend(layer, query[:, split:], k, v, scale, None, None))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
