"""Full collections of Python's cycle collector: what they leave out, and when they wait.

A full collection visits every container in the process, and nothing else runs meanwhile: 0.4 s with the objects of
torch and transformers, 0.1 to 0.3 s more with the objects of a thousand sessions. Most objects are freed without it, as
their last reference goes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_DUE, _LATEST = 10, 100
"""Collections of the middle generation after which a full one is due (Python's default), and after which Python runs
one also while they are put off."""


def put_off_full_collections() -> None:
    """Have Python run full collections ten times as rarely, until `collect_if_due` or `frozen`."""
    _run_after(_LATEST)


def collect_if_due() -> None:
    """Run a full collection where Python's default would have run one, and return to that default."""
    _run_after(_DUE)
    if gc.get_count()[2] > _DUE:
        gc.collect()


@contextmanager
def frozen() -> Iterator[None]:
    """Collect, and leave everything that is there then out of later collections until the block ends.

    Python's default for full collections is set, as they are cheap then.
    """
    gc.collect()
    before = gc.get_freeze_count()
    gc.freeze()
    _run_after(_DUE)
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()


def _run_after(middle_collections: int) -> None:
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, middle_collections)
