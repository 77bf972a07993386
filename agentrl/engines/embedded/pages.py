"""Keys and values of the embedded engine in pages, for steps that run over buffers whose addresses never change.

A row is a list of pages of `PAGE` tokens, which are taken from one pool when tokens come. A pool that is full grows to
twice its size; only then its tensors move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from agentrl.engines.embedded.cache import CacheFull, Holder, Memory, Places, SessionCache, StateShape, Store

PAGE = 128
"""Tokens of a page, and of a block of flex attention's masks."""
EMPTY, SPARE = 0, 1
"""A page that nobody writes, after the last page of a token that reads fewer than others; and the page on which rows
without a request write and read."""
_RESERVED = 2


def in_pages(device: str, graphs: bool | None, *, has_states: bool, records_experts: bool) -> tuple[bool, str]:
    """Say whether an engine keeps keys and values in pages, over which a GPU decodes by graphs.

    The text names what stands against it where it was asked for. graphs: as asked for; None: on a GPU.
    """
    asked = device == "cuda" if graphs is None else graphs
    against = "a state" if has_states else "experts that are recorded" if records_experts else ""
    return (False, against) if asked and against else (asked, "")


class PagePool:
    """The pages of all stores: keys and values of each layer, [N, PAGE, K, D]. Unwritten places are zero.

    A masked value is still multiplied by its weight of 0, and 0 * NaN is NaN.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device, memory: Memory
    ) -> None:
        """`shapes`: (K, D of keys, D of values) of each layer."""
        self.dtype, self.device, self.memory = dtype, device, memory
        self.shapes = shapes
        self.widths = {width for _, *both in shapes for width in both}
        """D of keys and values."""
        self._bytes = PAGE * dtype.itemsize * sum(heads * (width + other) for heads, width, other in shapes)
        self.moves = 0
        """Number of times that the tensors have moved."""
        self._empty()

    def _empty(self) -> None:
        self.keys = [self._zeros(0, heads, width) for heads, width, _ in self.shapes]
        self.values = [self._zeros(0, heads, width) for heads, _, width in self.shapes]
        self.count = 0
        self._free: list[int] = []

    def _zeros(self, pages: int, heads: int, width: int) -> torch.Tensor:
        return torch.zeros(pages, PAGE, heads, width, dtype=self.dtype, device=self.device)

    def take(self, count: int) -> list[int]:
        """Take free pages. Raises CacheFull."""
        if len(self._free) < count:
            self._grow(max(_RESERVED, self.count) + count - len(self._free))
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def _grow(self, least: int) -> None:
        """Grow to at least so many pages, and to twice the present ones where memory allows."""
        for total in (max(least, 2 * self.count), least):
            more = (total - self.count) * self._bytes
            if self.memory.used + more <= self.memory.limit:
                break
        else:
            raise CacheFull(
                f"keys and values of {least * PAGE} tokens, {least * self._bytes >> 20} MiB, do not fit into the "
                f"{self.memory.limit >> 20} MiB they may take"
            )
        for tensors in (self.keys, self.values):
            for layer, old in enumerate(tensors):
                tensors[layer] = self._zeros(total, *old.shape[2:])
                tensors[layer][: self.count] = old
        self._free = [*range(max(_RESERVED, self.count), total), *self._free]
        self.memory.used += more
        self.count = total
        self.moves += 1

    def write(self, layer: int, cells: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [K, P, D] of P tokens at their cells [P], numbers among all cells of the pool."""
        for tensor, new in ((self.keys[layer], key), (self.values[layer], value)):
            tensor.flatten(0, 1).index_copy_(0, cells, new.transpose(0, 1))

    def give(self, pages: Sequence[int]) -> None:
        """Give pages back."""
        self._free.extend(pages)

    def shrink(self) -> None:
        """Free the memory where no page is taken."""
        if self.count and len(self._free) == self.count - _RESERVED:
            self.memory.used -= self.count * self._bytes
            self._empty()
            self.moves += 1


