"""Which tier this machine holds: every promise of a tier is attacked before the first program of anyone else runs.

A tier is taken only if each of its guarantees withstood its attack. The configured level is never lowered: where only a
weaker tier stands, the server does not start, and the error names what failed and what to change.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sandbox.launch import SandboxFault
from sandbox.limits import MIB, Limits
from sandbox.pool import Command, Job, Outcome, Pool
from sandbox.tiers import Guarantee, Tier

FIXES = {
    Tier.CGROUP: "let the server write to a memory and a pids control group (as root, or in a delegated cgroup)",
    Tier.NAMESPACES: "allow user namespaces: sysctl user.max_user_namespaces above 0, "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; "
    "in a container, a seccomp profile that allows unshare, and an unmasked /proc",
    Tier.LANDLOCK_UID: "run the server as root (CAP_SETUID, CAP_KILL) on Linux 6.12 or later with Landlock",
    Tier.LANDLOCK: "Linux 6.12 or later with Landlock",
}


class NotIsolated(Exception):
    """No tier of the configured level stands on this machine."""


@dataclass(frozen=True, slots=True)
class Found:
    """The tier in use, and why not a stronger one."""

    pool: Pool
    refused: dict[Tier, str]

    def describe(self) -> str:
        tier = self.pool.tier
        lines = [f"sandbox: isolation {tier}, attacked at start and held: {', '.join(tier.guarantees)}"]
        if tier.missing:
            lines.append(f"sandbox: NOT guaranteed: {', '.join(tier.missing)}")
        lines += [f"sandbox: not {other}: {why}; to have it: {FIXES[other]}" for other, why in self.refused.items()]
        return "\n".join(lines)


async def choose(require: Tier, expose: Sequence[str] = (), only: Tier | None = None) -> Found:
    """The strongest tier that stands, started; or `only`. Raises NotIsolated if it is weaker than `require`."""
    refused: dict[Tier, str] = {}
    for tier in [only] if only else require.as_strong_as:
        if tier not in require.as_strong_as:
            raise NotIsolated(f"tier {tier} is weaker than the required {require}")
        pool = Pool(tier, expose)
        try:
            await pool.start()
        except SandboxFault as fault:
            refused[tier] = str(fault)
            continue
        why = await _tried(_usable, pool)
        if not why:
            fallen = await attack(pool)
            why = "; ".join(f"{guarantee} fell: {how}" for guarantee, how in fallen.items())
        if not why:
            return Found(pool, refused)
        await pool.stop()
        refused[tier] = why
    reasons = "\n".join(f"- {tier}: {why}\n  To have it: {FIXES[tier]}." for tier, why in refused.items())
    raise NotIsolated(f"this machine does not hold isolation of level {require}:\n{reasons}")


async def attack(pool: Pool) -> dict[Guarantee, str]:
    """Attack each guarantee of the pool's tier; those that fell, and how."""
    attacks: dict[Guarantee, Callable[[Pool], Awaitable[str]]] = {
        Guarantee.HOST_FILES: _host_files,
        Guarantee.HOST_ENVIRONMENT: _host_environment,
        Guarantee.NETWORK: _network,
        Guarantee.OTHER_PROCESSES: _other_processes,
        Guarantee.KERNEL_SURFACE: _kernel_surface,
        Guarantee.PROCESS_COUNT: _process_count,
        Guarantee.MEMORY_TOTAL: _memory_total,
        Guarantee.DISK_TOTAL: _disk_total,
    }
    wanted = [guarantee for guarantee in pool.tier.guarantees if guarantee in attacks]
    results = await asyncio.gather(*(_tried(attacks[guarantee], pool) for guarantee in wanted))
    results.append(await _tried(_survivors, pool))  # counts processes: alone
    fallen = dict(zip([*wanted, Guarantee.SURVIVORS], results, strict=True))
    return {guarantee: how for guarantee, how in fallen.items() if how}


