"""Names of containers and of temporary folders say which process owns them.

So the next start finds the remains of a killed run, and leaves alone all that another run uses. A name has six parts: a
prefix, the machine, the time when it started, the process, the time when that started, and something random.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "agentrl"
PROCESSES = Path("/proc")
"""Folder of the processes, where the system has one."""


def machine() -> str:
    """Name this machine and its table of processes: a command line may lead to a daemon of several machines."""
    known = [socket.gethostname()]
    with suppress(OSError):
        known += [Path("/etc/machine-id").read_text(), str(Path("/proc/self/ns/pid").readlink())]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]


def boot() -> str:
    """Name this start of the machine."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return "0"


def started(process: int) -> str | None:
    """Return the start time of a process, in ticks since the machine's; None where there is no such process.

    A system without /proc has the time 0 for every live process: a number that came again looks live there.
    """
    with suppress(OSError):
        if PROCESSES.is_dir():
            return (PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()[19]
        with suppress(PermissionError):
            os.kill(process, 0)
        return "0"
    return None


def _beginning() -> str:
    return "-".join((PREFIX, machine(), boot(), str(os.getpid()), str(started(os.getpid())), ""))


def new_name() -> str:
    """Make a name for a container of this process."""
    return _beginning() + secrets.token_hex(4)


def new_folder() -> Path:
    """Make a folder of this process in the temporary folder, which no other user can enter."""
    return Path(tempfile.mkdtemp(prefix=_beginning()))


@contextmanager
def own_folder() -> Iterator[Path]:
    """Yield a folder of this process, and remove it at the end of the block."""
    folder = new_folder()
    try:
        yield folder
    finally:
        remove(folder)


def is_left(name: str) -> bool:
    """Say whether a name is of a process of this machine that has ended. Numbers of processes come again."""
    parts = name.split("-")
    if len(parts) != 6 or parts[:2] != [PREFIX, machine()] or not parts[3].isdecimal():
        return False
    return parts[2] != boot() or started(int(parts[3])) != parts[4]


def remove_left_folders() -> None:
    """Remove what processes that have ended left in the temporary folder; what other users put there stays."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}-{machine()}-*"):
        with suppress(OSError):
            if is_left(path.name) and path.lstat().st_uid == os.geteuid():
                remove(path)


def remove(path: Path) -> None:
    """Remove a folder, also where a program has locked folders in it, or a file. A link is not followed.

    What cannot be removed stays. A folder in it is moved to the top, and emptied there: a program may leave more of
    them, one in the other, than a path or a recursion can have.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    waiting, emptied, own = [path], list[Path](), secrets.token_hex(6)
    while waiting:
        folder = waiting.pop()
        emptied.append(folder)
        with suppress(OSError):
            folder.chmod(0o700)
            for each in list(folder.iterdir()):
                waiting += _removed(each, path / f"{own}-{len(waiting) + len(emptied)}")
    for folder in reversed(emptied):
        with suppress(OSError):
            folder.rmdir()


def _removed(path: Path, place: Path) -> list[Path]:
    """Remove a file or link; move a folder to a free place. Gives where the folder is."""
    is_folder = path.is_dir() and not path.is_symlink()
    try:
        if not is_folder:
            path.unlink()
            return []
        path.chmod(0o700)  # Else another user than root could not move it.
        return [path.rename(place)]
    except OSError:
        return [path] * is_folder
