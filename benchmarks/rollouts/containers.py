"""CPU-seconds of a session's two containers against the same work as plain processes, and memory of 64 at once.

    python -m benchmarks.rollouts.containers [--sessions 24] [--at-once 64] [--command-line podman,--runtime,runc]

Needs root, podman (or docker) and runc. The image is a folder of empty folders, into which this machine's programs are
mounted, so nothing is downloaded. A session starts a container, lays a file in, runs a program that prints a word,
takes the files out, and runs a check in a second container. Its CPU-seconds are those of this process and of all that
it started, conmon, runc and the container's processes among them, as all orphans come back to this process. With a
pool a session finds its first container started; it waits less, and takes the same CPU-seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from agentrl.containers.command_line import CommandLine
from agentrl.containers.contract import ContainerOptions, Spec
from agentrl.containers.files import pack
from agentrl.containers.pool import Pool

BORROWED = ("usr", "lib", "lib64", "bin", "sbin")
EMPTY = ("etc", "proc", "dev", "sys", "tmp", "run", "work", "var", "var/tmp")
SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of prctl(2)."""
ECHO = ["sh", "-c", "echo word; echo 5 >answer.txt"]
CHECK = ["grep", "-qx", "5", "answer.txt"]
PORTS = (8011,)
WATCHERS = ("conmon", "containerd-shim")
LIMIT, HELD = 64, 40
"""MiB that a container of the second part may take, and that its program holds."""
HOLDS = f"held = b'x' * ({HELD} << 20); print('holds', flush=True); import time; time.sleep(3600)"

Session = Callable[[Path], Awaitable[float]]
"""Function of an empty folder that runs one session, and returns the seconds that it waited for its first place."""


def make_root(folder: Path) -> None:
    """Make a root of empty folders, and the files that podman makes, but not in a root of other numbers."""
    for name in (*BORROWED, *EMPTY):
        (folder / name).mkdir()
    for name in ("hostname", "hosts", "resolv.conf", "passwd", "group"):
        (folder / "etc" / name).touch()
    folder.chmod(0o755)


def mounts() -> list[str]:
    """Return the words that mount this machine's programs."""
    there = [name for name in BORROWED if Path("/", name).exists()]
    return [word for name in there for word in ("--volume", f"/{name}:/{name}:ro")]


