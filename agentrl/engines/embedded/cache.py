"""Keys, values and states of the embedded engine: rows of tensors, and the sessions and prompts that hold them.

A session's cache has two parts. The first prompt's keys and values lie in a row of the prefix store that all sessions
with the same prompt share. Later tokens lie in a row of the session's own. Columns count from the part's beginning.
A session of a trajectory that has another one already begins with a copy of what both have in common.

Where the model has mixers with a state, a row also holds their states after its last token. States, unlike keys and
values, cannot be cut back. Copies of earlier ones are kept in a third store (`SessionCache.save`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from agentrl.engines.contract import trajectory_of
from agentrl.trajectory import PlacedImage
from agentrl.trajectory.beginnings import common_length

COLUMNS = 64
"""Capacity grows in steps of at least so many tokens."""
_SAVED = 2
"""Saved states that a session keeps."""
StateKind = Literal["conv_states", "recurrent_states"]
STATE_KINDS: tuple[StateKind, ...] = ("conv_states", "recurrent_states")
"""Names of a mixer's states in a layer of transformers' cache."""


class CacheFull(Exception):
    """Raised when keys and values would take more memory than allowed. The cache must be freed then."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor among the states of a mixer, without its first dimension, the sequences."""

    layer: int
    kind: StateKind
    index: int
    """Number among the layer's states of this kind."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(slots=True)
class Memory:
    """Bytes that keys, values and states may take, and bytes that they do take."""

    limit: int
    used: int = 0


Places = tuple[torch.Tensor, ...]
"""The places of some tokens' keys and values in a store, as its `places` gives them."""


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
    is_cut: bool = False
    """The beginning of another prefix: no prompt of a request ends with it, so that it has no `hidden`."""

    @property
    def held(self) -> int:
        return len(self.ids) if self.ready else 0


@dataclass(slots=True, eq=False)
class _Saved:
    """States of a session after its first `tokens` tokens."""

    tokens: int
    row: int = -1
    held: int = 0
    """Columns in use: none."""


@dataclass(slots=True, eq=False)
class Session:
    """One trajectory's tokens, and its share of the cache."""

    name: str
    ids: list[int] = field(default_factory=list)
    cached: int = 0
    """Number of first tokens whose keys and values are stored, the prefix included."""
    prompt_length: int = 0
    """Length of the first prompt, or of its beginning, which is shared with other sessions."""
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
    saved: list[_Saved] = field(default_factory=list)
    """Saved states of later tokens than the first prompt's, in their order; its prefix holds the states after that."""
    trajectory: str = field(init=False)
    """See `trajectory_of`."""

    def __post_init__(self) -> None:
        self.trajectory = trajectory_of(self.name)

    @property
    def held(self) -> int:
        return max(0, self.cached - self.prompt_length)


