"""Numbers by name, each with the kind that says how several values merge."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["sum", "mean", "max"]
Numbers = dict[str, float]
"""Numbers by name that are final: nothing is merged with them any more."""


@dataclass(slots=True)
class _Number:
    kind: Kind
    total: float
    """mean: the values' sum, each times its weight; else the number itself."""
    weight: float = 1.0
    """mean: the weights' sum."""

    def add(self, other: _Number) -> None:
        if self.kind == "max":
            self.total = max(self.total, other.total)
        else:
            self.total += other.total
            self.weight += other.weight


class Metrics(Mapping[str, float]):
    """A recorder that reads as a mapping of plain floats.

    The method that records a number names its kind: `sum` for counts, `mean` for averages and rates, `max` for peaks.
    The kind merges all records of one name, here or by another process.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, _Number] = {}

    @staticmethod
    def merged(parts: Iterable[Mapping[str, float]]) -> Metrics:
        """Merge the numbers of several processes by their kinds, in order; plain numbers, which say nothing of theirs,
        as means. A part that lacks a name counts nothing."""
        metrics = Metrics()
        for part in parts:
            metrics.add(part)
        return metrics

    def sum(self, name: str, value: float = 1.0) -> None:
        """Add `value` to a count."""
        self._record(name, _Number("sum", float(value)))

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        """Average over values, including this one; `weight` > 0, e.g. the number of calls that `value` averages."""
        self._record(name, _Number("mean", float(value) * weight, weight))

    def max(self, name: str, value: float) -> None:
        """Keep the largest value."""
        self._record(name, _Number("max", float(value)))

    def add(self, values: Mapping[str, float], prefix: str = "") -> None:
        """Record all of `values` (as `merged` takes them) under `prefix` and their names."""
        if isinstance(values, Metrics):
            for name, number in values._numbers.items():
                self._record(prefix + name, replace(number))
            return
        for name, value in values.items():
            self.mean(prefix + name, value)

    def __getitem__(self, name: str) -> float:
        number = self._numbers[name]
        return number.total / number.weight if number.kind == "mean" else number.total

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"

    def _record(self, name: str, number: _Number) -> None:
        known = self._numbers.get(name)
        if known is None:
            self._numbers[name] = number
        elif known.kind != number.kind:
            raise ValueError(f"metric {name!r} was recorded as a {known.kind}, and now as a {number.kind}")
        else:
            known.add(number)
