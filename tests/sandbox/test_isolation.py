"""The probe sees what is weak, the required level is kept, nothing outlives a server, the filter does what it says."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import probe, seccomp
from sandbox.launch import SandboxFault
from sandbox.limits import Limits
from sandbox.pool import Command, Job, Pool
from sandbox.tiers import Guarantee, Tier
from tests.naming import naming
from tests.sandbox.servers import PROJECT, can_run_as_nobody, running
from tests.waiting import until, wait_for


async def best() -> Pool:
    """The strongest pool that starts; whether it holds is not asked."""
    for tier in Tier:
        pool = Pool(tier)
        try:
            await pool.start()
        except SandboxFault:
            continue
        return pool
    raise AssertionError("no tier starts here")


async def test_the_probe_sees_a_tier_that_does_not_hold_what_it_promises() -> None:
    pool = Pool(Tier.CGROUP)
    try:
        await pool.start()
    except SandboxFault as fault:
        pytest.skip(str(fault))
    try:
        assert await probe.attack(pool) == {}
        groups, pool.groups = pool.groups, None  # runs that are in no control group
        assert set(await probe.attack(pool)) == {Guarantee.MEMORY_TOTAL}
        pool.groups = groups
    finally:
        await pool.stop()


@pytest.mark.parametrize("tier", [Tier.CGROUP, Tier.NAMESPACES])
async def test_what_may_be_read_inside_tmp_is_there_beside_the_runs_own_tmp(tier: Tier, tmp_path: Path) -> None:
    """So a Python in /tmp can be used."""
    tmp_path.chmod(0o755)
    (tmp_path / "file").write_text("shown")
    beside = tmp_path.with_name(f"{tmp_path.name} beside")
    beside.mkdir()
    code = f"""
import os
print(open("{tmp_path}/file").read(), os.path.exists("{beside}"))
open("/tmp/own", "w").close()
try:
    open("{tmp_path}/file", "w")
except OSError as error:
    print(error.strerror)