class PagedRows:
    """Implements `Store` over a pool, without states."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.memory, self.device, self.dtype = pool.memory, pool.device, pool.dtype
        self.states: list[torch.Tensor] = []
        self.state_shapes: Sequence[StateShape] = ()
        self.holders: list[Holder | None] = []
        self.used = 0
        self._pages: list[list[int]] = []
        self._on_device: dict[int, torch.Tensor] = {}
        """Pages of rows that have been read since they last changed."""

    def free(self) -> None:
        """Give all pages back, and free their memory where no other store has pages."""
        for pages in self._pages:
            self.pool.give(pages)
        self.holders, self._pages, self.used = [], [], 0
        self._on_device.clear()
        self.pool.shrink()

    def place(self, holder: Holder) -> None:
        """Give a holder a row without pages, unless it has a row."""
        if holder.row < 0:
            if None not in self.holders:
                self.holders.append(None)
                self._pages.append([])
            holder.row = self.holders.index(None)
            self.holders[holder.row] = holder
            self.used += 1

    def remove(self, holder: Holder) -> None:
        """Take a holder's row away, if it has one, and give its pages back."""
        if holder.row >= 0:
            self.pool.give(self._pages[holder.row])
            self._pages[holder.row] = []
            self._on_device.pop(holder.row, None)
            self.holders[holder.row] = None
            holder.row = -1
            self.used -= 1

    def extend(self, holders: Sequence[Holder], columns: Sequence[int]) -> None:
        """Take the pages that so many columns of each holder's row need. Raises CacheFull, with no page taken."""
        missing = [
            max(0, -(-most // PAGE) - len(self._pages[holder.row]))
            for holder, most in zip(holders, columns, strict=True)
        ]
        if not any(missing):
            return
        taken = iter(self.pool.take(sum(missing)))
        for holder, count in zip(holders, missing, strict=True):
            if count:
                self._pages[holder.row].extend(next(taken) for _ in range(count))
                self._on_device.pop(holder.row, None)

    def arrange(self, active: Sequence[Holder]) -> None:
        """Do nothing: pages are read where they lie."""

    def pages(self, row: int) -> list[int]:
        """Return the pages of a row."""
        return self._pages[row]

    def places(self, rows: Sequence[int], columns: Sequence[int]) -> Places:
        """Return the number of each cell among all cells of the pool: [P] int64."""
        table = np.zeros((len(self._pages), max(map(len, self._pages), default=0)), dtype=np.int64)
        for row in set(rows):
            table[row, : len(self._pages[row])] = self._pages[row]
        at: npt.NDArray[np.int64] = np.array(columns, dtype=np.int64)
        cells = table[np.array(rows, dtype=np.int64), at // PAGE] * PAGE + at % PAGE
        return (torch.from_numpy(cells).to(self.device),)

    def write(self, layer: int, places: Places, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key and value [K, P, D] of P tokens at their places."""
        self.pool.write(layer, places[0], key, value)

    def read(self, layer: int, row: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the first columns' keys and values of a row together: [K, columns, D] each."""
        if row not in self._on_device:
            self._on_device[row] = torch.tensor(self._pages[row], dtype=torch.int64, device=self.device)
        pages = self._on_device[row][: -(-columns // PAGE)]
        key, value = (
            tensor.index_select(0, pages).flatten(0, 1)[:columns].transpose(0, 1)
            for tensor in (self.pool.keys[layer], self.pool.values[layer])
        )
        return key, value

    @torch.inference_mode()
    def copy_columns(self, row: int, source_row: int, columns: int) -> None:
        """Copy the pages of the first columns' keys and values of one row into another one's."""
        count = -(-columns // PAGE)
        to, source = self._pages[row][:count], self._pages[source_row][:count]
        for tensor in (*self.pool.keys, *self.pool.values):
            tensor[to] = tensor[source]

    def copy_states(self, row: int, source: Store, source_row: int) -> None:
        """Do nothing: there are no states."""


def paged_cache(
    shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device, *, max_rows: int, max_bytes: int
) -> SessionCache:
    """Make a cache whose stores share a pool of pages, for models without states. `shapes` as `PagePool` has them."""
    pool = PagePool(shapes, dtype, device, Memory(max_bytes))
    return SessionCache(PagedRows(pool), PagedRows(pool), PagedRows(pool), max_rows=max_rows)
