"""A parquet file of rows and a policy's responses, written in parts while the responses come.

The parts lie in a folder next to the file, `<file>.parts/`, each whole or not at all and named by the position of its
first row. They are joined to the file when all rows are done, and the folder is removed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.data.sources import no_parquet
from agentrl.data.table import batches_of, holds_dictionary
from agentrl.errors import DataError
from agentrl.reward.manager import turns_text
from agentrl.system.file_lock import FileLock, Locked
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.publish import published
from agentrl.trajectory import Cause, Status, Trajectory
from agentrl.trajectory.parquet import valid_unicode
from agentrl.trajectory.sample import Sample

ADDED = (
    "responses",
    "response_status",
    "response_failure",
    "response_turns",
    "response_tool_calls",
    "response_tokens",
    "response_score",
    "trajectories",
)
"""Columns that are added to the rows' own, with one value a response; the last two when they are asked for."""
READ_ROWS = 1024
"""Input rows that are decoded at once."""
SETTINGS = "settings.json"
LOCK = "running.lock"
UNANSWERED = (Status.FAILED, Status.TIMEOUT, Status.ABORTED)
"""No fault of the policy's: such a response is null."""


def response_text(trajectory: Trajectory) -> str | None:
    """Return the policy's text; None where no fault of its own kept it from answering."""
    is_answer = trajectory.status not in UNANSWERED or trajectory.failure_cause == Cause.SCORER
    return valid_unicode(turns_text(trajectory)) if is_answer else None


class InputRows:
    """Reader of all columns of the samples' rows, which come in the order of their files."""

    def __init__(self, files: Sequence[str], added: Collection[str]) -> None:
        """Read the schemas.

        Raises DataError for a file of another kind, and when columns differ in type between files or are named in
        `added`.
        """
        schemas = {file: _schema(file) for file in files}
        self.schema = pa.schema([])
        for file, schema in schemas.items():
            if twice := next((name for name in schema.names if schema.names.count(name) > 1), None):
                raise DataError(
                    f"{file}, column {twice}: expected one of that name, found several. Rename or drop the others"
                )
            taken = sorted(set(schema.names) & set(added))
            if taken:
                raise DataError(
                    f"{file}: the column {taken[0]} would be written, and is there already; drop or rename it"
                )
            try:
                self.schema = pa.unify_schemas([self.schema, pa.schema(map(_without_dictionaries, schema))])
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise DataError(
                    f"{file}: its columns have other types than those of {files[0]}, and both go into one file: {error}"
                ) from error
        self._file: str | None = None
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._batch = pa.RecordBatch.from_pylist([])
        self._start = 0

    def take(self, samples: Sequence[Sample]) -> pa.Table:
        """Return the rows of `samples`; no row may come before a row that was taken earlier."""
        tables, chosen = [], list[int]()
        for sample in samples:
            if sample.file != self._file or not self._start <= sample.row < self._start + self._batch.num_rows:
                tables.append(self._rows(chosen))
                chosen = []
                if sample.file != self._file or sample.row < self._start:
                    self._file, self._start, self._batch = sample.file, 0, pa.RecordBatch.from_pylist([])
                    parquet = pq.ParquetFile(sample.file, buffer_size=1 << 20, pre_buffer=False)
                    self._batches = batches_of(parquet, READ_ROWS)
                while sample.row >= self._start + self._batch.num_rows:
                    self._start += self._batch.num_rows
                    self._batch = next(self._batches)
            chosen.append(sample.row - self._start)
        return pa.concat_tables([*tables, self._rows(chosen)])

    def _rows(self, chosen: list[int]) -> pa.Table:
        if not chosen:
            return self.schema.empty_table()
        rows = self._batch.take(pa.array(chosen, pa.int64()))
        columns = [
            rows.column(field.name).cast(field.type)
            if field.name in rows.schema.names
            else pa.nulls(rows.num_rows, field.type)
            for field in self.schema
        ]
        return pa.Table.from_arrays(columns, schema=self.schema)


def _without_dictionaries(field: pa.Field) -> pa.Field:
    """Return a column whose lists and structs hold no dictionaries: parts with other dictionaries could not be joined.

    A dictionary that is the whole column stays.
    """
    return field.with_type(_plain(field.type)) if holds_dictionary(field.type) else field


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([kind.field(index).with_type(_plain(kind.field(index).type)) for index in range(len(kind))])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        item = kind.value_field.with_type(_plain(kind.value_type))
        return pa.list_(item) if pa.types.is_list(kind) else pa.large_list(item)
    return kind


