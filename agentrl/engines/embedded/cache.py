"""Keys and values of the embedded engine: rows of tensors, and the sessions and prompts that hold them.

A session's cache has two parts. The first prompt's keys and values lie in a row of the prefix store that all sessions
with the same prompt share. Later tokens lie in a row of the session's own. Columns count from the part's beginning.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from agentrl.trajectory import PlacedImage

_COLUMNS = 64
"""Capacity grows in steps of at least so many tokens."""


class CacheFull(Exception):
    """Raised when keys and values would take more memory than allowed. The cache must be freed then."""


@dataclass(slots=True)
class Memory:
    """Bytes that keys and values may take, and bytes that they do take."""

    limit: int
    used: int = 0


class Holder(Protocol):
    """A session or prompt that can hold a row."""

    row: int
    """Index of the row, -1 without a row."""

    @property
    def held(self) -> int:
        """Number of columns of the row that are in use."""
        ...


@dataclass(slots=True, eq=False)
class Prefix:
    """A first prompt, whose keys and values sessions share."""

    ids: tuple[int, ...]
    row: int = -1
    ready: bool = False
    """Its keys and values have been computed."""
    hidden: torch.Tensor | None = None  # [H], the last hidden state after the prompt's last token
    sessions: int = 0
    """Number of sessions that begin with it."""
    experts: list[bytes] = field(default_factory=list)
    """The experts of each token, where they are recorded."""
    images: list[PlacedImage] = field(default_factory=list)
    """Images of the session that it was made for."""
    rope: torch.Tensor | None = None
    """Positions as in that session."""
    shift: int = 0

    @property
    def held(self) -> int:
        return len(self.ids) if self.ready else 0


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory's tokens, and its share of the cache."""

    name: str
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    """Number of first tokens whose keys and values are stored, the prefix included."""
    prompt_length: int = 0
    """Length of the first prompt, which is shared with other sessions."""
    prefix: Prefix | None = None
    row: int = -1
    stale: bool = False
    """Its keys and values are of weights that have been replaced."""
    busy: bool = False
    """A request of it waits or runs."""
    pinned: bool = False
    """A request of it runs: its row must stay."""
    prompt_experts: list[bytes] = field(default_factory=list)
    """The same list as the prefix's, which may have gone since."""
    experts: list[bytes] = field(default_factory=list)
    """The experts of each token after the prompt. A token that is computed again keeps its first experts."""
    images: list[PlacedImage] = field(default_factory=list)
    rope: torch.Tensor | None = None
    """[3, L] int64: positions of the L tokens of its last request; None where a position is a token's place."""
    shift: int = 0
    """Position minus place of the tokens after its images."""

    @property
    def held(self) -> int:
        return max(0, self.cached - self.prompt_length)


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, by bisection: comparing slices is much faster than comparing elements."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class KVRows:
    """Keys and values of every layer, each [rows, K, capacity, D]; rows and capacity grow on demand.

    Unwritten places are zero, not empty: a masked value is still multiplied by its weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device, memory: Memory
    ) -> None:
        """`shapes`: (K, D of keys, D of values) of each layer."""
        self.shapes = shapes
        self.dtype = dtype
        self.device = device
        self.memory = memory
        self._cell = dtype.itemsize * sum(heads * (width + other) for heads, width, other in shapes)
        self.capacity = 0
        self.holders: list[Holder | None] = []
        self.free()

    def free(self) -> None:
        """Free the memory and all rows."""
        self.memory.used -= len(self.holders) * self.capacity * self._cell
        self.keys = [self._zeros(0, heads, 0, width) for heads, width, _ in self.shapes]
        self.values = [self._zeros(0, heads, 0, width) for heads, _, width in self.shapes]
        self.holders = []
        self.capacity = 0
        self.used = 0

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for at least so many rows and columns, and for up to twice the present ones where memory allows.

        Raises CacheFull when even the least room takes too much.
        """
        have, held = len(self.holders), self.capacity
        rows, columns = max(rows, have), max(-(-columns // _COLUMNS) * _COLUMNS, held)
        if (rows, columns) == (have, held):
            return
        ample = (rows if rows == have else max(rows, 2 * have), columns if columns == held else max(columns, 2 * held))
        for size in (ample, (rows, columns)):
            more = (size[0] * size[1] - have * held) * self._cell
            if self.memory.used + more <= self.memory.limit:
                return self._grow(*size, more)
        raise CacheFull(
            f"keys and values of {rows} sequences of {columns} tokens, {rows * columns * self._cell >> 20} MiB, do not "
            f"fit into the {self.memory.limit >> 20} MiB they may take"
        )

    def _grow(self, rows: int, columns: int, more: int) -> None:
        have = len(self.holders)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                grown = self._zeros(rows, old.shape[1], columns, old.shape[3])
                grown[:have, :, : self.capacity] = old
                tensors[layer] = grown
        self.holders.extend([None] * (rows - have))
        self.capacity = columns
        self.memory.used += more

    def place(self, holder: Holder) -> None:
        """Give a holder a row, unless it has a row."""
        if holder.row < 0:
            if None not in self.holders:
                self.reserve(len(self.holders) + 1, self.capacity)
            holder.row = self.holders.index(None)
            self.holders[holder.row] = holder
            self.used += 1

    def remove(self, holder: Holder) -> None:
        """Take a holder's row away, if it has one."""
        if holder.row >= 0:
            self.holders[holder.row] = None
            holder.row = -1
            self.used -= 1

    def arrange(self, active: Sequence[Holder]) -> None:
        """Move the active holders' rows to the front, so that one view of the first rows holds them all.

        Up to a quarter of that view may be other rows: to move them would cost more than to read over them.
        """
        limit = len(active) + len(active) // 4 + 1
        far = [holder for holder in active if holder.row >= limit]
        if not far:
            return
        chosen = set(map(id, active))
        near = [row for row in range(limit) if id(self.holders[row]) not in chosen]
        near.sort(key=lambda row: self.holders[row] is not None)  # an empty row costs no copy back
        for first, other in zip(far, near, strict=False):
            row, second = first.row, self.holders[other]
            columns = max(holder.held for holder in (first, second) if holder is not None)
            for tensor in (*self.keys, *self.values):
                if second is None:
                    tensor[other, :, :columns] = tensor[row, :, :columns]
                else:
                    tensor[[row, other], :, :columns] = tensor[[other, row], :, :columns]
            self.holders[row], self.holders[other] = second, first
            first.row = other
            if second is not None:
                second.row = row

    def write(
        self, layer: int, rows: torch.Tensor, columns: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store key and value [K, P, D] of P tokens at (rows[p], columns[p])."""
        self.keys[layer][rows, :, columns] = key.transpose(0, 1)
        self.values[layer][rows, :, columns] = value.transpose(0, 1)


class SessionCache:
    """All sessions and prefixes, and the two stores their keys and values lie in."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_bytes: int,
    ) -> None:
        memory = Memory(max_bytes)
        self.own = KVRows(shapes, dtype, device, memory)
        self.shared = KVRows(shapes, dtype, device, memory)
        self.max_rows = max_rows
        self.sessions: dict[str, Session] = {}
        self.prefixes: dict[tuple[int, ...], Prefix] = {}

    def take(self, name: str, ids: Sequence[int]) -> tuple[Session, int]:
        """Make `ids` the tokens of a session, a new one if need be. Return it and the number of tokens it had already.

        The cached part of the common prefix is kept, unless the prefix ends within the first prompt.
        """
        session = self.sessions.setdefault(name, Session(name))
        known = len(session.ids)
        same = known if ids[:known] == session.ids else _common_length(session.ids, ids)
        if same < session.prompt_length or not session.prompt_length:
            self.drop(session)
            session.prompt_length = len(ids)
            session.prompt_experts, session.experts = [], []
        session.cached = min(session.cached, same)
        if session.cached == len(ids) > session.prompt_length:
            session.cached -= 1  # at least one token has to run again, for its logits
        del session.experts[max(0, same - session.prompt_length) :]
        del session.ids[same:]
        session.ids.extend(ids[same:])
        return session, same

    def attach(self, session: Session) -> None:
        """Give a session its rows, those it has or new ones, and keep them until it is unpinned.

        A new row may evict the session or prompt that was attached longest ago.
        """
        session.pinned = True
        prefix = session.prefix
        if prefix is None:
            session.cached = 0
            prompt = tuple(session.ids[: session.prompt_length])
            prefix = self.prefixes.get(prompt)
            if prefix is None:
                self._evict(self.shared, self.prefixes.values())
                prefix = Prefix(prompt, images=session.images, rope=session.rope)
                self.shared.place(prefix)
            prefix.sessions += 1
            session.prefix = prefix
            session.cached = prefix.held
        if session.row < 0:
            self._evict(self.own, self.sessions.values())
            self.own.place(session)
        # The dictionaries are in order of use.
        self.sessions[session.name] = self.sessions.pop(session.name)
        self.prefixes.pop(prefix.ids, None)
        self.prefixes[prefix.ids] = prefix

    def _evict(self, store: KVRows, holders: Iterable[Session | Prefix]) -> None:
        """Free the row of the least recently used holder of a full store that nobody needs now, if any."""
        if store.used < self.max_rows:
            return
        for holder in holders:
            if isinstance(holder, Prefix):
                if not holder.sessions:
                    return self._discard(holder)
            elif holder.row >= 0 and not holder.pinned:
                return self.drop(holder) if holder.busy else self.forget(holder)

    def drop(self, session: Session) -> None:
        """Drop a session's keys and values; its tokens stay, to be computed again."""
        self.own.remove(session)
        session.cached, session.stale, session.pinned = 0, False, False
        prefix, session.prefix = session.prefix, None
        if prefix is not None:
            prefix.sessions -= 1
            if not prefix.sessions and (not prefix.ready or self.prefixes.get(prefix.ids) is not prefix):
                self._discard(prefix)

    def forget(self, session: Session) -> None:
        """Drop a session with its tokens."""
        self.drop(session)
        self.sessions.pop(session.name, None)

    def _discard(self, prefix: Prefix) -> None:
        self.shared.remove(prefix)
        prefix.hidden = None
        if self.prefixes.get(prefix.ids) is prefix:
            del self.prefixes[prefix.ids]

    def flush(self, keep: Iterable[Session] = ()) -> None:
        """Drop all keys and values except for the sessions `keep`."""
        kept = set(map(id, keep))
        for session in [s for s in self.sessions.values() if id(s) not in kept]:
            self.drop(session)
            if not session.busy:
                del self.sessions[session.name]
        for prefix in [p for p in self.prefixes.values() if not p.sessions]:
            self._discard(prefix)

    def outdate(self, keep: Iterable[Session]) -> None:
        """Follow a change of the weights: only the sessions `keep` continue with their keys and values, unshared."""
        kept = list(keep)
        self.flush(kept)
        for session in kept:
            session.stale = True
        self.prefixes.clear()

    def free(self) -> None:
        """Drop all keys and values and free their memory."""
        self.flush()
        self.own.free()
        self.shared.free()
