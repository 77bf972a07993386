"""Whose a folder is: a living server holds a lock on each of its own, and where nobody holds it the server is dead.
Process numbers do not tell: they are used again, and mean nothing in another container.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from pathlib import Path

PREFIX = "agentrl-sandbox-"


def claim(folder: Path) -> int | None:
    """A descriptor that holds the folder until it is closed; None where it is another's, or gone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), folder.lstat()):  # else removed before it was locked
            return fd
    os.close(fd)
    return None


def temporary_folder() -> tuple[Path, int]:
    """Make a folder for what this server keeps, and claim it. Folders of this user's dead servers are removed."""
    for other in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if other.lstat().st_uid == os.geteuid() and (fd := claim(other)) is not None:
                remove(other)
                os.close(fd)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        if (fd := claim(folder)) is not None:
            return folder, fd


def remove(folder: Path) -> None:
    """Remove the folder with all that is in it, by `rm`, which no depth of folders defeats; mounts in it stay."""
    subprocess.run(["rm", "-rf", "--one-file-system", folder], stderr=subprocess.DEVNULL)