async def _tried(attack: Callable[[Pool], Awaitable[str]], pool: Pool) -> str:
    try:
        return await attack(pool)
    except (SandboxFault, TimeoutError) as fault:
        return f"the probe itself failed: {fault}"


async def _python(pool: Pool, program: str, limits: Limits | None = None) -> Outcome:
    job = Job([Command(None, 5.0)], {"main.py": program.encode()})
    return await pool.run(job, limits or Limits(wall_seconds=5.0))


async def _says_held(pool: Pool, program: str, limits: Limits | None = None) -> str:
    """The program prints what it got away with, then `held` as its last line."""
    ended = (await _python(pool, program, limits)).commands[0]
    said = ended.stdout.decode(errors="replace").split("\n")
    if said == ["held", ""]:
        return ""
    return (
        f"{' '.join(said)[:300]} {ended.stderr.decode(errors='replace')[-300:]}".strip()
        or ended.error
        or f"status {ended.code}"
    )


async def _usable(pool: Pool) -> str:
    program = "import subprocess, sys, wave\nsubprocess.run([sys.executable, '-c', ''], check=True)\nprint('held')\n"
    fell = await _says_held(pool, program)
    folders = ", ".join(sorted({sys.prefix, sys.base_prefix}))
    return fell and f"programs cannot use the Python in {folders}, which every user must be able to read: {fell}"


async def _host_files(pool: Pool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        secret = Path(folder, "secret")
        secret.write_text("secret")
        os.chmod(secret, 0o666)
        program = (
            "import os\n"
            f"new, secret = {folder + '/new'!r}, {str(secret)!r}\n"
            "create = os.O_CREAT | os.O_WRONLY\n"
            "for path, flags in [(secret, os.O_RDWR), (new, create), ('/etc/shadow', 0), ('/proc/1/environ', 0),\n"
            "                    ('/proc/sys/kernel/core_pattern', os.O_WRONLY), ('/usr/bin/planted', create)]:\n"
            "    try: os.open(path, flags); print('opened', path)\n"
            "    except OSError: pass\n"
            "print('held')\n"
        )
        return await _says_held(pool, program)


async def _host_environment(pool: Pool) -> str:
    inherited = [name for name in os.environ if name not in ("PATH", "HOME", "LANG", "TMPDIR", *_OURS)]
    program = (
        "import os\n"
        f"found = [name for name in {inherited!r} if name in os.environ]\n"
        f"try: found.append(open('/proc/{os.getpid()}/environ').read(9))\n"
        "except OSError: pass\n"
        "print(found) if found else None\n"
        "print('held')\n"
    )
    return await _says_held(pool, program)


_OURS = ("PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MPLBACKEND")


async def _network(pool: Pool) -> str:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as open_:
        os.chmod(folder, 0o777)
        listeners = {}
        for name, family, address in (
            ("loopback", socket.AF_INET, ("127.0.0.1", 0)),
            ("unix", socket.AF_UNIX, f"{folder}/socket"),
            ("abstract", socket.AF_UNIX, f"\0agentrl-probe-{os.getpid()}"),
        ):
            listener = open_.enter_context(socket.socket(family))
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            listeners[name] = listener
        os.chmod(f"{folder}/socket", 0o777)
        targets = [(int(each.family), each.getsockname()) for each in listeners.values()]
        program = (
            "import socket\n"
            f"for family, address in {targets!r}:\n"
            "    try: socket.socket(family).connect(address); print('reached', address)\n"
            "    except OSError: pass\n"
            "try: socket.socket(40, 1); print('vsock')\n"
            "except OSError: pass\n"
            "print('held')\n"
        )
        fell = await _says_held(pool, program)
        for name, listener in listeners.items():
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                fell += f" {name} was reached"
        return fell


async def _other_processes(pool: Pool) -> str:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]) as victim:
        pids = [victim.pid, os.getpid()]
        program = (
            "import os, resource\n"
            f"for pid in {pids!r}:\n"
            "    for attempt in (lambda: os.kill(pid, 0), lambda: open(f'/proc/{pid}/cmdline'),\n"
            "                    lambda: resource.prlimit(pid, 7)):\n"
            "        try: attempt(); print('reached', pid)\n"
            "        except OSError: pass\n"
            f"try: os.kill({victim.pid}, 9)\n"
            "except OSError: pass\n"
            "print('held')\n"
        )
        fell = await _says_held(pool, program)
        if victim.poll() is not None:
            fell += " a process of the server's user was killed"
        victim.kill()
        return fell