"""
    pool = Pool(tier, [str(tmp_path)])
    try:
        await pool.start()
    except SandboxFault as fault:
        pytest.skip(str(fault))
    try:
        outcome = await pool.run(Job([Command(None, 20.0)], {"main.py": code.encode()}), Limits())
    finally:
        await pool.stop()
    assert outcome.commands[0].stdout.decode() == "shown False\nRead-only file system\n", outcome.commands[0].stderr


async def test_the_level_that_is_required_is_never_lowered() -> None:
    with naming(probe.NotIsolated, "weaker"):
        await probe.choose(Tier.NAMESPACES, only=Tier.LANDLOCK)


@pytest.mark.skipif(not can_run_as_nobody(), reason="needs root, to become nobody")
def test_a_server_that_cannot_hold_its_level_does_not_start_and_says_what_to_do() -> None:
    with pytest.raises(RuntimeError) as error, running("landlock+uid", nobody=True):
        pass
    for words in ("only root can give each run a user of its own", "To have it: run the server as root", "--require"):
        assert words in str(error.value)


async def test_a_run_that_is_cancelled_leaves_nothing() -> None:
    pool = await best()
    try:
        before = probe.descendants(os.getpid())
        job = Job([Command(None, 60.0)], {"main.py": b"import os\nos.fork(); os.fork()\nwhile True: pass"})
        task = asyncio.create_task(pool.run(job, Limits()))
        await until(lambda: len(probe.descendants(os.getpid()) - before) >= 4)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not probe.descendants(os.getpid()) - before)
        assert pool.running == 0
    finally:
        await pool.stop()
    assert [name for name in os.listdir("/tmp") if name.startswith(f"agentrl-sandbox-{os.getpid()}-")] == []


async def test_a_zygote_that_dies_is_started_anew() -> None:
    pool = await best()
    try:
        process = pool.zygotes[""]._process
        assert process is not None
        process.kill()
        process.wait()
        job = Job([Command(None, 5.0)], {"main.py": b"print(1)"})
        assert (await pool.run(job, Limits())).commands[0].stdout == b"1\n"
        assert pool.zygotes[""].starts == 2
    finally:
        await pool.stop()


def test_nothing_outlives_a_server_that_is_killed() -> None:
    program = (
        "import asyncio, os, signal, sys\n"
        "from sandbox import probe\n"
        "from tests.sandbox.test_isolation import best\n"
        "from sandbox.limits import Limits\n"
        "from sandbox.pool import Command, Job\n"
        "async def main():\n"
        "    pool = await best()\n"
        "    code = b'import os\\nif os.fork(): os.fork()\\nimport time; time.sleep(600)'\n"
        "    task = asyncio.create_task(pool.run(Job([Command(None, 600.0)], {'main.py': code}), Limits()))\n"
        "    while len(probe.descendants(os.getpid())) < 5:\n"
        "        await asyncio.sleep(0.02)\n"
        "    print(*probe.descendants(os.getpid()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert len(pids) >= 5, ended.stderr
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
@pytest.mark.parametrize("open_", [True, False])
def test_the_filter_decides_as_the_kernel_would_run_it(arch: str, open_: bool) -> None:
    program = seccomp.build(arch, network=open_, uncounted_memory=open_, process_groups=open_)
    steps = [struct.unpack_from("HBBI", program, at) for at in range(0, len(program), 8)]
    audit = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}[arch]
    numbers = {
        "x86_64": {
            "read": 0,
            "clone": 56,
            "socket": 41,
            "ptrace": 101,
            "setsid": 112,
            "prlimit64": 302,
            "setrlimit": 160,
            "memfd_create": 319,
            "inotify_init1": 294,
            "io_setup": 206,
            "sendmsg": 46,
            "setsockopt": 54,
            "fcntl": 72,
        },
        "aarch64": {
            "read": 63,
            "clone": 220,
            "socket": 198,
            "ptrace": 117,
            "setsid": 157,
            "prlimit64": 261,
            "setrlimit": 164,
            "memfd_create": 279,
            "inotify_init1": 26,
            "io_setup": 0,
            "sendmsg": 211,
            "setsockopt": 208,
            "fcntl": 25,
        },
    }[arch]
    allow, kill, eperm, eacces, enosys = 0x7FFF_0000, 0x8000_0000, 0x5_0001, 0x5_000D, 0x5_0026

    def run(number: int, *arguments: int, of: int = audit) -> int:
        data = struct.pack("IIQ6Q", number, of, 0, *arguments, *[0] * (6 - len(arguments)))
        at = accumulator = 0
        while True:
            code, if_true, if_false, value = steps[at]
            at += 1
            if code == 0x20:
                accumulator = struct.unpack_from("I", data, value)[0]
            elif code == 0x06:
                return value
            else:
                true = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
                at += if_true if true else if_false

    assert run(numbers["read"]) == allow
    assert run(numbers["read"], of=0x4000_0003) == kill
    assert run(numbers["ptrace"]) == eperm
    assert run(numbers["clone"], 0x11) == allow
    for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert run(numbers["clone"], 0x11 | bit) == eperm
    assert [run(435), run(470), run(0x4000_0000 + 1)] == [enosys] * 3
    assert run(numbers["prlimit64"], 0) == allow and run(numbers["prlimit64"], 1) == eperm
    core, stack, pointer = 4, 3, 0x7F00_0000_0000
    assert run(numbers["setrlimit"], core, pointer) == eperm and run(numbers["setrlimit"], stack, pointer) == allow
    assert run(numbers["prlimit64"], 0, stack, pointer) == run(numbers["prlimit64"], 0, core, 0, pointer) == allow
    assert [run(numbers["prlimit64"], 0, core, new) for new in (pointer, 1, 1 << 32)] == [eperm] * 3
    assert run(numbers["prlimit64"], 7, core, 0) == eperm
    for family, wanted in ((1, allow), (2, allow), (10, allow), (16, eacces), (17, eacces), (40, eacces)):
        assert run(numbers["socket"], family) == (wanted if open_ else eacces)
    for name in ("setsid", "memfd_create", "inotify_init1", "io_setup", "sendmsg"):
        assert run(numbers[name]) == (allow if open_ else eperm), name
    level, files, thread = 1, 0x400, 0x10000
    for option in (7, 8, 26, 32, 33, 50, 51, 52):
        assert run(numbers["setsockopt"], 3, level, option) == (allow if open_ else eperm)
        assert run(numbers["setsockopt"], 3, 6, option) == allow
    assert {run(numbers["setsockopt"], 3, level, option) for option in (2, 9, 15, 20, 21)} == {allow}
    assert run(numbers["fcntl"], 3, 1031, 1 << 20) == (allow if open_ else eperm)
    assert {run(numbers["fcntl"], 3, command) for command in (1, 2, 3, 4, 6, 1030, 1032)} == {allow}
    assert run(numbers["clone"], 0x11 | thread | files) == run(numbers["clone"], files) == allow
    assert run(numbers["clone"], 0x11 | thread) == eperm
