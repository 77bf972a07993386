"""Rows to parquet and text to files, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import DataError

Row = Mapping[str, Any]


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Write `rows` to `path`; the schema is inferred from all of them. Raises DataError when there are none."""
    if not rows:
        raise DataError(f"{path}: there are no rows to write")
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), temporary)


def write_json_lines(path: Path, items: Iterable[Row]) -> None:
    """Write one JSON object a line."""
    write_text(path, "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items))


def write_text(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well, and is removed when it does not."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{path.parent}: cannot be made a directory ({error}); give --out another one") from error
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)