def _schema(file: str) -> pa.Schema:
    try:
        return pq.read_schema(file).remove_metadata()
    except (pa.ArrowException, OSError) as error:
        raise DataError(no_parquet(file, error)) from error


class Parts:
    """Parts of one output file that is being made, by one command; `done` counts the rows that are written.

    A lock keeps other commands out until `close`: of two, one would publish what the other has not written.
    """

    def __init__(self, output: Path, settings: Mapping[str, JSON], key: str = "data.output_path") -> None:
        """Find the parts that are there. A file is continued only with the same `settings`, on which its rows depend.

        `key` names the file in messages. Raises DataError when the file cannot be written, another command writes it,
        or its parts were made with other settings.
        """
        check_output(output, key)
        self.output, self._key = output, key
        self.folder = output.with_name(f"{output.name}.parts")
        self._settings = dict(settings)
        self.done = 0
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FileLock(self.folder / LOCK)
        except Locked as locked:
            raise DataError(
                f"{key}: {output} is being written by {locked.last or 'this process'}. Wait for its end, or name "
                "another file"
            ) from None
        try:
            self._lock.sign()
            check_output(output, key)  # it may have been published before the lock was free
            self._find()
        except BaseException:
            self.close()
            raise

    def _find(self) -> None:
        for part in self._files():
            if int(part.stem) != self.done:
                raise DataError(f"{self.folder}: the part at row {self.done} is missing; remove it to begin anew")
            self.done += pq.read_metadata(part).num_rows
        if self.done:
            self._check_settings()

    def add(self, rows: pa.Table) -> None:
        """Write the next rows. Raises TrainingError on a full disk."""
        if not self.done:
            with published(self.folder / SETTINGS) as temporary:
                temporary.write_text(json.dumps(self._settings, indent=2) + "\n", encoding="utf-8")
        with published(self.folder / f"{self.done:012d}.parquet") as temporary:
            pq.write_table(rows, temporary, compression="zstd")
        self.done += rows.num_rows

    def publish(self) -> None:
        """Join the parts to the file, and remove them.

        Raises TrainingError on a full disk, DataError when somebody has put a file there meanwhile.
        """
        check_output(self.output, self._key)
        files = self._files()
        with (
            published(self.output) as temporary,
            pq.ParquetWriter(temporary, pq.read_schema(files[0]), compression="zstd") as writer,
        ):
            for file in files:
                writer.write_table(pq.read_table(file))
        self.discard()

    def rows(self) -> Iterator[dict[str, object]]:
        """Iterate over the rows that are written."""
        for file in self._files():
            yield from pq.read_table(file).to_pylist(maps_as_pydicts="strict")

    def discard(self) -> None:
        """Remove all parts; the lock stays until `close`, which removes the folder."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another command write the file; its folder is removed where nothing is in it."""
        (self.folder / LOCK).unlink(missing_ok=True)
        self._lock.close()
        with suppress(OSError):
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.parquet"))

    def _check_settings(self) -> None:
        file = self.folder / SETTINGS
        try:
            before = as_mapping(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{file} cannot be read ({error}); remove {self.folder} to begin anew") from error
        for key in sorted({*before, *self._settings}):
            if before.get(key) != self._settings.get(key):
                raise DataError(
                    f"{self.folder} holds {self.done} rows that were made with {key}={before.get(key)}, and now it is "
                    f"{self._settings.get(key)}. Set it back to go on, or use the version that made them, if it has no "
                    "such key; or remove the folder to begin anew"
                )


def check_output(output: Path, key: str = "data.output_path") -> None:
    """Raise DataError, with the key that names it, when the file is there already, or cannot be made."""
    if output.exists():
        raise DataError(f"{key}: {output} exists already; move it away, or name another file")
    check_folder(output, key)


def check_folder(output: Path, key: str = "data.output_path") -> None:
    """Raise DataError, with the key that names it, when no file can be made there."""
    folder = next(folder for folder in output.absolute().parents if folder.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DataError(f"{key}: {output} cannot be written: {folder} is no folder that may be written to")
