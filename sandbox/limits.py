"""Limits of a run, and the names under which going beyond is reported."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

MIB = 1 << 20
MAX_FETCHED = 64 * MIB
"""Bytes of all fetched files of a request together."""


class Limit(StrEnum):
    """A limit that a run reached."""

    WALL_TIME = "wall_time"
    CPU_TIME = "cpu_time"
    MEMORY = "memory"
    PROCESSES = "processes"
    OPEN_FILES = "open_files"
    FILE_SIZE = "file_size"
    DISK = "disk"
    INODES = "inodes"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. Times in seconds, sizes in bytes; of all processes of the run together, unless it says
    otherwise.
    """

    wall_seconds: float = 10.0
    """Wall-clock seconds of each command (a compiler, then the program)."""
    cpu_seconds: float = 20.0
    memory_bytes: int = 512 * MIB
    processes: int = 64
    """Number of processes; threads count too."""
    open_files: int = 256
    """Open files of each process."""
    file_bytes: int = 64 * MIB
    """Bytes of each file."""
    disk_bytes: int = 128 * MIB
    inodes: int = 4096
    output_bytes: int = MIB
    """Bytes kept of each of stdout and stderr; the rest is read and dropped, up to `flood_bytes`."""
    flood_bytes: int = 256 * MIB
    """Bytes written to one stream in all, after which the run is killed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Limits:
        return cls(**values)
