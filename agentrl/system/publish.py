"""Files that a kill leaves whole.

A file that appears whole or not at all is written next to its place, flushed to the disk, then renamed into it; another
is only appended to.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from agentrl.errors import TrainingError


@contextmanager
def published(path: Path) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` when the block ends.

    When the block raises, or the process is killed, an older file at `path` stays. Raises TrainingError on a full disk.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        flush_to_disk(temporary)
        temporary.replace(path)
        flush_to_disk(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path) from error
        raise


@contextmanager
def published_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory to fill, which replaces the directory `path` when the block ends.

    When the block raises, an older directory stays. A kill leaves one of the two whole, or neither at `path`, never a
    part. Raises TrainingError on a full disk.
    """
    partial, older = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.rglob("*"):
            flush_to_disk(file)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if is_disk_full(error):
            raise disk_full(path) from error
        raise
    remove(older)  # of a process that was killed
    if path.is_symlink() or path.exists():
        path.rename(older)
    partial.rename(path)
    flush_to_disk(path.parent)
    with suppress(OSError):  # somebody may read it still; the next time tries again
        remove(older)


def remove(path: Path) -> None:
    """Remove a folder or a file, if there is one; of a link, which somebody put there, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class AppendedFile:
    """File that is appended to without a buffer, and that another process sees at once. Usable in a `with` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("ab", buffering=0)
        self.size = self._file.seek(0, os.SEEK_END)
        """Bytes in it."""

    def append(self, data: bytes, *, fsync: bool) -> int:
        """Append, all or nothing; return the size before. Raises TrainingError on a full disk.

        `fsync`: when it returns, the data are on the disk, and a file that is new has its name there.
        """
        before = self.size
        try:
            done = 0
            while done < len(data):
                done += self._file.write(data[done:])
            if fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._file.truncate(before)
            if is_disk_full(error):
                raise disk_full(self.path) from error
            raise
        self.size += len(data)
        if fsync and before == 0:
            flush_to_disk(self.path.parent)
        return before

    def close(self) -> None:
        """Close it; a second time does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def flush_to_disk(path: Path) -> None:
    """Call fsync on a file or a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(error: BaseException) -> bool:
    """Check whether an exception means a full disk.

    Libraries that write in native code raise types of their own, with the system's text.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return os.strerror(errno.ENOSPC) in str(error) or os.strerror(errno.EDQUOT) in str(error)


def disk_full(path: Path) -> TrainingError:
    """Make the error to raise when `path` could not be written."""
    free = shutil.disk_usage(path.parent).free
    return TrainingError(
        f"the disk is full: {path} could not be written ({free:,} bytes free there). What was written before is "
        "intact. Make room and start again: the run goes on from its last checkpoint"
    )
