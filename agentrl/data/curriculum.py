"""The sampler `curriculum`: shares of data sources, and pools of rows by the success of their latest group.

A slot of a batch is given to a source, then to a pool of the source, by credits. Each draw adds to the credit of a
source its share of the batch, and each slot costs one. So the drawn numbers differ from the shares by about one slot,
also over many batches, and need no random numbers. A pool gives the rows that it gave the fewest rounds ago, in an
order that follows from `data.seed` and the number of the draw.

| metric | meaning |
|---|---|
| `sampler/drawn/<source>` | prompts of the source that were drawn since the step before |
| `sampler/share/<source>` | share of the source in the last draw |
| `sampler/success/<source>` | measured success of the source, of those that have one |
| `sampler/pool/<source>/<pool>` | rows of the source by pool: `new`, `too_hard`, `teaches`, `too_easy` |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.data.contract import Dataset
from agentrl.data.sampler import Sampler
from agentrl.errors import DataError
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Numbers
from agentrl.system.plugin import nearest
from agentrl.trajectory import Outline

POOLS = ("too_hard", "teaches", "too_easy", "new")
"""Pools by number; rows of `new`, whose success is not known, are drawn with those of `teaches`."""
TOO_HARD, TEACHES, TOO_EASY, NEW = range(4)
MEMORY = 0.9
"""Part of a source's measured success that a step keeps; the step's own is the rest."""
LEAST = 0.1
"""Least weight of a source by success, where the largest is 1: a source that fails is measured again."""

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Options(BaseModel):
    """`data.sampler.options.*` of `curriculum`."""

    model_config = ConfigDict(extra="forbid")

    weights: Literal["rows", "equal", "success"] | dict[str, Weight] = "rows"
    """Weight of each data source: its number of rows, the same for all, p(1 - p) of its measured success p, or a number
    by name."""
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    """The weights to the power of 1/temperature are the shares: above 1 they are more equal."""
    pools: bool = False
    """Draw rows by the success of their latest group."""
    too_hard: Share = 0.0
    """A row is too hard up to this share of successful trajectories."""
    too_easy: Share = 1.0
    """A row is too easy from this share on."""
    hard_share: Share = 0.1
    """Share of too hard rows in a source's draws, while others are there; 0: they never come again."""
    easy_share: Share = 0.1
    """The same of too easy rows."""
    success_threshold: float = 1.0
    """The score from which a trajectory counts as successful."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.too_hard >= self.too_easy:
            raise ValueError(f"too_hard={self.too_hard} must be below too_easy={self.too_easy}")
        if self.hard_share + self.easy_share > 1:
            raise ValueError(f"hard_share={self.hard_share} and easy_share={self.easy_share} must add up to 1 at most")
        return self


def check_weights(weights: Mapping[str, float], sources: Sequence[str]) -> None:
    """Raise DataError for weights by name that do not fit the data's sources."""
    known, key = ", ".join(sources), "data.sampler.options.weights"
    for name in weights:
        if name not in sources:
            close = nearest(name, sources)
            raise DataError(f"{key}: no row has the data_source {name!r}{close}; the data have {known}")
    for name in sources:
        if name not in weights:
            raise DataError(
                f"{key}: expected a number for each data source of the rows, found none for {name!r}; 0 leaves its "
                "rows out"
            )
    if not any(weights.values()):
        raise DataError(f"{key}: every weight is 0, so no row would be drawn; raise the weight of one of {known}")


