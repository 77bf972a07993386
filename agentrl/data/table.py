"""The rows of one file, in the same form for every format: mappings by column.

A file is parquet, JSON lines, one JSON array, or a data set of Hugging Face; or of a format that a distribution reads
(`RowTable`). A row that cannot be decoded is a bad row like any other. What makes the file no file of such rows raises
DataError.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.data.bad_rows import BadRow, BadRows, located
from agentrl.data.filling import Filling, holds_filling
from agentrl.data.json_lines import hash_unpacked, read_objects
from agentrl.data.messages import Unfit
from agentrl.data.sources import HUB, TABLES, hash_files, kind_of, no_parquet
from agentrl.data.unread import UnreadColumns
from agentrl.errors import ConfigError, DataError, first_line, install_extra
from agentrl.system.parts import GROUP, parts
from agentrl.system.targets import load_target
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory.sample import row_place

_HUB_NAME = re.compile(r"hf:(?P<path>[^:]+)(?::(?P<split>.+))?")
_BATCH_ROWS = 1024
_HELD = "a value that Python can hold (in a map no key twice)"
_UNREADABLE = (ValueError, KeyError, OverflowError, pa.ArrowException)
"""Errors of a value that Python cannot hold: text that is not UTF-8, a map with a key twice, a time too far away."""

Row: TypeAlias = dict[str, object]
Batches: TypeAlias = Callable[[list[str]], Iterator[pa.RecordBatch]]
"""Reads the columns of these names. Raises the errors of reading."""
Made = TypeVar("Made")


class Table(ABC):
    """The rows of one file, read in their order."""

    def __init__(self, file: str, names: Sequence[str], size: tuple[int, int] | None = None) -> None:
        self.file = file
        self.names = names
        """Its columns; of JSON the members of the first row that has any."""
        self.size = size
        """Rows and bytes, by which checkpoints of before November 2026 know a parquet file."""
        self._unread = UnreadColumns(())

    def read(
        self,
        columns: Collection[str],
        read: Callable[[Row], Made],
        bad: BadRows,
        *,
        needed: Mapping[str, str],
        tools: str = "tools",
        known: Collection[str] = (),
    ) -> Iterator[tuple[int, Made]]:
        """Iterate over numbers and results of the rows that can be used; `bad` gets the others.

        columns: names that `read` takes, as far as they are there. needed: columns that may not be missing, each with
        the key that names it. tools: the column with a row's tools. known: columns that `unread` does not name. Raises
        DataError.
        """
        columns = dict.fromkeys((*needed, *columns))
        self._unread = UnreadColumns({*columns, *known})
        for number, row in enumerate(self._rows(columns, needed, tools)):
            try:
                if isinstance(row, BadRow):
                    raise row
                made = read(row)
            except DataError as fault:
                bad.add(located(row_place(self.file, number), fault))
            except RecursionError:
                bad.add(BadRow(row_place(self.file, number), "expected plain values, found some nested too deeply"))
            else:
                yield number, made

    @property
    def unread(self) -> str:
        """The columns that the rows so far fill and `read` did not take, in words."""
        return self._unread.told()

    @abstractmethod
    def content(self) -> str:
        """Hash the content; names do not count. Raises DataError."""

    @abstractmethod
    def _rows(self, columns: Collection[str], needed: Mapping[str, str], tools: str) -> Iterator[Row | BadRow]:
        """Iterate over all rows, each a mapping of those columns that it has."""


class RowTable(Table):
    """Rows that are read one after the other, each with columns of its own.

    A class for another format has `rows`. An entry point of the group `agentrl.tables` names it by a file's ending.
    """

    def __init__(self, file: str) -> None:
        """Read the first row that has members. Raises DataError."""
        super().__init__(file, [])
        self.names = list(next((row for row in self._checked() if isinstance(row, dict) and row), {}))

    @abstractmethod
    def rows(self) -> Iterator[Row | BadRow]:
        """Iterate over all rows of `file`, always the same: a mapping, or a BadRow with the reason.

        Raises DataError, or an OSError, for a file that cannot be read.
        """

    def content(self) -> str:
        return hash_files([Path(self.file)])

    def _checked(self) -> Iterator[Row | BadRow]:
        what, number = f"{self.file}: {type(self).__name__}", 0
        try:
            with user_code(what, self.rows):
                for row in self.rows():
                    if not isinstance(row, dict | BadRow):
                        raise contract_error(what, self.rows, f"row {number}: expected a mapping, found {row!r:.100}")
                    yield row
                    number += 1
        except OSError as error:
            raise DataError(f"{row_place(self.file, number)}: cannot be read: {error}") from error

    def _rows(self, columns: Collection[str], needed: Mapping[str, str], tools: str) -> Iterator[Row | BadRow]:
        for row in self._checked():
            if isinstance(row, dict):
                self._unread.note_row(row)
                problem = missing(row, needed)
                yield BadRow("", problem) if problem else {name: row[name] for name in columns if name in row}
            else:
                yield row


class JsonTable(RowTable):
    """JSON lines, or one JSON array."""

    def rows(self) -> Iterator[Row | BadRow]:
        return cast(Iterator[Row | BadRow], read_objects(self.file))

    def content(self) -> str:
        return hash_unpacked(self.file)


class ArrowTable(Table):
    """Rows in Arrow's columns, decoded a batch at a time."""

    def __init__(
        self, file: str, schema: pa.Schema, batches: Batches, size: tuple[int, int], content: Callable[[], str]
    ) -> None:
        super().__init__(file, schema.names, size)
        self._schema, self._batches, self._content = schema, batches, content

    def content(self) -> str:
        try:
            return self._content()
        except OSError as error:
            raise DataError(f"{self.file}: cannot be read: {error}") from error

    def _rows(self, columns: Collection[str], needed: Mapping[str, str], tools: str) -> Iterator[Row | BadRow]:
        if problem := missing(self.names, needed):
            raise DataError(f"{self.file}: {problem}")
        self._unread.note_schema(self._schema)
        names = [name for name in columns if name in self.names]
        self._check_names(names)
        filled = {name: Filling() for name in names if holds_filling(self._schema.field(name).type)}
        number = 0
        try:
            for batch in self._batches(list(filled)) if filled else ():
                for row in _decoded(batch):
                    for name, filling in filled.items():
                        filling.note(None if isinstance(row, BadRow) else row[name])
            for row in itertools.chain.from_iterable(map(_decoded, self._batches(names))):
                if isinstance(row, dict):
                    for name, filling in filled.items():
                        filling.without(row[name], row.get(tools))
                yield row
                number += 1
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.file}: it is damaged after row {number}: {error}") from error

    def _check_names(self, columns: Iterable[str]) -> None:
        """Raise DataError when one of `columns`, or a field in one, is there twice, and so is ambiguous."""
        for name in columns:
            twice = name if self.names.count(name) > 1 else _twice(self._schema.field(name).type, name)
            if twice is not None:
                raise DataError(
                    f"{self.file}, column {twice}: expected one of that name, found several. Rename or drop the others"
                )


