"""The contract of `agentrl.engines.embedded.cache.Store`: both stores keep what was written, whoever comes and goes."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from agentrl.engines.embedded.cache import CacheFull, KVRows, Memory, Session, Store
from agentrl.engines.embedded.pages import PAGE, PagedRows, PagePool
from tests.naming import naming

SHAPES = [(2, 4, 4), (1, 8, 6)]
BYTES = (2 * 8 + 14) * 4  # of a token in two layers, in float32
Make = Callable[[int], tuple[Store, Store]]


def rows(limit: int) -> tuple[Store, Store]:
    memory = Memory(limit)
    one, other = (KVRows(SHAPES, torch.float32, torch.device("cpu"), memory) for _ in range(2))
    return one, other


def pages(limit: int) -> tuple[Store, Store]:
    pool = PagePool(SHAPES, torch.float32, torch.device("cpu"), Memory(limit))
    return PagedRows(pool), PagedRows(pool)


@pytest.mark.parametrize("make", [rows, pages])
class TestStore:
    def test_a_row_keeps_what_was_written_while_others_come_and_go(self, make: Make) -> None:
        draw = random.Random(0)
        stores = make(1 << 24)
        held: dict[str, tuple[int, Session]] = {}
        written: dict[str, list[list[torch.Tensor]]] = {}
        for turn in range(400):
            name = f"s{draw.randrange(12)}"
            if name in held and draw.random() < 0.3:
                at, session = held.pop(name)
                stores[at].remove(session)
                assert session.row == -1
                del written[name]
                continue
            at, session = held.setdefault(name, (turn % 2, Session(name)))
            store = stores[at]
            store.place(session)
            columns = session.cached
            new = draw.choice([1, 3, PAGE - 1, PAGE, 2 * PAGE + 1])
            store.extend([session], [columns + new])
            places = store.places([session.row] * new, range(columns, columns + new))
            for layer, (heads, width, other) in enumerate(SHAPES):
                key, value = torch.randn(heads, new, width), torch.randn(heads, new, other)
                store.write(layer, places, key, value)
                kept = written.setdefault(name, [[], []])
                kept[layer] += [key, value]
            session.cached = columns + new
            some = draw.sample([s for a, s in held.values() if a == at], k=min(2, store.used))
            store.arrange(some)
            for name, (at, session) in held.items():
                assert stores[at].holders[session.row] is session
                for layer, both in enumerate(written[name]):
                    found = stores[at].read(layer, session.row, session.cached)
                    assert torch.equal(found[0], torch.cat(both[::2], dim=1))
                    assert torch.equal(found[1], torch.cat(both[1::2], dim=1))
        assert [store.used for store in stores] == [sum(a == at for a, _ in held.values()) for at in (0, 1)]

    def test_columns_are_copied_from_row_to_row(self, make: Make) -> None:
        store, _ = make(1 << 24)
        first, second = Session("a"), Session("b")
        written = []
        for session in (first, second):
            store.place(session)
            store.extend([session], [2 * PAGE + 5])
            places = store.places([session.row] * (2 * PAGE + 5), range(2 * PAGE + 5))
            written.append([torch.randn(heads, 2 * PAGE + 5, width) for heads, width, _ in SHAPES])
            for layer, (heads, _, other) in enumerate(SHAPES):
                store.write(layer, places, written[-1][layer], torch.randn(heads, 2 * PAGE + 5, other))
        store.copy_columns(second.row, first.row, PAGE + 3)
        for layer in range(len(SHAPES)):
            mine, its = (store.read(layer, session.row, PAGE + 3) for session in (second, first))
            assert torch.equal(mine[0], its[0]) and torch.equal(mine[1], its[1])
            assert torch.equal(store.read(layer, first.row, 2 * PAGE + 5)[0], written[0][layer])

    def test_memory_ends_before_its_limit_and_is_given_back(self, make: Make) -> None:
        limit = 40 * PAGE * BYTES
        one, other = make(limit)
        sessions = [Session(f"{i}") for i in range(80)]
        with naming(CacheFull, "MiB"):
            for session in sessions:
                one.place(session)
                one.extend([session], [PAGE])
                tensors = [t for store in (one, other) for t in held_by(store)]
                assert sum(t.nbytes for t in set(tensors)) == one.memory.used <= limit
        assert one.used > 20
        one.free()
        other.free()
        assert one.memory.used == one.used == 0
        assert all(not t.numel() for t in held_by(one))


def held_by(store: Store) -> list[torch.Tensor]:
    holder = store.pool if isinstance(store, PagedRows) else store
    assert isinstance(holder, PagePool | KVRows)
    return [*holder.keys, *holder.values]
