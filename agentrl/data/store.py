"""Rows of one parquet file, laid out so that any of them can be read alone.

Parquet is compressed by column and row group, so one row costs a row group, and many writers make row groups of a
million rows. The file is therefore read once, in small batches. The columns that rows need are written as Arrow IPC to
a temporary file (in TMPDIR), which is memory-mapped and has no name. Memory stays flat for a file of any size; a row
read in a random order touches its own bytes only.
"""

from __future__ import annotations

import bisect
import tempfile
from collections.abc import Iterator

import pyarrow as pa

from agentrl.data.sources import Table
from agentrl.errors import DataError

BATCH_ROWS = 4096
ROW_NUMBER = "__row_in_file__"


def numbered(table: Table, columns: list[str], file: str) -> Iterator[pa.RecordBatch]:
    """Read columns of `file` in batches of bounded size; the rows' numbers in the file are one more, the last.

    Raises DataError when the file is damaged.
    """
    done = 0
    try:
        for batch in table.batches(columns, BATCH_ROWS):
            numbers = pa.array(range(done, done + batch.num_rows), pa.int64())
            done += batch.num_rows
            yield batch.append_column(ROW_NUMBER, numbers)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: it is damaged after row {done}: {error}") from error


class RowStore:
    """Rows for random access: `append` batches, then `finish`, then read."""

    def __init__(self, file: str) -> None:
        self.file = file
        self._temporary = tempfile.NamedTemporaryFile(prefix="agentrl-rows-", suffix=".arrow")  # noqa: SIM115
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._batches: list[pa.RecordBatch] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch. Raises DataError when the temporary folder is full."""
        if batch.num_rows == 0:
            return
        try:
            if self._writer is None:
                self._writer = pa.ipc.new_stream(self._temporary, batch.schema)
            self._writer.write_batch(batch)
        except OSError as error:
            raise DataError(
                f"{self.file}: cannot write a working copy of its rows to {tempfile.gettempdir()} ({error}); "
                "set TMPDIR to a folder with room for the uncompressed rows"
            ) from error
        self._ends.append(len(self) + batch.num_rows)

    def finish(self) -> None:
        """Map the written file; the temporary file loses its name and is freed with this object."""
        if self._writer is not None:
            self._writer.close()
            self._temporary.flush()
            # The batches point into the mapping: nothing is read here but their headers.
            self._batches = list(pa.ipc.open_stream(pa.memory_map(self._temporary.name)))
        self._temporary.close()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Iterate over the batches."""
        yield from self._batches

    def __getitem__(self, index: int) -> dict[str, object]:
        which = bisect.bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        rows: list[dict[str, object]] = self._batches[which].slice(index - start, 1).to_pylist(maps_as_pydicts="strict")
        return rows[0]