def missing(names: Collection[str], needed: Mapping[str, str]) -> str:
    """Write the problem of a column that is not there, from the key that names it; empty where all are."""
    for name, key in needed.items():
        if name not in names:
            return f"there is no column {name!r}; its columns are {', '.join(names)}. Name the right one with {key}"
    return ""


def open_table(file: str) -> Table:
    """Open a file or a Hugging Face data set. Raises DataError when it is missing or cannot be read."""
    if file.startswith(HUB):
        return _open_hub(file)
    if not Path(file).is_file():
        raise DataError(f"data file {file} {'is a folder' if Path(file).is_dir() else 'does not exist'}")
    kind = kind_of(file)
    if (target := parts(TABLES).get(kind)) is None:
        return JsonTable(file) if kind == ".json" else _open_parquet(file)
    key = f"entry point {GROUP}{TABLES}: {kind}"
    made = load_target(target, key)
    if not (isinstance(made, type) and issubclass(made, RowTable)):
        raise ConfigError(f"{key}: {target} is no subclass of agentrl.data.table.RowTable, found {made!r:.100}")
    return made(file)


def _open_parquet(file: str) -> Table:
    try:
        # A buffer, so that a column of a large row group is not read whole.
        parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        schema = parquet.schema_arrow
        size = (parquet.metadata.num_rows, Path(file).stat().st_size)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(no_parquet(file, error)) from error
    batches = partial(batches_of, parquet, _BATCH_ROWS)
    return ArrowTable(file, schema, batches, size, lambda: hash_files([Path(file)]))


