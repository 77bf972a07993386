"""Contract of a run's data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from agentrl.errors import CodeError, DataError, UserError
from agentrl.system.plugin import nearest
from agentrl.trajectory.sample import Sample

Progress = Callable[[int], object]
"""Called with the number of rows just done."""

UNKNOWN_HINT = {
    "agent_name": "Register the loop (actor_rollout_ref.rollout.agent.agent_loop_config_path) or mend the row",
    "tools_kwargs": "Configure the tool (actor_rollout_ref.rollout.multi_turn.tool_config_path) or mend the row",
    "interaction_kwargs": "Configure it (actor_rollout_ref.rollout.multi_turn.interaction_config_path) or mend the row",
}


CONTENT = "content:"
"""Beginning of a fingerprint over content alone; earlier ones went over sizes of files, or places of samples, too."""


class Dataset(ABC):
    """A fixed sequence of samples; some may be left out. `skipped` counts samples left out by on_bad_row=skip.

    Positions count the remaining samples; an index counts all.
    """

    def __init__(self, files: Sequence[str], on_bad_row: Literal["error", "skip"]) -> None:
        self.files = list(files)
        self.on_bad_row = on_bad_row
        self.skipped = 0
        self.first_skipped = ""
        """The fault of the first such sample, with its place."""
        self.notes: dict[str, str] = {}
        """By file, in words: the columns that are not read."""
        self.without_loop = 0
        """Rows that name no agent loop, and run the default one."""
        self.repeated: frozenset[int] = frozenset()
        """Hashes of prompts that several rows have, as `agentrl.data.messages.digest_of` makes them."""
        self.shortest = 0
        """Tokens of the shortest prompt."""
        self._kept: npt.NDArray[np.int64] = np.arange(0)
        """[len(self)] int64, the indices of the samples that are left."""

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Sample]:
        return (self[position] for position in range(len(self)))

    @abstractmethod
    def __getitem__(self, position: int) -> Sample:
        """Raises IndexError past the end, and DataError for a sample that cannot be read."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the samples change, or when other ones are left out."""

    def is_of(self, fingerprint: str) -> bool:
        """Check whether a fingerprint, which an earlier version may have made, is of these samples."""
        return fingerprint == self.fingerprint

    @abstractmethod
    def check(
        self, *, agent_names: Collection[str], tool_names: Collection[str], interaction_names: Collection[str]
    ) -> list[str]:
        """Check that every name that rows use is known. Returns the data sources.

        Raises DataError naming the first row of an unknown name; with on_bad_row=skip its rows are left out instead.
        """

    @abstractmethod
    def _rows(self) -> Iterator[tuple[int, str, Callable[[], Sample]]]:
        """(index, place for messages, how the sample is made) of all samples that are left."""

    def filter_overlong(
        self, length: Callable[[Sample], int], limit: int, *, refuse: bool = False, progress: Progress | None = None
    ) -> int:
        """Leave out the rows whose prompt is longer than `limit` tokens; returns how many.

        `length` renders a sample's prompt and counts its tokens. Raises DataError naming the first such row when
        `refuse` is true, and for a row that `length` refuses by a DataError or cannot render (left out with
        on_bad_row=skip).
        """
        overlong, unusable, shortest, fault = [], [], limit, ""
        for index, place, make in self._rows():
            try:
                tokens = length(make())
            except CodeError as error:  # not the row's fault, so not left out with on_bad_row=skip
                raise CodeError(f"{error}\n  in {place}", error.place) from error
            except (ValueError, TypeError, LookupError, RuntimeError, UserError) as error:
                problem = str(error) if isinstance(error, DataError) else f"the prompt cannot be rendered: {error}"
                if self.on_bad_row == "error":
                    raise DataError(f"{place}: {problem}") from error
                fault = fault or f"{place}: {problem}"
                unusable.append(index)
                tokens = 0
            if tokens > limit:
                if refuse:
                    raise DataError(
                        f"{place}: the prompt is {tokens} tokens long, data.max_prompt_length is {limit}. "
                        "Raise it, leave such rows out with data.filter_overlong_prompts=true, or cut them with "
                        "data.truncation=left"
                    )
                overlong.append(index)
            elif tokens:
                shortest = min(shortest, tokens)
            if progress is not None:
                progress(1)
        self._skip(len(unusable), fault)
        self.shortest = shortest
        self._kept = np.setdiff1d(self._kept, overlong + unusable, assume_unique=True)
        if not len(self):
            raise DataError(f"every prompt is longer than data.max_prompt_length={limit} tokens: nothing is left")
        return len(overlong)

    def sources(self) -> list[str]:
        """Return the data source of each sample, by position."""
        return [make().data_source for _, _, make in self._rows()]

    def _skip(self, count: int, fault: str) -> None:
        """Count samples that cannot be used; `fault` is the first one's, with its place."""
        self.skipped += count
        self.first_skipped = self.first_skipped or fault

    def _leave_out(self, indices: npt.NDArray[np.int64], fault: str) -> None:
        left = np.setdiff1d(self._kept, indices, assume_unique=True)
        self._skip(len(self) - len(left), fault)
        self._kept = left
        if not len(self):
            raise DataError(f"no row of {', '.join(self.files)} names only known loops, tools and interactions")


def unknown_name(kind: str, name: str, place: str, known: Collection[str]) -> str:
    """Write the message for a name without an entry in the registry; an empty name is missing."""
    listed = ", ".join(known) or "none"
    if not name:
        return (
            f"{place}, column {kind}.name: expected the name of an interaction, found none; known: {listed}. Name one "
            "in each such row, or leave actor_rollout_ref.rollout.multi_turn.interaction_config_path out"
        )
    return f"{place}, column {kind}: unknown name {name!r}{nearest(name, known)}; known: {listed}. {UNKNOWN_HINT[kind]}"
