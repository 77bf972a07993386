"""What the supervisor counts of a process's memory, in the kernel too."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sandbox import memory

PROGRAM = """
import ctypes, os, select, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def mmap(size, protection):
    return libc.mmap(None, ctypes.c_size_t(size), protection, 0x4022, -1, 0)
kept = []
for what in sys.argv[1:]:
    if what == "sockets": kept += [socket.socketpair() for _ in range(40)]
    elif what == "pipes": kept += [os.pipe() for _ in range(40)]
    elif what == "watches":
        instances, files = [select.epoll() for _ in range(40)], [os.eventfd(0) for _ in range(40)]
        for one in instances:
            for file in files: one.register(file, select.EPOLLIN)
        kept += instances
    elif what == "tables":
        at = mmap(1 << 40, 1)
        for n in range(2560): ctypes.c_char.from_address(at + n * (2 << 20)).value
    elif what == "mappings":
        for n in range(20_000): mmap(4096, n % 2)
    elif what == "hidden": libc.prctl(4, 0, 0, 0, 0)
print(flush=True)
sys.stdin.read()
"""
MIB = 1 << 20


def held(*what: str, most: int = 0) -> int:
    """Bytes of a process that holds it."""
    command = [sys.executable, "-S", "-c", PROGRAM, *what]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        found = memory.held([process.pid, 1 << 30], 3 * MIB, most, 256, own_network=False)
        process.stdin.close()
    return found


def test_what_the_kernel_holds_for_a_process_is_counted() -> None:
    empty = held()
    assert 3 * MIB < empty < 60 * MIB
    bounds = {"sockets": 80 * memory.SOCKET, "pipes": 40 * memory.PIPE, "watches": 1600 * 256}
    for what, size in (bounds | {"tables": 10 * MIB, "mappings": 20_000 * 256}).items():
        found = held(what, most=MIB if what in ("tables", "mappings") else 1 << 40) - empty
        assert size * 0.7 <= found < size * 2 + 20 * MIB, what


def test_counting_ends_where_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert held("sockets", most=30 * MIB) > 30 * MIB
    monkeypatch.setattr(memory, "MOST_WATCHES", 1000)
    assert held("watches", most=1 << 40) > 1 << 40


def test_within_the_limit_the_count_is_not_below_what_there_is() -> None:
    assert held("tables", "mappings", "pipes", most=1 << 40) >= held("tables", "mappings", "pipes", most=MIB) - MIB
