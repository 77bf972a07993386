"""Records of a data set's file, one after another, each with the place that a message about it names."""

from __future__ import annotations

import gzip
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from agentrl.errors import DataError
from agentrl.system.json_value import JSON

_PROGRESS_SECONDS = 5.0
_GAP = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True)
class Record:
    """One JSON object."""

    where: str
    """File and line, as a message names them; the first line is 1."""
    fields: dict[str, JSON]

    def text(self, *keys: str) -> str:
        """Return the first of the fields that is there. Raises DataError when none is, or it is no text."""
        for key in keys:
            value = self.fields.get(key)
            if value is not None:
                if not isinstance(value, str):
                    raise DataError(f"{self.where}: expected text as `{key}`, found {short(value)}")
                return value
        raise DataError(f"{self.where}: expected the text `{'` or `'.join(keys)}`, found {short(self.fields)}")

    def texts(self, key: str) -> list[str]:
        """Return a list of texts. Raises DataError when the field is none, or empty."""
        value = self.fields.get(key)
        texts = [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
        if not isinstance(value, list) or not value or len(texts) < len(value):
            raise DataError(f"{self.where}: expected a list of texts as `{key}`, found {short(value)}")
        return texts


def opened(value: JSON) -> JSON:
    """Parse JSON text; other text stays."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            parsed: JSON = json.loads(value)
            return parsed
        except (ValueError, RecursionError):
            return value
    return value


def read_records(path: Path) -> Iterator[Record]:
    """Read JSON lines, or one JSON array; gzipped where the name ends in .gz. Progress goes to stderr.

    Raises DataError naming file and line.
    """
    try:
        with _opened(path) as file:
            yield from _with_progress(path, _records(path, file))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); --source must name a JSON lines file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 text ({error})") from error


Broken = Callable[[str, str], None]
"""Function that is given the place of a text that is no record, and why, without the text."""


def read_whole_records(path: Path, broken: Broken) -> Iterator[Record]:
    """Read records as `read_records` does, also objects over several lines, and continue after a broken one.

    An object over several lines begins with a line `{` and ends with a line `}`, as indented JSON does. It is broken
    where another begins before its end. Raises DataError for a file that cannot be opened.
    """
    try:
        _refuse_other_kind(path)
        with _opened(path, "surrogateescape") as file:
            yield from _with_progress(path, _whole_records(path, file, broken))
    except (EOFError, zlib.error) as error:
        broken(f"{path}", f"the file is cut or damaged ({error})")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); --source must name JSON lines files") from error


KINDS = {
    b"PAR1": "a parquet file",
    b"\x28\xb5\x2f\xfd": "a file packed by zstd: unpack it",
    b"\x1f\x8b": "a gzipped file, whose name must end in .gz",
    b"PK\x03\x04": "a zip archive: unpack it",
    b"SQLite": "a database of SQLite",
}
"""Files that hold no JSON lines, by their first bytes."""


def _refuse_other_kind(path: Path) -> None:
    with path.open("rb") as file:
        begin = file.read(8)
    kind = next((kind for mark, kind in KINDS.items() if begin.startswith(mark)), None)
    if kind is not None and path.suffix != ".gz":
        raise DataError(f"{path}: expected JSON lines, found {kind}")


def _whole_records(path: Path, file: TextIO, broken: Broken) -> Iterator[Record]:
    for number, line in _texts(file):
        where = f"{path}:{number}"
        if number == 1 and line.lstrip("\ufeff").lstrip().startswith("["):
            yield from _entries(path, line.lstrip("\ufeff") + file.read(), broken)
            return
        if line.strip():
            try:
                yield _record(where, _value(line))
            except (ValueError, RecursionError) as error:
                broken(where, f"expected a JSON object, found text that is none ({error})")
            except DataError:
                broken(where, "expected a JSON object, found another value")


def _texts(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield lines with their numbers; those of an object over several lines as one."""
    first, begun = 0, list[str]()
    for number, line in enumerate(file, start=1):
        bare = line.rstrip()
        if begun and (bare == "{" or _is_whole(bare)):
            yield first, "".join(begun)
            begun = []
        if bare == "{":
            first = number
        if not begun and bare != "{":
            yield number, line
            continue
        begun.append(line)
        if bare in ("}", "},"):
            yield first, "".join(begun).rstrip().rstrip(",")
            begun = []
    if begun:
        yield first, "".join(begun)


def _is_whole(line: str) -> bool:
    """Check for a whole object on a line: none of an indented object begins at its first column."""
    if line[:1] != "{" or not line[1:].lstrip().startswith('"'):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _value(text: str) -> JSON:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None
    value: JSON = json.loads(text.lstrip("\ufeff"))
    return value


def _entries(path: Path, text: str, broken: Broken) -> Iterator[Record]:
    """Read the entries of an array one after another, up to the first that is broken."""
    decoder, place, at = json.JSONDecoder(), 0, text.index("[") + 1
    while True:
        at = _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if text[at : at + 1] == "]":
            return
        place += 1
        where = f"{path}, entry {place}"
        try:
            value, end = decoder.raw_decode(text, at)
            text[at:end].encode()
        except (ValueError, RecursionError) as error:
            broken(where, f"expected a JSON object, or ] at the end of the array ({type(error).__name__})")
            return
        at = end
        if isinstance(value, dict):
            yield Record(where, value)
        else:
            broken(where, "expected a JSON object, found another value")


def _opened(path: Path, errors: str = "strict") -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors=errors)
    return path.open(encoding="utf-8", errors=errors)


def _records(path: Path, file: TextIO) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if number == 1 and line.lstrip("\ufeff").lstrip().startswith("["):
            entries = _parsed(line + file.read(), f"{path}", "a JSON array")
            assert isinstance(entries, list)  # it begins with a bracket
            for place, entry in enumerate(entries, start=1):
                yield _record(f"{path}, entry {place}", entry)
            return
        if line.strip():
            yield _record(f"{path}:{number}", _parsed(line, f"{path}:{number}", "a JSON object"))


def _parsed(text: str, where: str, expected: str) -> JSON:
    try:
        value: JSON = json.loads(text.lstrip("\ufeff"))
        return value
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: expected {expected}, found {text[:80]!r} ({error})") from error


def _record(where: str, entry: object) -> Record:
    if not isinstance(entry, dict):
        raise DataError(f"{where}: expected a JSON object, found {short(entry)}")
    return Record(where, entry)


def _with_progress(path: Path, records: Iterable[Record]) -> Iterator[Record]:
    told = time.monotonic()
    for number, record in enumerate(records):
        if time.monotonic() - told >= _PROGRESS_SECONDS:
            told = time.monotonic()
            print(f"{path}: {number:,} records", file=sys.stderr, flush=True)
        yield record


def short(value: object) -> str:
    """Shorten a value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
