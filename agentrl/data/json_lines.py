"""Rows of JSON lines, or of one JSON array; gzipped where the name ends in .gz."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, cast

from agentrl.chat.message import parse_json
from agentrl.data.columns import IN_EXTRA_INFO, MAPPINGS, TEXT
from agentrl.data.messages import short
from agentrl.data.own import OwnDataset
from agentrl.data.rows import read_prompt, to_sample
from agentrl.data.sources import expand, is_json
from agentrl.data.unread import UnreadColumns
from agentrl.errors import DataError
from agentrl.system.json_value import JSON
from agentrl.trajectory.sample import Sample, row_place

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_TIMES = 100
"""Bytes that a gzipped byte may stand for, in files that unpack to more than UNPACKED. Text takes 3 to 30."""
UNPACKED = 64 << 20


def read_rows(file: str) -> Iterator[tuple[int, dict[str, JSON]]]:
    """Iterate over row numbers, counted from 0, and rows. Blank lines are no rows.

    Raises DataError, naming file and row, when the file cannot be read or a row is no JSON object.
    """
    try:
        with _opened(file) as lines:
            first = lines.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n")
            lines.seek(0)
            values: Iterable[JSON] = _lines(file, lines)
            if first.startswith(b"["):
                whole = _parsed(lines.read(), file)
                values = whole if isinstance(whole, list) else [whole]
            for number, value in enumerate(values):
                if not isinstance(value, dict):
                    raise DataError(f"{row_place(file, number)}: expected a JSON object, found {short(value)}")
                yield number, value
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _opened(file: str) -> BinaryIO:
    if not Path(file).is_file():
        raise DataError(f"data file {file} does not exist")
    return cast(BinaryIO, io.BufferedReader(_Unpacked(file))) if file.lower().endswith(".gz") else Path(file).open("rb")


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


def _lines(file: str, lines: BinaryIO) -> Iterator[JSON]:
    number = 0
    for line in lines:
        if line.strip():
            yield _parsed(line, row_place(file, number))
            number += 1


def _parsed(line: bytes, where: str) -> JSON:
    try:
        return parse_json(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        found = error.object[max(0, error.start - 20) : error.end + 20]
        raise DataError(f"{where}: expected UTF-8 text, found {found!r}") from error
    except ValueError as error:
        raise DataError(f"{where}: expected JSON ({error}), found {short(line[:80])}") from error


class JsonRows:
    """Samples of JSON files, which are held in memory as they were read."""

    def __init__(self, files: Sequence[str], prompt_key: str, image_key: str | None) -> None:
        self.rows = [(file, number, row) for file in files for number, row in read_rows(file)]
        self._prompt_key, self._image_key = prompt_key, image_key
        unread = {file: UnreadColumns({prompt_key, image_key or prompt_key, *TEXT, *MAPPINGS}) for file in files}
        for file, _, row in self.rows:
            unread[file].note_row(row)
        self.notes = {file: note for file, columns in unread.items() if (note := columns.told())}
        """By file, in words: the columns that are not read."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        """Raises DataError for a row that cannot be used."""
        file, number, row = self.rows[index]
        try:
            check_row(row, self._prompt_key, self._image_key)
            return to_sample(
                row,
                prompt=read_prompt(row, self._prompt_key),
                image_key=self._image_key,
                default_agent_loop="",
                index=index,
                file=file,
                number=number,
            )
        except DataError as error:
            raise DataError(f"{row_place(file, number)}, {error}") from error


class JsonDataset(OwnDataset):
    """The rows of JSON files as a run's data set."""

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
        """Read all files. Raises DataError for a file that cannot be read, and for files without a row."""
        names = expand(files)
        if other := next((name for name in names if not is_json(name)), None):
            raise DataError(f"{other} is no JSON file, and others of one list are: give files of one kind")
        self._json = JsonRows(names, prompt_key, image_key)
        super().__init__(
            self._json, names, default_agent_loop=default_agent_loop, max_samples=max_samples, on_bad_row=on_bad_row
        )

    def _place(self, index: int) -> str:
        file, number, _ = self._json.rows[index]
        return row_place(file, number)


def check_row(row: Mapping[str, JSON], prompt_key: str, image_key: str | None) -> None:
    """Raise DataError, naming the column, for a value that no row can have there."""
    if prompt_key not in row:
        raise DataError(
            f"column {prompt_key}: expected messages, and the row has only {', '.join(row)}. Name the right one with "
            "data.prompt_key"
        )
    if row.get("data_source", "") is None:
        raise DataError("column data_source: expected text, found null")
    extra = row.get("extra_info")
    inside = extra if isinstance(extra, dict) else {}
    columns = [*row.items(), *((f"extra_info.{name}", inside.get(name)) for name in IN_EXTRA_INFO)]
    for name, value in columns:
        expected = "a list of images" if name == image_key and not isinstance(value, list) else _expected(name, value)
        if value is not None and expected is not None:
            raise DataError(f"column {name}: expected {expected}, found {short(value)}")


def _expected(name: str, value: JSON) -> str | None:
    """Describe the value that a column must hold instead of `value`; None where it may hold that."""
    base = name.removeprefix("extra_info.")
    if base in TEXT:
        return None if isinstance(value, str) else "text"
    if base not in MAPPINGS:
        return None
    if not isinstance(value, dict):
        return "an object"
    if base == "tools_kwargs" and not all(isinstance(own, dict | None) for own in value.values()):
        return "objects such as {create_kwargs: {...}}"
    return None