def batches_of(parquet: pq.ParquetFile, rows: int, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, at most so many at once; None: all columns."""
    groups = range(parquet.num_row_groups)
    # Arrow joins no dictionaries of different row groups inside lists and structs (polars' Categorical).
    apart = [[group] for group in groups] if any(map(holds_dictionary, parquet.schema_arrow.types)) else [[*groups]]
    for some in apart:
        yield from parquet.iter_batches(rows, row_groups=some, columns=columns)


def _open_hub(name: str) -> Table:
    """Load `hf:owner/name[/config][:split]`, or a folder of a saved data set after `hf:`; the split is train."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name}: Hugging Face data sets need a package: {install_extra('hub')}") from error
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise DataError(f"{name}: expected hf:owner/name, hf:owner/name/config or hf:folder, each with :split behind")
    path, split = Path(match["path"]).expanduser(), match["split"] or "train"
    try:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, datasets.DatasetDict):
                saved = saved[split]
            elif match["split"] is not None:
                raise ValueError("it was saved as one split; leave the name of a split out")
        elif path.exists():
            saved = datasets.load_dataset(str(path), split=split)
        else:
            owner, _, rest = match["path"].partition("/")
            repository, _, config = rest.partition("/")
            saved = datasets.load_dataset(f"{owner}/{repository}".rstrip("/"), config or None, split=split)
        arrow = saved.with_format("arrow")
    except Exception as error:
        raise DataError(
            f"{name}: the data set cannot be loaded: {type(error).__name__}: {first_line(error):.500}"
        ) from error

    def batches(columns: list[str]) -> Iterator[pa.RecordBatch]:
        for table in arrow.iter(batch_size=_BATCH_ROWS):
            yield from table.select(columns).combine_chunks().to_batches()

    schema: pa.Schema = arrow.features.arrow_schema.remove_metadata()
    files, size = [Path(one["filename"]) for one in saved.cache_files], (len(arrow), int(arrow.data.nbytes))
    return ArrowTable(name, schema, batches, size, lambda: hash_files(files, split))


def holds_dictionary(column_type: pa.DataType) -> bool:
    """Check whether a type holds a dictionary-encoded one at some depth below it."""
    types = [column_type.field(index).type for index in range(column_type.num_fields)]
    return any(pa.types.is_dictionary(one) or holds_dictionary(one) for one in types)


def _twice(column_type: pa.DataType, path: str) -> str | None:
    """Find a field that a type holds twice, by its dotted path."""
    if isinstance(column_type, pa.DictionaryType):
        column_type = column_type.value_type
    fields = [column_type.field(index) for index in range(column_type.num_fields)]
    names = [field.name for field in fields]
    own = next((f"{path}.{name}" for name in names if names.count(name) > 1), None)
    inside = (_twice(field.type, f"{path}.{field.name}") for field in fields)
    return own or next((found for found in inside if found is not None), None)


def _decoded(batch: pa.RecordBatch) -> Iterable[Row | BadRow]:
    """Decode the rows of a batch; one by one where some have no Python form."""
    try:
        return cast(list[Row], values_of(batch.to_struct_array()))
    except _UNREADABLE:
        return [_decoded_row(batch.slice(row, 1)) for row in range(batch.num_rows)]


def values_of(array: pa.Array) -> list[object]:
    """Return what `array.to_pylist(maps_as_pydicts="strict")` does, in a third of its time for lists and structs.

    Arrow makes an object of its own for each value and each list in it; here a column of values is one call.
    """
    found: list[object]
    if pa.types.is_struct(array.type) and array.type.num_fields:
        names = [field.name for field in array.type]
        found = [dict(zip(names, row, strict=True)) for row in zip(*map(values_of, array.flatten()), strict=True)]
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        items = iter(values_of(array.flatten()))
        found = [list(itertools.islice(items, length or 0)) for length in array.value_lengths().to_pylist()]
    else:
        return cast(list[object], array.to_pylist(maps_as_pydicts="strict"))
    if not array.null_count:
        return found
    return [value if valid else None for value, valid in zip(found, array.is_valid().to_pylist(), strict=True)]


def _decoded_row(row: pa.RecordBatch) -> Row | BadRow:
    found: Row = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            (found[name],) = values_of(column)
        except UnicodeDecodeError as error:
            return Unfit(f"column {name}", "UTF-8 text", error.object[max(0, error.start - 20) : error.end + 20])
        except _UNREADABLE as error:
            return BadRow(f"column {name}", f"expected {_HELD}, found {error!s:.200}")
    return found
