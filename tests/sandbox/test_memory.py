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
        instances, files = [select.epoll() for _ in range(60)], [os.eventfd(0) for _ in range(100)]
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
    """Both where that is within the limit and beyond it."""
    within, beyond = 1 << 40, 5 * MIB
    empty = {most: held(most=most) for most in (within, beyond)}
    assert 5 * MIB < empty[beyond] <= empty[within] < 60 * MIB
    for what, size in (("sockets", 80 * memory.SOCKET), ("pipes", 40 * memory.PIPE), ("watches", 6000 * 256)):
        assert abs(held(what, most=within) - empty[within] - size) < MIB, what  # the interpreter's own pages vary
    assert abs(held("mappings", most=beyond) - empty[beyond] - 20_000 * 256) < MIB
    assert held("tables", most=beyond) > 13 * MIB


def test_counting_ends_where_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert held("sockets", most=30 * MIB) > 30 * MIB
    monkeypatch.setattr(memory, "MOST_WATCHES", 1000)
    assert held("watches", most=1 << 40) > 1 << 40