class Curriculum(Sampler):
    """Rows by shares of their sources, and with `pools` by the success of their groups."""

    def __init__(self, data: Dataset, batch_size: int, seed: int, options: Options) -> None:
        """Raise DataError for weights that do not fit the data's sources."""
        super().__init__(data, batch_size, seed)
        self.options = options
        of_row = data.sources()
        self.sources = sorted(set(of_row))
        number = {name: place for place, name in enumerate(self.sources)}
        self._source = np.array([number[name] for name in of_row])
        self._rows = [np.flatnonzero(self._source == place) for place in range(len(self.sources))]
        if isinstance(options.weights, dict):
            check_weights(options.weights, self.sources)
        self.success: dict[str, float] = {}
        """Measured success by source."""
        self._draws = 0
        self._rounds = self._random(0, len(data))
        """[rows] float64: the round in which a row comes next, and within it its place."""
        self._pool = np.full(len(data), NEW if options.pools else TEACHES)
        """[rows] int64, indices of `POOLS`."""
        self._credits: dict[str, float] = {}
        """By source."""
        self._pool_credits: dict[str, dict[str, float]] = {name: {} for name in self.sources}
        """By source and pool."""
        self._drawn: Counter[str] = Counter()
        """Prompts by source since `metrics`."""
        self._shares: dict[str, float] = {}

    @property
    def learns(self) -> bool:
        return self.options.pools or self.options.weights == "success"

    def next_batch(self) -> Sequence[int]:
        """Raises DataError when no row is left that may be drawn."""
        self._draws += 1
        order = self._random(self._draws, len(self.data) + self.batch_size)
        pools = {name: self._open_pools(rows) for name, rows in zip(self.sources, self._rows, strict=True)}
        weights = {name: weight for name, weight in self._weights().items() if weight and pools[name][0]}
        if not weights:
            sizes = np.bincount(self._pool, minlength=len(POOLS))
            counts = ", ".join(f"{size} {POOLS[pool]}" for pool, size in enumerate(sizes))
            raise DataError(
                "sampler curriculum: expected rows that may be drawn, found none in a source with a weight "
                f"({counts}). Raise data.sampler.options.easy_share or hard_share above 0, move too_easy or too_hard, "
                "give a weight to a further source, or give other rows"
            )
        total = sum(weights.values())
        self._shares = {name: weight / total for name, weight in weights.items()}
        chosen: list[int] = []
        for name, slots in self._slots(self._credits, self._shares, self.batch_size).items():
            self._drawn[name] += slots
            members, shares = pools[name]
            rows = {pool: len(its) for pool, its in members.items()}
            for pool, count in self._slots(self._pool_credits[name], shares, slots, rows).items():
                chosen += self._take(members[pool], count, order)
        return [chosen[place] for place in np.argsort(order[len(self.data) :], kind="stable")]

    def update(self, trajectories: Sequence[tuple[int, Outline]]) -> None:
        by_row: dict[int, list[bool]] = defaultdict(list)
        for row, one in trajectories:
            if one.score is not None and not one.baseline:
                by_row[row].append(one.score + one.model_reward >= self.options.success_threshold)
        by_source: dict[str, list[bool]] = defaultdict(list)
        for row, successes in by_row.items():
            by_source[self.sources[self._source[row]]] += successes
            if self.options.pools:
                rate = sum(successes) / len(successes)
                is_easy, is_hard = rate >= self.options.too_easy, rate <= self.options.too_hard
                self._pool[row] = TOO_EASY if is_easy else TOO_HARD if is_hard else TEACHES
        for name, successes in by_source.items():
            rate = sum(successes) / len(successes)
            self.success[name] = MEMORY * self.success.get(name, rate) + (1 - MEMORY) * rate

    def metrics(self) -> Numbers:
        numbers = {f"sampler/success/{name}": rate for name, rate in self.success.items()}
        for name, rows in zip(self.sources, self._rows, strict=True):
            numbers[f"sampler/drawn/{name}"] = float(self._drawn[name])
            numbers[f"sampler/share/{name}"] = self._shares.get(name, 0.0)
            if self.options.pools:
                sizes = np.bincount(self._pool[rows], minlength=len(POOLS))
                numbers |= {f"sampler/pool/{name}/{POOLS[pool]}": float(size) for pool, size in enumerate(sizes)}
        self._drawn.clear()
        return numbers

    def state_dict(self) -> dict[str, JSON]:
        return {
            "seed": self.seed,
            "draws": self._draws,
            "rounds": self._rounds.tolist(),
            "pool": self._pool.tolist(),
            "credits": dict(self._credits),
            "pool_credits": {name: dict(its) for name, its in self._pool_credits.items()},
            "success": dict(self.success),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self.seed:
            raise DataError(
                f"the checkpoint's order of the data was made with data.seed={state['seed']}, found "
                f"data.seed={self.seed}; set it back, or start anew with trainer.resume_mode=disable"
            )
        self._draws, self._rounds = state["draws"], np.array(state["rounds"])
        self._credits, self.success = dict(state["credits"]), dict(state["success"])
        self._pool_credits = {name: dict(its) for name, its in state["pool_credits"].items()}
        pool = np.array(state["pool"])
        if self.options.pools:  # perhaps only from now on
            self._pool = pool

    def _weights(self) -> dict[str, float]:
        given = self.options.weights
        if isinstance(given, dict):
            weights = {name: given[name] for name in self.sources}
        elif given == "rows":
            weights = {name: float(len(rows)) for name, rows in zip(self.sources, self._rows, strict=True)}
        else:
            rates = {name: self.success.get(name, 0.5) for name in self.sources}
            is_equal = given == "equal"
            weights = {name: 1.0 if is_equal else max(4 * rate * (1 - rate), LEAST) for name, rate in rates.items()}
        most = max(weights.values())  # scaled first, as a large power of a large number overflows
        return {name: (weight / most) ** (1 / self.options.temperature) for name, weight in weights.items()}

    def _open_pools(self, rows: npt.NDArray[np.int64]) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, float]]:
        """Return the rows of a source by pool, of pools that may be drawn from and have rows, and their shares.

        `teaches` takes the share of the others that are lacking; where it is lacking, the others share its part.
        """
        pool = np.where(self._pool[rows] == NEW, TEACHES, self._pool[rows])
        hard, easy = self.options.hard_share, self.options.easy_share
        wanted = {TOO_HARD: hard, TEACHES: 1 - hard - easy, TOO_EASY: easy}
        members = {POOLS[one]: rows[pool == one] for one, share in wanted.items() if share or one == TEACHES}
        members = {name: its for name, its in members.items() if len(its)}
        shares = {name: wanted[POOLS.index(name)] for name in members}
        if "teaches" in shares:
            shares["teaches"] += 1 - sum(shares.values())
        total = sum(shares.values())
        return members, {name: share / total for name, share in shares.items()}

    def _slots(
        self, credits: dict[str, float], shares: Mapping[str, float], count: int, rows: Mapping[str, int] | None = None
    ) -> Counter[str]:
        """Share out slots, each to the highest credit. With `rows` nothing gets more slots than it has rows, while
        others have some left; its credit then lapses."""
        slots: Counter[str] = Counter()
        for name, share in shares.items():
            credits[name] = credits.get(name, 0.0) + share * count
        for _ in range(count):
            left = shares if rows is None else [name for name in shares if slots[name] < rows[name]] or shares
            name = max(left, key=lambda one: credits[one])
            credits[name] -= 1
            slots[name] += 1
        if rows is not None:
            credits |= {name: min(max(credits[name], -1.0), 1.0) for name in shares}
        return slots

    def _take(self, rows: npt.NDArray[np.int64], count: int, order: npt.NDArray[np.float64]) -> list[int]:
        """Take the rows that are due first; rows come twice where a pool is smaller than `count`."""
        chosen: list[int] = []
        while count > len(chosen):
            due = rows[np.argsort(self._rounds[rows], kind="stable")][: count - len(chosen)]
            newest = np.floor(self._rounds[rows].max())  # a row that comes from another pool catches up
            self._rounds[due] = np.maximum(np.floor(self._rounds[due]) + 1, newest) + order[due]
            chosen += due.tolist()
        return chosen

    def _random(self, draw: int, count: int) -> npt.NDArray[np.float64]:
        """Numbers from 0 to 1; Philox's raw numbers are the same in every version of numpy."""
        bits = np.random.Philox(np.random.SeedSequence([self.seed, draw]))
        return (bits.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53
