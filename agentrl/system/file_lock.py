"""A lock on a file, which one command holds while it alone writes the files beside it."""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TextIO

_held: set[tuple[int, int]] = set()
"""Device and inode of the locks of this process, which the system would give it a second time."""


class Locked(Exception):
    """The lock is held already: by another process, or by this one where `last` is None."""

    def __init__(self, last: str | None) -> None:
        super().__init__(last)
        self.last = last
        """The last holder that signed."""


class FileLock:
    """A lock that is held until `close`.

    A lock of fcntl's is its process's alone: a child that outlives a killed command keeps nobody out.
    """

    def __init__(self, path: Path) -> None:
        """Make the file and lock it. Raises Locked. On a file system without locks, nobody is kept out."""
        self._file: TextIO | None = None
        while True:
            with suppress(FileNotFoundError):
                if _inode(path.stat()) in _held:  # not opened: closing it would end the lock that is held
                    raise Locked(None)
            file = path.open("a+", encoding="utf-8")
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                with file:
                    file.seek(0)
                    raise Locked(file.read(200).strip()) from None
            except OSError:  # a file system without locks
                file.close()
                return
            with suppress(FileNotFoundError):
                if _inode(path.stat()) == (own := _inode(os.fstat(file.fileno()))):
                    self._file = file
                    _held.add(own)
                    return
            file.close()  # its last holder removed it meanwhile

    def sign(self) -> None:
        """Write this process into the file, for the message to a later one."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
            self._file.flush()

    def close(self) -> None:
        """Let others lock it; a second time does nothing."""
        if self._file is not None:
            _held.discard(_inode(os.fstat(self._file.fileno())))
            self._file.close()
            self._file = None


def _inode(file: os.stat_result) -> tuple[int, int]:
    """Name a file by its device and inode."""
    return file.st_dev, file.st_ino
