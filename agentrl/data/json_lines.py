"""Values of JSON lines, or of one JSON array; gzipped where the name ends in .gz."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.chat.message import parse_json
from agentrl.data.bad_rows import BadRow
from agentrl.data.messages import Unfit, short
from agentrl.errors import DataError
from agentrl.system.json_value import JSON

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_TIMES = 100
"""Bytes that a gzipped byte may stand for, in files that unpack to more than UNPACKED. Text takes 3 to 30."""
UNPACKED = 64 << 20


def read_objects(file: str) -> Iterator[dict[str, JSON] | BadRow]:
    """Iterate over the rows of a file; blank lines are no rows. A row that is no JSON object is given as its fault.

    Raises DataError when the file cannot be read, or is a JSON array that is broken.
    """
    with _opened(file) as lines:
        first = lines.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n")
        lines.seek(0)
        values: Iterable[JSON | BadRow] = (_parsed(line) for line in lines if line.strip())
        if first.startswith(b"["):
            whole = _parsed(lines.read())
            if isinstance(whole, BadRow):
                raise DataError(f"{file}: {whole}")
            values = whole if isinstance(whole, list) else [whole]
        for value in values:
            yield value if isinstance(value, dict | BadRow) else Unfit("", "a JSON object", value)


def hash_unpacked(file: str) -> str:
    """Hash the content of a file as it is read, so that packing it again changes nothing. Raises DataError."""
    with _opened(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextmanager
def _opened(file: str) -> Iterator[io.BufferedReader[io.RawIOBase]]:
    try:
        raw: io.RawIOBase = _Unpacked(file) if file.lower().endswith(".gz") else io.FileIO(file)
        with raw, io.BufferedReader(raw) as opened:
            yield opened
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


class _Unpacked(io.RawIOBase):
    """Content of a gzipped file, up to a bound: a small file may hold more than the machine's memory."""

    def __init__(self, file: str) -> None:
        self._file, self._packed = file, gzip.GzipFile(file, "rb")
        self._left = self._most = max(UNPACKED, MOST_TIMES * Path(file).stat().st_size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = 0, /) -> int:
        place = self._packed.seek(place, whence)
        self._left = self._most - place
        return place

    def readinto(self, buffer: Buffer, /) -> int:
        size = self._packed.readinto(buffer)
        self._left -= size
        if self._left < 0:
            raise DataError(
                f"{self._file}: expected at most {self._most:,} bytes unpacked ({MOST_TIMES} times the packed ones, or "
                f"{UNPACKED:,}), found more. If you trust the file, unpack it with gunzip and name the result"
            )
        return size

    def close(self) -> None:
        self._packed.close()
        super().close()


def _parsed(line: bytes) -> JSON | BadRow:
    try:
        return parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Unfit("", "UTF-8 text", error.object[max(0, error.start - 20) : error.end + 20])
    except ValueError as error:
        return BadRow("", f"expected JSON ({error}), found {short(line[:80])}")
