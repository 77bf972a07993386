"""Rows laid out so that any of them can be read alone.

Parquet is compressed by column and row group, so one row costs a row group, and many writers make row groups of a
million rows. Files are therefore read once, in small batches. Their rows go to a temporary file (in TMPDIR) that has no
name, so memory stays flat for files of any size, and nobody but this process reads the file.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array

from agentrl.errors import DataError


class RowStore:
    """Python values by number: `append` them all, then `finish`, then read."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="agentrl-rows-")  # noqa: SIM115
        self._ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, row: object) -> None:
        """Write a row. Raises DataError when the temporary folder is full."""
        text = pickle.dumps(row, protocol=5)
        try:
            self._file.write(text)
        except OSError as error:
            raise _full(error) from error
        self._ends.append(self._ends[-1] + len(text))

    def finish(self) -> None:
        """Write the samples that are still in memory. Raises DataError when the temporary folder is full."""
        try:
            self._file.flush()
        except OSError as error:
            raise _full(error) from error

    def __getitem__(self, index: int) -> object:
        start, end = self._ends[index], self._ends[index + 1]
        # Written by this process to a file that no other can open.
        return pickle.loads(os.pread(self._file.fileno(), end - start, start))


def _full(error: OSError) -> DataError:
    return DataError(
        f"cannot write a working copy of the rows to {tempfile.gettempdir()} ({error}); set TMPDIR to a folder with "
        "room for the uncompressed rows"
    )
