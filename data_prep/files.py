"""Output files, rows as parquet and text, which appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import DataError
from agentrl.system.json_value import map_texts
from agentrl.system.publish import published
from agentrl.trajectory.parquet import valid_unicode

Row = Mapping[str, object]
_GROUP_ROWS = 1000


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Write `rows` to `path`; the schema is inferred from all of them. Raises DataError when there are none."""
    write_splits({path: rows})


def write_splits(files: Mapping[Path, Sequence[Row]]) -> None:
    """Write the files of one data set, all or none of them, as `write_parquet` writes one."""
    for path, rows in files.items():
        if not rows:
            raise DataError(f"{path}: there are no rows to write")
    with ExitStack() as written:
        for path, rows in files.items():
            temporary = written.enter_context(writing(path))
            names = dict.fromkeys(name for row in rows for name in row)  # pyarrow takes those of the first row
            pq.write_table(_table([{name: row.get(name) for name in names} for row in rows]), temporary)


def write_rows(path: Path, rows: Iterable[Row], schema: pa.Schema) -> int:
    """Write rows of a known schema as they come, and return how many. Raises DataError when there are none."""
    with writing(path) as temporary:
        count = fill_parquet(temporary, rows, schema)
        if not count:
            raise DataError(f"{path}: there are no rows to write")
    return count


def fill_parquet(file: Path, rows: Iterable[Row], schema: pa.Schema, group_rows: int = _GROUP_ROWS) -> int:
    """Write rows of a known schema to a file in place, as they come, and return how many.

    group_rows: rows that are held in memory together.
    """
    count, remaining = 0, iter(rows)
    with pq.ParquetWriter(file, schema) as writer:
        while group := list(islice(remaining, group_rows)):
            writer.write_table(_table([dict(row) for row in group], schema))
            count += len(group)
    return count


def _table(rows: list[dict[str, object]], schema: pa.Schema | None = None) -> pa.Table:
    """Make a table. Half a surrogate pair, which JSON may hold and no file, becomes U+FFFD."""
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:
        return pa.Table.from_pylist(map_texts(rows, valid_unicode), schema=schema)


def write_json_lines(path: Path, items: Iterable[Row]) -> None:
    """Write one JSON object a line."""
    write_text(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8; half a surrogate pair becomes U+FFFD."""
    with writing(path) as temporary:
        temporary.write_text(valid_unicode(text), encoding="utf-8")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of `path`, as `published` does.

    Raises DataError when it cannot be made.
    """
    try:
        with published(path) as temporary:
            yield temporary
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error}); give another directory") from error