def spent() -> float:
    """Return the CPU-seconds of this process and of its ended children."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def reap() -> None:
    """Wait for the orphans that came to this process: what the command line left behind to watch containers."""
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.name() in WATCHERS:
                os.waitpid(child.pid, 0)


async def in_processes(folder: Path) -> float:
    """Run program and check as plain processes of this machine."""
    for words in (ECHO, CHECK):
        process = await asyncio.create_subprocess_exec(*words, cwd=folder, stdout=asyncio.subprocess.PIPE)
        await process.communicate()
        assert process.returncode == 0
    return 0.0


def in_containers(line: CommandLine, pool: Pool, spec: Spec) -> Session:
    """Make the session of two containers."""

    async def ran(folder: Path, words: list[str], ports: tuple[int, ...], taken: Path | None) -> float:
        begun = time.monotonic()
        container, _ = await pool.take(Spec(spec.image, spec.options, spec.folder, ports))
        waited = time.monotonic() - begun
        try:
            (archive := folder.with_suffix(".tar")).unlink(missing_ok=True)
            pack(archive, {"/tmp/work": folder}, spec.options.ids)
            await container.prepare("tar -xf - -C /", archive)
            process = await container.run(words, {}, "/tmp/work", secret=f"benchmark-{folder.name}", most=1 << 20)
            process.give(b"")
            await process.ended()
            assert process.status == 0, process.status
            await container.settle()
            if taken is not None:
                await container.take("/tmp/work", taken, 1 << 20)
        finally:
            await container.stop()
        return waited

    async def session(folder: Path) -> float:
        waited = await ran(folder, ECHO, PORTS, folder.with_suffix(".taken"))
        (folder / "answer.txt").write_text("5\n")  # as the check lays what was taken
        await ran(folder, CHECK, (), None)
        return waited

    return session


async def measured(session: Session, sessions: int, pause: float) -> tuple[float, float, float]:
    """Run sessions one after another. Returns medians by session of CPU-seconds, seconds, and seconds waited.

    pause: seconds between sessions, in which a pool fills again; they do not count.
    """
    cpu, clock, waits = [], [], []
    with tempfile.TemporaryDirectory() as name:
        for number in range(sessions):
            await asyncio.sleep(pause)
            (folder := Path(name, f"session{number:04d}")).mkdir(mode=0o777)
            begun, at = time.monotonic(), spent()
            waits.append(await session(folder))
            clock.append(time.monotonic() - begun)
            cpu.append(spent() - at)
    return statistics.median(cpu), statistics.median(clock), statistics.median(waits)


@contextmanager
def counted(sessions: int) -> Iterator[list[float]]:
    """Count the CPU-seconds by session of all that is started within, orphans included."""
    reap()
    begun, found = spent(), list[float]()
    yield found
    reap()
    found.append((spent() - begun) / sessions)


def starts(line_words: list[str], arguments: list[str], root: Path, sessions: int) -> None:
    """Print the cost of sessions in containers, with and without a pool, against plain processes."""
    options = ContainerOptions(command_line=line_words, arguments=arguments, image=str(root), memory_megabytes=256)
    spec = Spec(str(root), options, "/tmp", PORTS)

    async def of_containers(size: int) -> tuple[float, float, float]:
        line = CommandLine()
        await line.open(options)
        pool = Pool(line, spec, size)
        found = await measured(in_containers(line, pool, spec), sessions, 2.0 if size else 0.0)
        await pool.close()
        await line.close()
        return found

    print(f"{sessions} sessions, one after another; medians")
    with counted(sessions) as plain:
        _, clock, _ = asyncio.run(measured(in_processes, sessions, 0.0))
    print(f"plain processes: {plain[0]:.3f} CPU-s, {clock:.2f} s")
    for name, size in (("by trajectory", 0), ("pool of 2", 2)):
        with counted(sessions) as each:
            _, clock, waited = asyncio.run(of_containers(size))
        print(
            f"containers, {name}: {each[0]:.2f} CPU-s ({each[0] - plain[0]:.2f} more), {clock:.2f} s, of which "
            f"{waited:.2f} s for the first container"
        )


def at_once(line_words: list[str], arguments: list[str], root: Path, number: int) -> None:
    """Print the memory that so many containers take, whose programs hold memory, against their limits."""
    options = ContainerOptions(command_line=line_words, arguments=arguments, image=str(root), memory_megabytes=LIMIT)
    spec = Spec(str(root), options, "/tmp", PORTS)

    async def run() -> None:
        line = CommandLine()
        await line.open(options)
        pool = Pool(line, None, 0)
        before, begun = psutil.virtual_memory().available, time.monotonic()
        taken = [container for container, _ in await asyncio.gather(*[pool.take(spec) for _ in range(number)])]
        started = time.monotonic() - begun
        try:
            words = ["python3", "-S", "-c", HOLDS]
            running = [await one.run(words, {}, "/tmp", secret=f"benchmark-{one.name}", most=1 << 10) for one in taken]
            while any(b"holds" not in one.tails[1] for one in running):
                assert all(one.status is None for one in running), "a program has ended"
                await asyncio.sleep(0.1)
            grown = (before - psutil.virtual_memory().available) / (1 << 20)
        finally:
            begun = time.monotonic()
            await asyncio.gather(*[one.stop() for one in taken])
            await pool.close()
            await line.close()
        said = number * LIMIT
        print(
            f"{number} containers at once, of at most {LIMIT} MiB, whose programs hold {HELD} MiB: started in "
            f"{started:.1f} s, {grown:,.0f} MiB of memory, {grown / said:.2f} of the {said:,} MiB that limits allow; "
            f"{grown / number - HELD:.1f} MiB a container above what its program holds; "
            f"removed in {time.monotonic() - begun:.1f} s"
        )

    asyncio.run(run())


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=24, help="sessions of the first part")
    parser.add_argument("--at-once", type=int, default=64, help="containers of the second part")
    parser.add_argument("--command-line", default="podman,--runtime,runc", help="words of the command line, by commas")
    given = parser.parse_args()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    line = given.command_line.split(",")
    with tempfile.TemporaryDirectory() as name:
        make_root(Path(name))
        starts(line, mounts(), Path(name), given.sessions)
        at_once(line, mounts(), Path(name), given.at_once)


if __name__ == "__main__":
    main()
