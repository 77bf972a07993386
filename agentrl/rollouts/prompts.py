"""Prompts of the data by their ordinal, and the position in the data that holds all which are still needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from agentrl.data.loader import Loader
from agentrl.system.json_value import JSON, as_list, as_mapping
from agentrl.trajectory import Outline
from agentrl.trajectory.sample import Sample


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A batch of the loader, and the loader's position before it."""

    first: int
    samples: list[Sample]
    position: dict[str, JSON]
    """Empty where the sampler learns."""


class Prompts:
    """Prompts that a loader gives, numbered in the order in which it gives them.

    Rows that an epoch's last batch would not fill are no prompts: the sampler passes over them. A sampler that learns
    cannot draw a batch again from the position before it, as it has learnt meanwhile; its state holds the rows drawn.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.end = 0
        """The first ordinal that is not drawn yet."""
        self._drawn: deque[_Drawn] = deque()
        self._rows: dict[int, int] = {}
        """Row indices by ordinal, until the batch of a prompt is forgotten and its step has ended, where the sampler
        learns."""
        self._lock = Lock()
        """The thread that draws is not the thread that begins prompts and forgets them."""

    def draw_to(self, end: int) -> None:
        """Draw until all prompts before `end` are there. Raises the errors of `Loader`."""
        while self.end < end:
            learns = self.loader.learns
            position = {} if learns else self.loader.state_dict()
            drawn = _Drawn(self.end, next(self.loader), position)
            with self._lock:
                if learns:
                    self._rows |= dict(enumerate(self.loader.rows, self.end))
                self._drawn.append(drawn)
                self.end += len(drawn.samples)

    def __getitem__(self, ordinal: int) -> Sample:
        """Return a prompt that is drawn and not forgotten."""
        with self._lock:
            drawn = next(one for one in reversed(self._drawn) if one.first <= ordinal)
        return drawn.samples[ordinal - drawn.first]

    def forget_before(self, ordinal: int) -> None:
        """Drop the batches in which all prompts are before `ordinal`."""
        with self._lock:
            while self._drawn and self._drawn[0].first + len(self._drawn[0].samples) <= ordinal:
                self._drawn.popleft()

    @property
    def _first(self) -> int:
        """The first ordinal of the oldest batch that is not forgotten."""
        return self._drawn[0].first if self._drawn else self.end

    def state(self) -> dict[str, JSON]:
        """Return the position before the oldest batch that is not forgotten, and the ordinal of its first prompt.

        The position of a sampler that learns is its present one, with the rows of all prompts from that ordinal on.
        """
        if self.loader.learns:
            first = self._first
            rows: list[JSON] = [self._rows[ordinal] for ordinal in range(first, self.end)]
            return {"loader": self.loader.state_dict(), "first_prompt": first, "rows": rows}
        if self._drawn:
            return {"loader": self._drawn[0].position, "first_prompt": self._drawn[0].first}
        return {"loader": self.loader.state_dict(), "first_prompt": self.end}

    def load(self, state: Mapping[str, JSON], first: int) -> None:
        """Continue where `state` was taken; `first`: ordinal of the first prompt of a state without one.

        Raises DataError when the data differ.
        """
        self.loader.load_state_dict(as_mapping(state["loader"]))
        found = state.get("first_prompt", first)
        self.end = found if isinstance(found, int) else first
        self._drawn.clear()
        rows = [row for row in as_list(state.get("rows")) if isinstance(row, int)]
        self._rows = dict(enumerate(rows, self.end))
        if rows:
            self._drawn.append(_Drawn(self.end, [self.loader.dataset[row] for row in rows], {}))
            self.end += len(rows)

    def update(self, ordinals: Sequence[int], outlines: Sequence[Outline]) -> None:
        """Have a sampler that learns take note of a step's trajectories; `ordinals`: prompts of the step, by group."""
        rows = [self._rows[ordinal] for ordinal in ordinals]
        self.loader.update([(rows[one.group], one) for one in outlines])
        first = self._first
        self._rows = {ordinal: row for ordinal, row in self._rows.items() if ordinal >= first}
