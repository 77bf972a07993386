"""The kinds of isolation, strongest first, and what each one promises."""

from __future__ import annotations

from enum import StrEnum


class Guarantee(StrEnum):
    """Things that a hostile program cannot do."""

    HOST_FILES = "host_files"
    """Read or write files of the host beyond the system's and Python's own, which are read-only."""
    HOST_ENVIRONMENT = "host_environment"
    NETWORK = "network"
    """Reach any socket outside its run: the Internet, the host's loopback, UNIX and abstract sockets."""
    OTHER_PROCESSES = "other_processes"
    """Signal, trace or read processes outside its run."""
    SURVIVORS = "survivors"
    """Leave a process behind."""
    KERNEL_SURFACE = "kernel_surface"
    """Make namespaces, mounts, BPF programs, io_uring; trace; load modules."""
    PROCESS_COUNT = "process_count"
    """Have more processes and threads than its limit."""
    MEMORY_TOTAL = "memory_total"
    """Use more memory than its limit, even for a moment, in however many processes."""
    DISK_TOTAL = "disk_total"
    """Write more than its limit, even for a moment, in however many files."""


class Tier(StrEnum):
    CGROUP = "namespaces+cgroup"
    NAMESPACES = "namespaces"
    LANDLOCK_UID = "landlock+uid"
    LANDLOCK = "landlock"

    @property
    def namespaces(self) -> bool:
        return self in (Tier.CGROUP, Tier.NAMESPACES)

    @property
    def as_strong_as(self) -> list[Tier]:
        """This tier and the stronger ones."""
        order = list(Tier)
        return order[: order.index(self) + 1]

    @property
    def missing(self) -> list[Guarantee]:
        """Guarantees that this tier lacks; the supervisor still watches for them, 20 times a second."""
        return [
            *([Guarantee.PROCESS_COUNT] if self is Tier.LANDLOCK else []),
            *([Guarantee.MEMORY_TOTAL] if self is not Tier.CGROUP else []),
            *([Guarantee.DISK_TOTAL] if not self.namespaces else []),
        ]

    @property
    def guarantees(self) -> list[Guarantee]:
        return [guarantee for guarantee in Guarantee if guarantee not in self.missing]
