"""The progress bars of transformers, e.g. of weights that are read and shards that are written, as stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Protocol

from agentrl.system.reporter import Reporter


class MakesBar(Protocol):
    """The class of transformers' bars, or their stand-in."""

    def __call__(self, *given: object, **named: object) -> object: ...


@contextmanager
def bars_as_stages(reporter: Reporter) -> Iterator[None]:
    """Show the bars of transformers in this process as stages of `reporter`, inside the block."""
    from transformers.utils import logging

    def stage(make: MakesBar, given: tuple[object, ...], named: dict[str, object]) -> object:
        items = given[0] if given else named.get("iterable")
        return (
            counted(reporter, str(named.get("desc")), items) if isinstance(items, Iterable) else make(*given, **named)
        )

    before = logging.set_tqdm_hook(stage)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def counted(reporter: Reporter, name: str, items: Iterable[object]) -> Iterator[object]:
    """Yield the items inside a stage that counts them."""
    with reporter.stage(name.lower(), total=len(items) if isinstance(items, Sized) else None) as stage:
        for item in items:
            yield item
            stage.advance()
