"""Full collections wait for a moment without sessions, and do not visit what was there before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from agentrl.system.garbage import collect_if_due, frozen, put_off_full_collections


@pytest.fixture
def thresholds(thawed: None) -> Iterator[tuple[int, int, int]]:
    """Python's own thresholds, which an earlier test's command may have changed; after the test they are as before."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield gc.get_threshold()
    gc.set_threshold(*before)


def test_what_is_there_is_left_out_until_the_block_ends(thresholds: tuple[int, int, int]) -> None:
    put_off_full_collections()
    assert gc.get_threshold() == (*thresholds[:2], 100)
    with frozen():
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold() == (*thresholds[:2], 10)
        with frozen():
            pass
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_dead_cycles_are_freed_before(thresholds: tuple[int, int, int]) -> None:
    class Node:
        pass

    node = Node()
    node.own = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert gone() is not None
        with frozen():
            assert gone() is None
    finally:
        gc.enable()


def test_a_due_collection_is_run(thresholds: tuple[int, int, int]) -> None:
    full: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(phase)

    put_off_full_collections()
    gc.collect()
    gc.callbacks.append(seen)
    try:
        for _ in range(10):
            gc.collect(1)
        collect_if_due()
        assert not full
        gc.collect(1)
        collect_if_due()
        assert len(full) == 1
        assert gc.get_threshold() == thresholds
    finally:
        gc.callbacks.remove(seen)
