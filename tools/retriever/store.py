"""Documents of an index: JSON lines and an array of where each begins, both mapped into memory.

Written once and never changed: what is added later is a further part.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import orjson
import pydantic

from agentrl.errors import DataError


class PartSpec(pydantic.BaseModel):
    """One part, as the manifest names it."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str
    documents: int = pydantic.Field(gt=0)

    def lines(self, folder: Path) -> Path:
        """Path of the documents, one JSON line each."""
        return folder / f"{self.name}.jsonl"

    def starts(self, folder: Path) -> Path:
        """Path of the offsets, int64, little endian: where each line begins, and where the last one ends."""
        return folder / f"{self.name}.starts"


class PartWriter:
    """Writer of a part's two files."""

    def __init__(self, folder: Path, name: str) -> None:
        spec = PartSpec(name=name, documents=1)
        self._name = name
        self._lines = spec.lines(folder).open("wb")
        self._starts = spec.starts(folder).open("wb")
        self._end = 0
        self._starts.write((0).to_bytes(8, "little"))
        self.documents = 0

    def add(self, identity: str, contents: str) -> None:
        """Append a document."""
        line = orjson.dumps({"id": identity, "contents": contents})
        self._lines.write(line)
        self._lines.write(b"\n")
        self._end += len(line) + 1
        self._starts.write(self._end.to_bytes(8, "little"))
        self.documents += 1

    def spec(self) -> PartSpec:
        """Describe the part."""
        return PartSpec(name=self._name, documents=self.documents)

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()
        self._starts.close()


class Documents(Sequence[bytes]):
    """All parts, one after the other: row -> `{"id": ..., "contents": ...}` as JSON."""

    def __init__(self, folder: Path, parts: Sequence[PartSpec]) -> None:
        """Map the parts. Raises DataError when a file is not as long as it should be, OSError."""
        self._maps: list[mmap.mmap] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        self._first = np.cumsum([0] + [part.documents for part in parts])  # [parts + 1] rows
        for part in parts:
            try:
                starts = np.memmap(part.starts(folder), dtype="<i8", mode="r")
                with part.lines(folder).open("rb") as file:
                    lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:  # an empty file, or one that ends within a number
                raise DataError(f"index {folder}: {part.name} is damaged: {error}. Index the corpus anew") from error
            if len(starts) != part.documents + 1 or starts[-1] != len(lines):
                raise DataError(
                    f"index {folder}: {part.name} is damaged: expected {part.documents:,} documents, found "
                    f"{len(starts) - 1:,} in {len(lines):,} bytes. Index the corpus anew"
                )
            self._maps.append(lines)
            self._starts.append(starts)

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, row: int) -> bytes:  # type: ignore[override]
        if not 0 <= row < len(self):
            raise IndexError(row)
        part = int(np.searchsorted(self._first, row, side="right")) - 1
        starts, place = self._starts[part], row - int(self._first[part])
        return self._maps[part][int(starts[place]) : int(starts[place + 1]) - 1]

    def contents(self, row: int) -> str:
        """Return the document's text, title line included."""
        text: str = orjson.loads(self[row])["contents"]
        return text
