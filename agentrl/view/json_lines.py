"""A run's lines of JSON, read on from where the last read ended: `metrics.jsonl`, `alarms.jsonl`."""

from __future__ import annotations

import orjson

from agentrl.system.json_value import JSON
from agentrl.view.folder import Folder


class JsonLines:
    """Objects of a file that grows by whole lines; a file that shrank is read again."""

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder, self._name = folder, name
        self._end = 0
        self._head = b""
        self.rows: list[dict[str, JSON]] = []
        self.unreadable = 0
        """Lines that are no JSON object."""

    def refresh(self, size: int | None) -> bool:
        """Read the lines added to the file, now of `size` bytes (None: there is no file); return whether it changed."""
        if size is None or size == self._end:
            return False
        if size < self._end or not self._continues():
            self._end, self.rows, self.unreadable = 0, [], 0
        text = self._folder.read(self._name, self._end) or b""
        whole = text[: text.rfind(b"\n") + 1]  # a line that is being written has no end yet
        if not self._end:
            self._head = whole[:256]
        self._end += len(whole)
        for line in whole.splitlines():
            try:
                row = orjson.loads(line)
            except orjson.JSONDecodeError:
                row = None
            if isinstance(row, dict):
                self.rows.append(row)
            elif line.strip():
                self.unreadable += 1
        return bool(whole)

    def _continues(self) -> bool:
        """Check whether the file still begins as it did: a restarted run writes another."""
        return not self._head or self._folder.read(self._name, 0, len(self._head)) == self._head
