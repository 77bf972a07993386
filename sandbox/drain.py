"""A program's output, read while it runs, so that it never waits; kept up to a size and marked as cut."""

from __future__ import annotations

import asyncio
import os


class Drain:
    """Reads a pipe to its end; keeps the first `keep` bytes. A flood closes the pipe's run by `on_flood`."""

    def __init__(self, fd: int, keep: int, flood: int, on_flood: asyncio.Event) -> None:
        self.kept, self.total, self.fd = bytearray(), 0, fd
        self._keep, self._flood, self._on_flood = keep, flood, on_flood
        self.ended = asyncio.Event()
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._ready)

    @property
    def cut(self) -> bool:
        return self.total > self._keep

    def _ready(self) -> None:
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self.total += len(data)
        self.kept += data[: max(0, self._keep - len(self.kept))]
        if self.total > self._flood:
            self._on_flood.set()

    def take(self) -> tuple[bytes, bool]:
        """Take what has come since the last call, of a stream that goes on, and whether it was cut. Counting starts
        anew.
        """
        for _ in range(64):  # 4 MiB: a writer that never pauses is not waited for
            before = self.total
            if self.ended.is_set():
                break
            self._ready()
            if self.total == before:
                break
        kept, cut = bytes(self.kept), self.cut
        self.kept.clear()
        self.total = 0
        return kept, cut

    def close(self) -> None:
        if not self.ended.is_set():
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.ended.set()