class Store(Protocol):
    """Keys and values of holders, each in a row of its own: `KVRows`, or `agentrl.engines.embedded.pages.PagedRows`.

    `tests/engines/test_stores.py` is the contract.
    """

    memory: Memory
    device: torch.device
    dtype: torch.dtype
    holders: list[Holder | None]
    """The holder of each row."""
    used: int
    """Number of rows that are held."""
    states: list[torch.Tensor]
    """States of the model's mixers, [rows, ...] each; empty where it has no such mixers."""
    state_shapes: Sequence[StateShape]

    def free(self) -> None:
        """Free the memory and all rows."""
        ...

    def place(self, holder: Holder) -> None:
        """Give a holder a row, unless it has a row."""
        ...

    def remove(self, holder: Holder) -> None:
        """Take a holder's row away, if it has one."""
        ...

    def extend(self, holders: Sequence[Holder], columns: Sequence[int]) -> None:
        """Make room for so many columns in the row of each holder. Raises CacheFull."""
        ...

    def arrange(self, active: Sequence[Holder]) -> None:
        """Prepare for reading the rows of the active holders together. Rows may move."""
        ...

    def places(self, rows: Sequence[int], columns: Sequence[int]) -> Places:
        """Find where the cells (rows[p], columns[p]) lie, whose room has been made."""
        ...

    def write(self, layer: int, places: Places, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [K, P, D] of P tokens at their places."""
        ...

    def read(self, layer: int, row: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first columns' keys and values of a row: [K, columns, D] each."""
        ...

    def copy_columns(self, row: int, source_row: int, columns: int) -> None:
        """Copy the first columns' keys and values of one row into another one, whose room has been made."""
        ...

    def copy_states(self, row: int, source: Store, source_row: int) -> None:
        """Copy the states of a row of another store into a row."""
        ...


class KVRows:
    """Keys and values of every layer, each [rows, K, capacity, D]; rows and capacity grow on demand.

    Where the model has mixers with a state, a row also has their states: `states`, a tensor [rows, ...] a shape.

    Unwritten places are zero, not empty: a masked value is still multiplied by its weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        memory: Memory,
        state_shapes: Sequence[StateShape] = (),
    ) -> None:
        """`shapes`: (K, D of keys, D of values) of each layer, zeros for a layer without attention."""
        self.shapes, self.state_shapes = shapes, state_shapes
        self.dtype = dtype
        self.device = device
        self.memory = memory
        self._cell = dtype.itemsize * sum(heads * (width + other) for heads, width, other in shapes)
        self._row = sum(shape.nbytes for shape in state_shapes)
        self.capacity = 0
        self.holders: list[Holder | None] = []
        self.free()

    def free(self) -> None:
        """Free the memory and all rows."""
        self.memory.used -= self._bytes(len(self.holders), self.capacity)
        self.keys = [self._zeros(0, heads, 0, width) for heads, width, _ in self.shapes]
        self.values = [self._zeros(0, heads, 0, width) for heads, _, width in self.shapes]
        self.states = [torch.zeros(0, *s.shape, dtype=s.dtype, device=self.device) for s in self.state_shapes]
        self.holders = []
        self.capacity = 0
        self.used = 0

    def _bytes(self, rows: int, columns: int) -> int:
        return rows * (columns * self._cell + self._row)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def extend(self, holders: Sequence[Holder], columns: Sequence[int]) -> None:
        """Make room for so many columns in the row of each holder, and with it in all rows. Raises CacheFull."""
        self.reserve(0, max(columns, default=0))

    def reserve(self, rows: int, columns: int) -> None:
        """Make room for at least so many rows and columns, and for up to twice the present ones where memory allows.

        Raises CacheFull when even the least room takes too much.
        """
        have, held = len(self.holders), self.capacity
        rows, columns = max(rows, have), max(-(-columns // COLUMNS) * COLUMNS, held)
        if (rows, columns) == (have, held):
            return
        ample = (rows if rows == have else max(rows, 2 * have), columns if columns == held else max(columns, 2 * held))
        for size in (ample, (rows, columns)):
            more = self._bytes(*size) - self._bytes(have, held)
            if self.memory.used + more <= self.memory.limit:
                return self._grow(*size, more)
        raise CacheFull(
            f"keys and values of {rows} sequences of {columns} tokens, {self._bytes(rows, columns) >> 20} MiB, do not "
            f"fit into the {self.memory.limit >> 20} MiB they may take"
        )

    def _grow(self, rows: int, columns: int, more: int) -> None:
        have = len(self.holders)
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                grown = self._zeros(rows, old.shape[1], columns, old.shape[3])
                grown[:have, :, : self.capacity] = old
                tensors[layer] = grown
        self.states = [torch.cat([old, old.new_zeros(rows - have, *old.shape[1:])]) for old in self.states]
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
            for tensor in self.states:
                tensor[[row, other]] = tensor[[other, row]]
            self.holders[row], self.holders[other] = second, first
            first.row = other
            if second is not None:
                second.row = row

    @torch.inference_mode()
    def copy_columns(self, row: int, source_row: int, columns: int) -> None:
        """Copy the first columns' keys and values of one row into another one."""
        for tensor in (*self.keys, *self.values):
            tensor[row, :, :columns] = tensor[source_row, :, :columns]

    @torch.inference_mode()
    def copy_states(self, row: int, source: Store, source_row: int) -> None:
        """Copy the states of a row of another store into a row."""
        for ours, its in zip(self.states, source.states, strict=True):
            ours[row] = its[source_row]

    def places(self, rows: Sequence[int], columns: Sequence[int]) -> Places:
        """Return the rows and columns, [P] int64 each."""
        return torch.tensor(rows, device=self.device), torch.tensor(columns, device=self.device)

    def write(self, layer: int, places: Places, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [K, P, D] of P tokens at their places."""
        rows, columns = places
        self.keys[layer][rows, :, columns] = key.transpose(0, 1)
        self.values[layer][rows, :, columns] = value.transpose(0, 1)

    def read(self, layer: int, row: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first columns' keys and values of a row, views [K, columns, D]."""
        return self.keys[layer][row, :, :columns], self.values[layer][row, :, :columns]


class SessionCache:
    """All sessions and prefixes, and the stores in which their keys, values and states lie."""

    def __init__(self, own: Store, shared: Store, saved: Store, *, max_rows: int) -> None:
        """Keep sessions in `own`, their first prompts in `shared`, and earlier states in `saved`."""
        self.own, self.shared, self.saved = own, shared, saved
        self.max_rows = max_rows
        self.sessions: dict[str, Session] = {}
        self.prefixes: dict[tuple[int, ...], Prefix] = {}

    @classmethod
    def of_rows(
        cls,
        shapes: Sequence[tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_bytes: int,
        state_shapes: Sequence[StateShape] = (),
    ) -> SessionCache:
        """Make a cache whose stores are tensors of whole rows, for any model. `shapes` as `KVRows` has them."""
        aside = max_bytes // 4 if state_shapes else 0
        memory = Memory(max_bytes - aside)
        own, shared = (KVRows(shapes, dtype, device, memory, state_shapes) for _ in range(2))
        return cls(own, shared, KVRows((), dtype, device, Memory(aside), state_shapes), max_rows=max_rows)

    def take(self, name: str, ids: Sequence[int]) -> tuple[Session, int]:
        """Make `ids` the tokens of a session, a new one if need be. Return it and the number of tokens it had already.

        The cached part of the common prefix is kept, unless the prefix ends within the first prompt. With states, the
        part up to the last states within it is kept.
        """
        session = self.sessions.setdefault(name, Session(name))
        known = len(session.ids)
        same = known if ids[:known] == session.ids else common_length(session.ids, ids)
        ends_in_cut = session.prefix is not None and session.prefix.is_cut and len(ids) == session.prompt_length
        if same < session.prompt_length or not session.prompt_length or ends_in_cut:
            self.drop(session)
            session.prompt_length = len(ids)
            session.prompt_experts, session.experts = [], []
        cached = min(session.cached, same)
        if cached == len(ids) > session.prompt_length:
            cached -= 1  # at least one token has to run again, for its logits
        if cached < session.cached and self.own.states:
            cached = self._return(session, cached)
        session.cached = cached
        del session.experts[max(0, same - session.prompt_length) :]
        del session.ids[same:]
        session.ids.extend(ids[same:])
        return session, same

    def save(self, session: Session, tokens: int) -> None:
        """Save the states of a session, which are those after its first `tokens` tokens, where memory allows.

        The session's next request may diverge from its tokens, and then continues from saved states.
        """
        if session.saved and session.saved[-1].tokens == tokens:
            return
        saved = _Saved(tokens)
        try:
            self.saved.place(saved)
        except CacheFull:
            return
        self.saved.copy_states(saved.row, self.own, session.row)
        session.saved.append(saved)
        if len(session.saved) > _SAVED:
            self.saved.remove(session.saved.pop(0))

    def _return(self, session: Session, cached: int) -> int:
        """Return a session to its last states after at most `cached` tokens: the number of tokens before them."""
        while session.saved and session.saved[-1].tokens > cached:
            self.saved.remove(session.saved.pop())
        if not session.saved:
            return min(cached, session.prompt_length)
        last = session.saved[-1]
        self.own.copy_states(session.row, self.saved, last.row)
        return last.tokens

    def attach(self, session: Session) -> None:
        """Give a session its rows, those it has or new ones, and keep them until it is unpinned.

        A new row may evict the session or prompt that was attached longest ago. Keys and values come from another
        session of the trajectory where at least half of the tokens are in common.
        """
        session.pinned = True
        if session.prefix is None and self._borrow(session):
            self.sessions[session.name] = self.sessions.pop(session.name)
            return
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
        if not prefix.is_cut:
            self.prefixes.pop(prefix.ids, None)
            self.prefixes[prefix.ids] = prefix

    def _borrow(self, session: Session) -> bool:
        """Begin a session with keys and values of another session of its trajectory; False where no session has enough.

        The other one's first prompt is shared, or a copy of its beginning. What follows is copied.
        """
        of_trajectory = [one for one in self.sessions.values() if one.trajectory == session.trajectory]
        others = [one for one in of_trajectory if one is not session]
        if not others or self.own.states or session.images:
            return False
        found = [(self._in_common(session, one), one) for one in others]
        common, other = max(found, key=lambda pair: pair[0])
        known = self.prefixes.get(tuple(session.ids[: session.prompt_length]))
        if 2 * common < len(session.ids) or (known is not None and known.held >= common):
            return False
        prefix, pinned = other.prefix, other.pinned
        assert prefix is not None, "it has keys and values"
        other.pinned = True  # its row is not to be evicted for this session's
        try:
            if common < len(prefix.ids):
                self._evict(self.shared, self.prefixes.values())
                prefix = self._cut(prefix, common)
            self._begin(session, prefix, [*other.prompt_experts, *other.experts][:common])
            self._evict(self.own, self.sessions.values())
            self.own.place(session)
            columns = common - len(prefix.ids)
            self.own.extend([session], [columns])
            self.own.copy_columns(session.row, other.row, columns)
            session.cached = common
        finally:
            other.pinned = pinned
        return True

    def _in_common(self, session: Session, other: Session) -> int:
        """Count the first tokens of a session whose keys and values another session has.

        At least one token has to run, for its logits.
        """
        ready = other.prefix is not None and other.prefix.ready
        if other.stale or other.row < 0 or other.images or not ready:
            return 0
        return min(common_length(session.ids, other.ids), other.cached, len(session.ids) - 1)

    def _cut(self, prefix: Prefix, length: int) -> Prefix:
        """Make a prefix of the first tokens of another one."""
        made = Prefix(prefix.ids[:length], ready=True, is_cut=True, experts=prefix.experts[:length])
        try:
            self.shared.place(made)
            self.shared.extend([made], [length])
        except CacheFull:
            self.shared.remove(made)
            raise
        self.shared.copy_columns(made.row, prefix.row, length)
        return made

    @staticmethod
    def _begin(session: Session, prefix: Prefix, experts: Sequence[bytes]) -> None:
        """Attach a session to a prefix that has keys and values. experts: of more tokens than it may have known."""
        own = [*session.prompt_experts, *session.experts]
        own += experts[len(own) :]
        session.prefix, session.prompt_length = prefix, len(prefix.ids)
        session.prompt_experts, session.experts = own[: len(prefix.ids)], own[len(prefix.ids) :]
        prefix.sessions += 1

    def _evict(self, store: Store, holders: Iterable[Session | Prefix]) -> None:
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
        while session.saved:
            self.saved.remove(session.saved.pop())
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
        self.saved.free()
