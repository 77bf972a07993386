"""Confinement of a program's own process before the program's first instruction. Runs in the forked child, which
never returns from here.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sandbox import landlock, reseed, root, seccomp
from sandbox import syscalls as sc
from sandbox.limits import Limits
from sandbox.root import DEVICES, USER
from sandbox.tiers import Tier

_LAST_FD = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Cell:
    """Place of a program: tier, limits, folders, user and environment, from the supervisor to its child."""

    tier: Tier
    limits: Limits
    home: str
    scratch: str
    """The only folder that may be written to, in tiers without namespaces."""
    readable: list[str]
    uid: int | None
    """A user of the run's own, in the tier that has them."""
    environment: dict[str, str]
    filter: bytes


def filter_for(tier: Tier) -> bytes:
    return seccomp.build(
        sc.machine(),
        network=tier.namespaces,
        uncounted_memory=tier is Tier.CGROUP,
        process_groups=tier.namespaces,
    )


def enter(
    cell: Cell, standard: tuple[int, int, int], kept: dict[int, int], report: int, program: Callable[[], int]
) -> None:
    """Confine the calling process and let it be `program`. Never returns.

    `standard` becomes its stdin, stdout and stderr, `kept` (number in the program: number now) what else it may have
    open. Whatever fails before the program starts is written to `report`, which is closed when it starts.
    """
    code = 1
    try:
        try:
            _arrange_fds([*standard], kept, report)
            report = 3 + len(kept)
            _give_up(cell)
        except BaseException as error:
            os.write(report, f"{type(error).__name__}: {error}".encode()[:4000])
            os._exit(1)
        code = program()
    finally:
        os._exit(code)


def exec_program(argv: list[str], environment: dict[str, str], report: int) -> int:
    """Replace the process by `argv`. What goes wrong is written to `report`, which the new program does not inherit."""
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(report, f"{argv[0]}: {error.strerror}".encode())
    return 127


def _arrange_fds(standard: list[int], kept: dict[int, int], report: int) -> None:
    """0, 1, 2, then `kept` from 3 on, then `report` (these are not inherited by exec), and nothing else."""
    wanted = [*standard, *(kept[number] for number in sorted(kept)), report]
    high = [os.dup(fd) for fd in wanted]
    while min(high) < len(wanted):  # room below for all
        high = [os.dup(fd) for fd in high]
    for place, fd in enumerate(high):
        os.dup2(fd, place, inheritable=place < len(standard))
    os.closerange(len(wanted), min(_LAST_FD, os.sysconf("SC_OPEN_MAX")))


def _give_up(cell: Cell) -> None:
    os.setsid()
    Path("/proc/self/oom_score_adj").write_text("1000")
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if cell.tier.namespaces:
        # Its own user namespace, so that it owns none of those around it and its processes are counted by themselves.
        sc.unshare(sc.CLONE_NEWUSER)
        sc.map_own_ids(USER, USER, USER)
    elif cell.uid is not None:
        sc.drop_bounding_set()
        os.setgroups([])
        os.setresgid(cell.uid, cell.uid, cell.uid)
        os.setresuid(cell.uid, cell.uid, cell.uid)
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)  # was cleared by the change of user
    os.chdir(cell.home)
    os.umask(0o022)
    for number in range(1, signal.NSIG):
        if number not in (signal.SIGKILL, signal.SIGSTOP) and number not in (32, 33):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _set_resource_limits(cell)
    if cell.tier.namespaces:
        sc.drop_capabilities()
    sc.prctl(sc.PR_SET_NO_NEW_PRIVS, 1)
    if not cell.tier.namespaces:
        landlock.restrict(cell.readable, [cell.scratch], DEVICES, tcp=False)
    elif (
        landlock.abi()
    ):  # over the namespaces, which stand without it; it also closes the files in /proc/self that can be written
        landlock.restrict(["/"], [root.HOME, "/tmp", "/dev/shm"], DEVICES, tcp=True)
    seccomp.install(cell.filter)


def _set_resource_limits(cell: Cell) -> None:
    limits = cell.limits
    seconds = math.ceil(limits.cpu_seconds)
    wanted = {
        resource.RLIMIT_CPU: (seconds, seconds + 1),
        resource.RLIMIT_FSIZE: (limits.file_bytes, limits.file_bytes),
        resource.RLIMIT_NOFILE: (limits.open_files, limits.open_files),
        resource.RLIMIT_NPROC: (limits.processes, limits.processes),
        resource.RLIMIT_CORE: (1, 1),  # 0 would still start the host's handler of core dumps, if it has one: core(5)
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (1 << 19, 1 << 19),
        resource.RLIMIT_SIGPENDING: (1024, 1024),
    }
    if cell.tier is not Tier.CGROUP:
        wanted[resource.RLIMIT_DATA] = (limits.memory_bytes + _data_now(),) * 2
    if cell.tier is Tier.LANDLOCK:
        there = _processes_of_user(os.getuid())
        wanted[resource.RLIMIT_NPROC] = (there + limits.processes,) * 2
    for kind, values in wanted.items():
        _, hard = resource.getrlimit(kind)
        ceiling = max(values) if hard == resource.RLIM_INFINITY else hard
        resource.setrlimit(kind, (min(values[0], ceiling), min(values[1], ceiling)))


def _data_now() -> int:
    """Bytes of private memory that the interpreter itself came with."""
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def _processes_of_user(uid: int) -> int:
    """Processes and threads of a user, as RLIMIT_NPROC counts them."""
    count = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid == uid:
                count += sum(1 for _ in (folder / "task").iterdir())
        except OSError:
            continue
    return count


def python_starts(environment: dict[str, str], report: int, home: str) -> None:
    """Give a warm interpreter what a newly started one would have. Closes `report`."""
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.__dict__.update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.path[:] = [home, *(path for path in sys.path if os.path.exists(path))]
    for name in [name for name in sys.modules if name == "sandbox" or name.startswith("sandbox.")]:
        del sys.modules[name]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    reseed.seed()
    os.close(report)
