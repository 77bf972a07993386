"""Data set: the rows of files as samples, checked when it is opened."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Literal, cast

import numpy as np

from agentrl.data.contract import CONTENT, Dataset, Names, digest_of_samples
from agentrl.data.rows import Columns, with_images
from agentrl.data.sources import expand
from agentrl.data.store import RowStore
from agentrl.data.table import Row, open_table
from agentrl.errors import DataError
from agentrl.trajectory.sample import Sample, row_place


class FileDataset(Dataset):
    """Rows of many files, in the order of the files. `ds[i]` reads one row; memory does not grow with the files.

    An index counts the rows that can be used.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        prompt_key: str = "prompt",
        image_key: str | None = "images",
        default_agent_loop: str = "single_turn",
        max_samples: int | None = None,
        on_bad_row: Literal["error", "skip"] = "error",
    ) -> None:
        """Read all files once. Raises DataError for a file or (with on_bad_row=error) a row that cannot be used."""
        super().__init__(expand(files), default_agent_loop, on_bad_row)
        self._columns = Columns(prompt_key, image_key)
        self._store = RowStore()
        self._numbers = array("q")
        """[rows] number of each row in its file."""
        self._starts: list[int] = []
        """Index of the first row of each file."""
        self._of_row: list[Names] = []
        self._contents: list[str] = []
        self._sizes: list[tuple[int, int] | None] = []
        for file in self.files:
            self._read(file, max_samples)
        self._store.finish()
        if not self._of_row:
            raise DataError(f"the data set is empty: no row in {', '.join(self.files)}. {self.bad.told()}".rstrip(". "))
        self._kept = np.arange(len(self._of_row))

    def _read(self, file: str, max_samples: int | None) -> None:
        table, known = open_table(file), dict[Names, Names]()
        self._starts.append(len(self._of_row))
        self._contents.append(table.content())
        self._sizes.append(table.size)
        needed = {self._columns.prompt: "data.prompt_key"}
        rows = table.read(self._columns.names, self._checked, self.bad, needed=needed)
        room = None if max_samples is None else max_samples - len(self._of_row)
        for number, (sample, images) in islice(rows, room):
            names = Names.of(sample)
            self._store.append((self._finished(sample, len(self._of_row), file, number), images))
            self._numbers.append(number)
            self._of_row.append(known.setdefault(names, names))
        if table.unread:
            self.notes[file] = table.unread

    def _checked(self, row: Row) -> tuple[Sample, list[object]]:
        return self._columns.sample(row, self._columns.messages(row))

    @property
    def _content(self) -> list[str]:
        return self._contents

    def _earlier(self) -> Iterator[str]:
        yield self._hashed(self._sizes)
        yield f"{CONTENT}{self._hashed(digest_of_samples(replace(sample, file='', row=0) for sample in self))}"
        yield from super()._earlier()

    def _sample(self, index: int) -> Sample:
        sample, images = cast(tuple[Sample, list[object]], self._store[index])
        prompt = with_images(sample.prompt, images, Path(sample.file).parent)
        return sample if prompt is sample.prompt else replace(sample, prompt=prompt)

    def _place(self, index: int) -> str:
        return row_place(self._file(index), self._numbers[index])

    def _names(self, index: int) -> Names:
        return self._of_row[index]

    def _file(self, index: int) -> str:
        return self.files[bisect_right(self._starts, index) - 1]
