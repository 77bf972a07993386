"""A run's lines of JSON, read on from where the last read ended: `metrics.jsonl`, `alarms.jsonl`."""

from __future__ import annotations

import orjson

from agentrl.system.json_value import JSON
from agentrl.view.folder import Folder

KEPT = 256
"""Bytes before the end of the last read that are read again."""


class JsonLines:
    """Objects of a file that grows by whole lines; a file that is another one is read again."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._end = 0
        self._tail = b""
        self.rows: list[dict[str, JSON]] = []
        self.newest: dict[str, JSON] = {}
        """The last value of each number: a validation's are in few lines."""
        self.unreadable = 0
        """Lines that are no JSON object."""

    def refresh(self, size: int | None) -> bool:
        """Read the lines added to the file, now of `size` bytes (None: there is no file); return whether it changed."""
        if size is None or size == self._end:
            return False
        if size < self._end or not self._continues():
            self._end, self._tail, self.rows, self.newest, self.unreadable = 0, b"", [], {}, 0
        text = self._folder.read(self._name, self._end) or b""
        whole = text[: text.rfind(b"\n") + 1]  # a line that is being written has no end yet
        self._tail = (self._tail + whole)[-KEPT:]
        self._end += len(whole)
        for line in whole.splitlines():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                self.rows.append(row)
                self.newest |= row
            elif line.strip():
                self.unreadable += 1
        return bool(whole)

    def _continues(self) -> bool:
        """Check whether the last bytes that were read are still there: a resumed run does later steps again."""
        return self._folder.read(self._name, self._end - len(self._tail), self._end) == self._tail
