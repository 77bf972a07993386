"""Data set: the rows of parquet files as samples, checked when it is opened."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from agentrl.data.columns import BadValue, bad_rows, check_types, names_in, rows_without_loop, wanted_columns
from agentrl.data.contract import CONTENT, UNKNOWN_HINT, Dataset, unknown_name
from agentrl.data.filling import Filling, holds_filling
from agentrl.data.rows import read_prompt, to_sample
from agentrl.data.sources import Table, expand, open_table
from agentrl.data.store import ROW_NUMBER, RowStore, numbered
from agentrl.data.unread import UnreadColumns
from agentrl.errors import DataError
from agentrl.trajectory.sample import AGENT_ALIASES, Sample, row_place


class ParquetDataset(Dataset):
    """Rows of many files, in the order of the files. `ds[i]` decodes one row; memory does not grow with the files.

    `skipped` counts rows left out by on_bad_row=skip. Positions count the remaining rows.
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
        super().__init__(expand(files), on_bad_row)
        self.prompt_key = prompt_key
        self.image_key = image_key
        self.default_agent_loop = default_agent_loop
        self._names: dict[str, dict[str, str]] = {kind: {} for kind in ("data_source", *UNKNOWN_HINT)}
        """Place of the first row of each name, by column."""
        self._stores: list[RowStore] = []
        self._filled: dict[str, Filling] = {}
        """By file, where arguments of calls in prompts are structs."""
        self._ends: list[int] = []
        self._sizes: list[tuple[int, int]] = []
        self._contents: list[str] = []
        total = 0
        for file in self.files:
            store = self._read(file, None if max_samples is None else max_samples - total)
            total += len(store)
            self._stores.append(store)
            self._ends.append(total)
        if total == 0:
            skipped = f" ({self.skipped} rows were skipped)" if self.skipped else ""
            raise DataError(f"the data set is empty: no row in {', '.join(self.files)}{skipped}")
        self._kept = np.arange(total)

    def __getitem__(self, position: int) -> Sample:
        index = int(self._kept[position])
        which = bisect.bisect_right(self._ends, index)
        store = self._stores[which]
        row = store[index - self._ends[which] + len(store)]
        try:
            return self._sample(row, index, store.file)
        except DataError as error:
            raise DataError(f"{row_place(store.file, row[ROW_NUMBER])}: {error}") from error

    @property
    def fingerprint(self) -> str:
        """Hash that changes when a file's content changes, or when other rows are left out. Names don't count."""
        return f"{CONTENT}{self._hashed(self._contents)}"

    def is_of(self, fingerprint: str) -> bool:
        # Until November 2026 checkpoints had a hash of the files' sizes.
        known = self.fingerprint if fingerprint.startswith(CONTENT) else self._hashed(self._sizes)
        return fingerprint == known

    def _hashed(self, files: Sequence[object]) -> str:
        text = repr((files, hashlib.sha256(self._kept.tobytes()).hexdigest()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def check(
        self, *, agent_names: Collection[str], tool_names: Collection[str], interaction_names: Collection[str]
    ) -> list[str]:
        known = {"agent_name": agent_names, "tools_kwargs": tool_names, "interaction_kwargs": interaction_names}
        unknown = {
            (kind, name)
            for kind, names in known.items()
            for name in self._names[kind]
            if (name or names)  # without a name and a configured interaction, interaction_kwargs ask for nothing
            and name not in names
            and not (kind == "agent_name" and AGENT_ALIASES.get(name) in names)
        }
        if unknown:
            kind, name = min(unknown)
            fault = unknown_name(kind, name, self._names[kind][name], known[kind])
            if self.on_bad_row == "error":
                raise DataError(fault)
            found, start = [np.empty(0, np.int64)], 0
            for batch in itertools.chain.from_iterable(store.batches() for store in self._stores):
                for kind, name, rows in names_in(batch, self.default_agent_loop):
                    if (kind, name) in unknown:
                        found.append(start + np.flatnonzero(rows.to_numpy(zero_copy_only=False)))
                start += batch.num_rows
            self._leave_out(np.unique(np.concatenate(found)), fault)
        return sorted(self._names["data_source"])

    def _read(self, file: str, room: int | None) -> RowStore:
        table, store = open_table(file), RowStore(file)
        check_types(table.schema, self.prompt_key, self.image_key, file)
        self._sizes.append((table.rows, table.bytes))
        self._contents.append(_content(table, file))
        if holds_filling(table.schema.field(self.prompt_key).type):
            self._filled[file] = Filling()
        columns = wanted_columns(table.schema, self.prompt_key, self.image_key)
        unread = UnreadColumns(columns)
        unread.note_schema(table.schema)
        if note := unread.told():
            self.notes[file] = note
        for batch in numbered(table, columns, file) if room is None or room > 0 else ():
            bad = bad_rows(batch, self.prompt_key)
            if room is not None and len(store) + batch.num_rows - len(bad) >= room:
                good = np.setdiff1d(np.arange(batch.num_rows), [one.row for one in bad])[: room - len(store)]
                batch = batch.slice(0, int(good[-1]) + 1)
                bad = [one for one in bad if one.row < batch.num_rows]
            batch = self._without(bad, batch, file)
            self._note_names(batch, file)
            if file in self._filled:
                for prompt in batch.column(self.prompt_key).to_pylist(maps_as_pydicts="lossy"):
                    self._filled[file].note(prompt)
            store.append(batch)
            if room is not None and len(store) >= room:
                break
        store.finish()
        return store

    def _without(self, bad: list[BadValue], batch: pa.RecordBatch, file: str) -> pa.RecordBatch:
        """Drop a batch's bad rows; raises DataError for the first of them unless they are skipped."""
        if not bad:
            return batch
        one = bad[0]
        fault = (
            f"{row_place(file, batch.column(ROW_NUMBER)[one.row])}, column {one.column}: expected {one.expected}, "
            f"found {one.found:.200}"
        )
        if self.on_bad_row == "error":
            raise DataError(f"{fault}. Mend it, or leave such rows out with data.on_bad_row=skip")
        self._skip(len(bad), fault)
        return batch.take(np.setdiff1d(np.arange(batch.num_rows), [one.row for one in bad]))

    def _note_names(self, batch: pa.RecordBatch, file: str) -> None:
        self.without_loop += rows_without_loop(batch)
        for kind, name, rows in names_in(batch, self.default_agent_loop):
            if name not in self._names[kind]:
                number = batch.column(ROW_NUMBER)[pc.index(rows, True).as_py()]
                self._names[kind][name] = row_place(file, number)

    def _rows(self) -> Iterator[tuple[int, str, Callable[[], Sample]]]:
        for index, row, file in self._stream():
            yield index, row_place(file, row[ROW_NUMBER]), partial(self._sample, row, index, file)

    def _stream(self) -> Iterator[tuple[int, dict[str, object], str]]:
        """Iterate over all kept rows with their indices and files, decoded a batch at a time."""
        kept = np.zeros(self._ends[-1], bool)
        kept[self._kept] = True
        index = -1
        for store in self._stores:
            for batch in store.batches():
                for start in range(0, batch.num_rows, 256):
                    for row in batch.slice(start, 256).to_pylist(maps_as_pydicts="strict"):
                        index += 1
                        if kept[index]:
                            yield index, row, store.file

    def _sample(self, row: dict[str, object], index: int, file: str) -> Sample:
        number = row[ROW_NUMBER]
        assert isinstance(number, int)
        if file in self._filled:
            self._filled[file].without(row[self.prompt_key])
        return to_sample(
            row,
            prompt=read_prompt(row, self.prompt_key),
            image_key=self.image_key,
            default_agent_loop=self.default_agent_loop,
            index=index,
            file=file,
            number=number,
        )


def _content(table: Table, file: str) -> str:
    try:
        return table.content()
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
