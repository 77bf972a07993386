"""Contract of a run's data set."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from agentrl.data.bad_rows import BadRow, BadRows, located
from agentrl.errors import CodeError, DataError, UserError
from agentrl.system.plugin import nearest
from agentrl.trajectory.sample import AGENT_ALIASES, Sample

Progress = Callable[[int], object]
"""Called with the number of rows just done."""

UNKNOWN_HINT = {
    "agent_name": "Register the loop (actor_rollout_ref.rollout.agent.agent_loop_config_path) or mend the row",
    "tools_kwargs": "Configure the tool (actor_rollout_ref.rollout.multi_turn.tool_config_path) or mend the row",
    "interaction_kwargs": "Configure it (actor_rollout_ref.rollout.multi_turn.interaction_config_path) or mend the row",
}


CONTENT = "content:"
"""Beginning of a fingerprint over content alone; earlier ones went over sizes of files, or places of samples, too."""


class Names(NamedTuple):
    """The names that a row uses."""

    data_source: str
    agent_name: str
    """Empty for the default loop."""
    tools_kwargs: tuple[str, ...]
    interaction_kwargs: tuple[str, ...]
    """One at most; empty where the row asks for an interaction without naming it."""

    @staticmethod
    def of(sample: Sample) -> Names:
        """Collect the names of a sample."""
        interactions = (sample.interaction or "",) if sample.interaction_kwargs else ()
        return Names(sample.data_source, sample.agent_name, (*sample.tools_kwargs,), interactions)


class Dataset(ABC):
    """A fixed sequence of samples; some may be left out. `bad` counts samples left out by on_bad_row=skip.

    Positions count the remaining samples; an index counts all.
    """

    def __init__(self, files: Sequence[str], default_agent_loop: str, on_bad_row: Literal["error", "skip"]) -> None:
        self.files = list(files)
        self.bad = BadRows(on_bad_row)
        self.notes: dict[str, str] = {}
        """By file, in words: the columns that are not read."""
        self.without_loop = 0
        """Rows that name no agent loop, and run the default one. Known after `check`."""
        self.loops: list[str] = []
        """Agent loops that rows run, sorted. Known after `check`."""
        self.repeated: frozenset[int] = frozenset()
        """Hashes of prompts that several rows have, as `agentrl.data.messages.digest_of` makes them."""
        self.shortest = 0
        """Tokens of the shortest prompt."""
        self._default_agent_loop = default_agent_loop
        self._kept: npt.NDArray[np.int64] = np.arange(0)
        """[len(self)] int64, the indices of the samples that are left."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Sample]:
        return (self[position] for position in range(len(self)))

    def __getitem__(self, position: int) -> Sample:
        """Raises IndexError past the end, and DataError for a sample that cannot be read."""
        index = int(self._kept[position])
        try:
            return self._sample(index)
        except DataError as fault:
            raise located(self._place(index), fault) from fault

    @property
    def fingerprint(self) -> str:
        """Changes when the samples change, or when other ones are left out. Names of files don't count."""
        return f"{CONTENT}{self._hashed(self._content)}"

    def is_of(self, fingerprint: str) -> bool:
        """Check whether a fingerprint, which an earlier version may have made, is of these samples."""
        return fingerprint == self.fingerprint or fingerprint in self._earlier()

    def _earlier(self) -> Iterator[str]:
        """Fingerprints that versions of before 28 November 2026 made of these samples."""
        yield self._hashed(digest_of_samples(self))

    def _hashed(self, content: object) -> str:
        text = repr((content, hashlib.sha256(self._kept.tobytes()).hexdigest()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    @abstractmethod
    def _content(self) -> object:
        """Digest of the content; its `repr` counts."""

    @abstractmethod
    def _sample(self, index: int) -> Sample:
        """Return a sample, `finished`. Raises DataError, without the sample's place, when it cannot be read."""

    @abstractmethod
    def _names(self, index: int) -> Names:
        """Return the names that a sample uses, as its row has them. Raises DataError as `_sample` does."""

    @abstractmethod
    def _place(self, index: int) -> str:
        """Name a sample in messages."""

    def _finished(self, sample: Sample, index: int, file: str, row: int) -> Sample:
        """Return a sample with its loop and its place."""
        return replace(sample, agent_name=self._loop(sample.agent_name), index=index, file=file, row=row)

    def _loop(self, agent_name: str) -> str:
        """Name the agent loop that runs a row with this `agent_name`."""
        agent = agent_name or self._default_agent_loop
        return AGENT_ALIASES.get(agent, agent)

    def check(
        self, *, agent_names: Collection[str], tool_names: Collection[str], interaction_names: Collection[str]
    ) -> list[str]:
        """Check that every name that rows use is known. Returns the data sources.

        Raises DataError naming the first row of an unknown name; with on_bad_row=skip its rows are left out instead.
        """
        known = {"agent_name": agent_names, "tools_kwargs": tool_names, "interaction_kwargs": interaction_names}
        sources, loops, fine, left, self.without_loop = set[str](), set[str](), set[Names](), [], 0
        for index in map(int, self._kept):
            try:
                names = self._names(index)
                if names not in fine:
                    self._check_names(names, known)
                    fine.add(names)
            except DataError as fault:
                self.bad.add(located(self._place(index), fault))
            else:
                left.append(index)
                sources.add(names.data_source)
                loops.add(self._loop(names.agent_name))
                self.without_loop += not names.agent_name
        self._kept, self.loops = np.array(left, np.int64), sorted(loops)
        if not len(self):
            raise DataError(f"no row of {', '.join(self.files)} is left: {self.bad.told()}")
        return sorted(sources)

    def _check_names(self, names: Names, known: dict[str, Collection[str]]) -> None:
        agent = names.agent_name or self._default_agent_loop
        agents = () if AGENT_ALIASES.get(agent) in known["agent_name"] else (agent,)
        for kind, used in {**names._asdict(), "agent_name": agents}.items():
            for name in used if kind in known else ():
                # Without a name, and a configured interaction, interaction_kwargs ask for nothing.
                if (name or known[kind]) and name not in known[kind]:
                    raise unknown_name(kind, name, known[kind])

    def filter_overlong(
        self, length: Callable[[Sample], int], limit: int, *, refuse: bool = False, progress: Progress | None = None
    ) -> int:
        """Leave out the rows whose prompt is longer than `limit` tokens; returns how many.

        `length` renders a sample's prompt and counts its tokens. Raises DataError naming the first such row when
        `refuse` is true, and for a row that `length` refuses by a DataError or cannot render (left out with
        on_bad_row=skip).
        """
        left, overlong, shortest = [], 0, limit
        for index in map(int, self._kept):
            try:
                tokens = length(self._sample(index))
            except CodeError as error:  # not the row's fault, so not left out with on_bad_row=skip
                raise CodeError(f"{error}\n  in {self._place(index)}", error.place) from error
            except (ValueError, TypeError, LookupError, RuntimeError, UserError) as error:
                fault = error if isinstance(error, DataError) else DataError(f"the prompt cannot be rendered: {error}")
                self.bad.add(located(self._place(index), fault))
            else:
                if tokens <= limit:
                    left.append(index)
                    shortest = min(shortest, tokens)
                elif refuse:
                    raise DataError(
                        f"{self._place(index)}: the prompt is {tokens} tokens long, data.max_prompt_length is {limit}. "
                        "Raise it, leave such rows out with data.filter_overlong_prompts=true, or cut them with "
                        "data.truncation=left"
                    )
                else:
                    overlong += 1
            if progress is not None:
                progress(1)
        self.shortest = shortest
        self._kept = np.array(left, np.int64)
        if not len(self):
            raise DataError(f"every prompt is longer than data.max_prompt_length={limit} tokens: nothing is left")
        return overlong

    def sources(self) -> list[str]:
        """Return the data source of each sample, by position."""
        return [self._names(int(index)).data_source for index in self._kept]


def digest_of_samples(samples: Iterable[Sample]) -> str:
    """Hash samples in their order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(repr(sample).encode())
    return digest.hexdigest()


def unknown_name(kind: str, name: str, known: Collection[str]) -> BadRow:
    """Make the fault of a name without an entry in the registry; an empty name is missing."""
    listed = ", ".join(known) or "none"
    if not name:
        return BadRow(
            f"column {kind}.name",
            f"expected the name of an interaction, found none; known: {listed}. Name one in each such row, or leave "
            "actor_rollout_ref.rollout.multi_turn.interaction_config_path out",
        )
    near = nearest(name, known)
    return BadRow(f"column {kind}", f"unknown name {name!r}{near}; known: {listed}. {UNKNOWN_HINT[kind]}")
