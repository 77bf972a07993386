"""Attention of one step of the embedded engine, over the rows of keys and values.

The step's tokens are packed in one row: first one token of each decoding session, then the new tokens of sessions that
extend their cache by several (segments), then the tokens of new prompts. All of them are written to the cache first.
Decoding runs over views of the stores, without copying them: each session's own row, and each prompt's row once
for all sessions that share it (arXiv:2402.05099); the two parts are joined by their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch

from agentrl.model.attention import PackedAttention, attend_part, join_parts
from agentrl.model.layout import PackedLayout
from agentrl.rollout.embedded_cache import KVRows, Prefix, Session


class DecodeBatch:
    """The sessions that decode one token each; built when they change, then advanced from step to step."""

    def __init__(self, sessions: Sequence[Session], own: KVRows, shared: KVRows) -> None:
        self.own, self.shared = own, shared
        device = own.device
        self.size = len(sessions)
        rows = [session.row for session in sessions]
        prefixes = [session.prefix.row for session in sessions if session.prefix is not None]
        self.rows = torch.tensor(rows, device=device)  # [n]
        self.columns = torch.tensor([session.held for session in sessions], device=device)  # [n]
        self.positions = torch.tensor([session.cached for session in sessions], device=device)  # [n]
        self.longest = max(session.held for session in sessions)

        # Own part: a view of the first `width` rows. A row of somebody else stands in for nothing with one column.
        self.width = max(rows) + 1
        self.dense = rows == list(range(self.size))
        self.source = torch.zeros(self.width, dtype=torch.int64, device=device)  # [width] -> token
        self.source[self.rows] = torch.arange(self.size, device=device)
        self.lengths = torch.zeros(self.width, dtype=torch.int64, device=device)
        self.lengths[self.rows] = self.columns

        # Shared part: a view of the first `prompts` rows; each prompt's queries side by side, padded with token 0.
        self.prompts = max(prefixes) + 1
        members: list[list[int]] = [[] for _ in range(self.prompts)]
        for token, prefix in enumerate(prefixes):
            members[prefix].append(token)
        self.members = max(map(len, members))
        padded = [tokens + [0] * (self.members - len(tokens)) for tokens in members]
        self.queries = torch.tensor(padded, device=device).flatten()  # [prompts * members] -> token
        places = [prefix * self.members + members[prefix].index(token) for token, prefix in enumerate(prefixes)]
        self.places = torch.tensor(places, device=device)  # [n] -> place in `queries`
        held = [holder.held if holder is not None else 1 for holder in shared.holders[: self.prompts]]
        self.prompt_columns = max(max(held), 1)
        self.prompt_mask = _length_mask(torch.tensor(held, device=device), self.prompt_columns, own.dtype)

    def prepare(self) -> None:
        """Before a step: make room for its token and mask what lies beyond it."""
        self.longest += 1
        self.own.reserve(0, self.longest)
        self.lengths += 1
        self.mask = _length_mask(self.lengths, self.longest, self.own.dtype)

    def advance(self) -> None:
        """After a step: each session has one token more."""
        self.columns += 1
        self.positions += 1

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """query [H, n, D] -> [n, H, D]."""
        key, value = self.own.keys[layer], self.own.values[layer]
        heads = key.shape[1]
        q = query.unflatten(0, (heads, -1)).permute(2, 0, 1, 3)  # [n, K, G, D]
        spread = q if self.dense else q.index_select(0, self.source)
        view = (slice(self.width), slice(None), slice(self.longest))
        out, lse = attend_part(spread, key[view], value[view], self.mask, scale)
        if not self.dense:
            out, lse = out.index_select(0, self.rows), lse.index_select(0, self.rows)

        key, value = self.shared.keys[layer], self.shared.values[layer]
        view = (slice(self.prompts), slice(None), slice(self.prompt_columns))
        together = q.index_select(0, self.queries).unflatten(0, (self.prompts, -1)).transpose(1, 2).flatten(2, 3)
        part, part_lse = attend_part(together, key[view], value[view], self.prompt_mask, scale)
        part = part.unflatten(2, (self.members, -1)).transpose(1, 2).flatten(0, 1).index_select(0, self.places)
        part_lse = part_lse.unflatten(2, (self.members, -1)).transpose(1, 2).flatten(0, 1).index_select(0, self.places)
        share = torch.sigmoid(part_lse - lse).unsqueeze(-1).to(out.dtype)
        return torch.lerp(out, part, share).flatten(1, 2)


def _length_mask(lengths: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, 1, 1, columns]: 0 in the first lengths[b] columns (at least one), minus infinity after them."""
    inside = torch.arange(columns, device=lengths.device) < lengths.clamp(min=1)[:, None]
    return torch.zeros(inside.shape, dtype=dtype, device=lengths.device).masked_fill_(~inside, -math.inf)[:, None, None]


class Segments:
    """Sessions that extend their cache by one or more tokens, those of one prompt side by side."""

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


def _tail_mask(new: int, total: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """[1, 1, new, total]: the last `new` of `total` tokens attend causally. None when nothing is masked."""
    if new == 1:
        return None
    mask = torch.full((new, total), -math.inf, dtype=dtype, device=device)
    return mask.triu_(total - new + 1)[None, None]


class StepAttention:
    """The `AttentionLayout` of one step: decoding sessions, then segments, then the tokens of new prompts."""

    def __init__(
        self,
        decode: DecodeBatch | None,
        segments: Segments | None,
        prompts: Sequence[Prefix],
        prompt_layout: PackedLayout | None,
        own: KVRows,
        shared: KVRows,
    ) -> None:
        self.decode, self.segments = decode, segments
        self.own, self.shared = own, shared
        self.tree = None if prompt_layout is None else PackedAttention(prompt_layout)
        parts = [part for part in (decode, segments) if part is not None]
        self.continuing = sum(part.size for part in parts)
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
        parts = []
        split = self.continuing
        if split:
            self.own.write(layer, self.rows, self.columns, key[:, :split], value[:, :split])
        if self.tree is not None:
            expand = self.tree.layout.expand
            k, v = key[:, split:], value[:, split:]
            self.shared.write(layer, self.prompt_rows, self.prompt_columns, k[:, expand], v[:, expand])
        start = 0
        for part in (self.decode, self.segments):
            if part is not None:
                parts.append(part.attend(layer, query[:, start : start + part.size], scale))
                start += part.size
        if self.tree is not None:
            parts.append(self.tree.attend(layer, query[:, split:], k, v, scale, None, None))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