async def _kernel_surface(pool: Pool) -> str:
    program = (
        "import ctypes, os, platform\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "calls = {'unshare': lambda: libc.unshare(0x10000000), 'ptrace': lambda: libc.ptrace(0, 0, 0, 0),\n"
        "    'mount': lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, None),\n"
        "    'io_uring': lambda: libc.syscall(425, 1, ctypes.create_string_buffer(256)),\n"
        "    'fsopen': lambda: libc.syscall(430, b'tmpfs', 0), 'clone newuser': lambda: libc.syscall(\n"
        "        {'x86_64': 56, 'aarch64': 220}[platform.machine()], 0x10000011, 0, 0, 0, 0)}\n"
        "for name, call in calls.items():\n"
        "    result = call()\n"
        "    if result == 0 and name.startswith('clone'): os._exit(0)\n"
        "    if result >= 0: print('allowed', name)\n"
        "print('held')\n"
    )
    return await _says_held(pool, program)


async def _process_count(pool: Pool) -> str:
    program = (
        "import os, signal, time\n"
        "made = 0\n"
        "try:\n"
        "    while made < 100:\n"
        "        if os.fork() == 0: time.sleep(10); os._exit(0)\n"
        "        made += 1\n"
        "except OSError: pass\n"
        "print('held' if made <= 16 else f'{made} processes', flush=True)\n"
    )
    return await _says_held(pool, program, Limits(processes=16))


async def _memory_total(pool: Pool) -> str:
    program = (
        "import os, time\n"
        "for _ in range(4):\n"
        "    if os.fork() == 0: block = bytearray(os.urandom(1)) * (40 << 20); time.sleep(0.5); os._exit(0)\n"
        "print([os.wait()[1] for _ in range(4)])\n"
    )
    ended = (await _python(pool, program, Limits(memory_bytes=96 * MIB))).commands[0]
    return ended.stdout.decode() if ended.stdout == b"[0, 0, 0, 0]\n" else ""


async def _disk_total(pool: Pool) -> str:
    program = (
        "import os\n"
        "written = 0\n"
        "try:\n"
        "    for n in range(8):\n"
        "        for folder in ('.', '/tmp', '/dev/shm'):\n"
        "            written += open(f'{folder}/{n}', 'wb', 0).write(bytes(1 << 20))\n"
        "except OSError: pass\n"
        "print('held' if written <= 4 << 20 else f'{written} bytes written')\n"
    )
    return await _says_held(pool, program, Limits(disk_bytes=4 * MIB))


async def _survivors(pool: Pool) -> str:
    before = descendants(os.getpid())
    program = (
        "import os, signal, time\n"
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "for _ in range(3):\n"
        "    if os.fork() == 0:\n"
        "        try: os.setsid()\n"
        "        except OSError: pass\n"
        "        if os.fork(): os._exit(0)\n"
        "        for fd in range(3): os.close(fd)\n"
        "        time.sleep(60)\n"
        "print('held')\n"
    )
    fell = await _says_held(pool, program)
    for _ in range(50):
        left = descendants(os.getpid()) - before
        if not left:
            return fell
        await asyncio.sleep(0.02)
    return f"{fell} {len(left)} processes are left"


def descendants(pid: int) -> set[int]:
    """Processes below `pid`, at any depth, the dead that nobody has waited for among them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
