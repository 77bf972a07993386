"""Full collections wait for a moment without sessions, and do not visit what was there before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from agentrl.system.garbage import collect_if_due, make_full_collections_rare


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    """The thresholds before a test, and again after it."""
    before = gc.get_threshold()
    gc.unfreeze()
    yield before
    gc.set_threshold(*before)
    gc.unfreeze()


def test_once_for_the_process(thresholds: tuple[int, int, int]) -> None:
    make_full_collections_rare()
    assert gc.get_freeze_count() > 10_000
    assert gc.get_threshold() == (*thresholds[:2], 100)
    gc.set_threshold(*thresholds)
    make_full_collections_rare()
    assert gc.get_threshold() == thresholds


def test_a_due_collection_is_run(thresholds: tuple[int, int, int]) -> None:
    full: list[str] = []

    def seen(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(phase)

    gc.set_threshold(700, 10, 100)
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
    finally:
        gc.callbacks.remove(seen)
