"""Names of containers say which process owns them, so that the next start finds what a killed run left."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

PREFIX = "agentrl"


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
    """Return the start time of a process, in ticks since the machine's; None where there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def new_name() -> str:
    """Make a name for a container of this process."""
    mine = (PREFIX, machine(), boot(), str(os.getpid()), str(started(os.getpid())))
    return "-".join((*mine, secrets.token_hex(4)))


def is_left(name: str) -> bool:
    """Say whether a container is of a process of this machine that has ended. Numbers of processes come again."""
    parts = name.split("-")
    if len(parts) != 6 or parts[:2] != [PREFIX, machine()] or not parts[3].isdecimal():
        return False
    return parts[2] != boot() or started(int(parts[3])) != parts[4]
