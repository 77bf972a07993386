"""Landlock: what of the file system a process may touch, where no namespaces are to be had.
https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from sandbox.syscalls import (
    PR_SET_NO_NEW_PRIVS,
    SYS_LANDLOCK_ADD,
    SYS_LANDLOCK_CREATE,
    SYS_LANDLOCK_RESTRICT,
    prctl,
    syscall,
)

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABSTRACT_SOCKETS, _SCOPE_SIGNALS = 1, 2
SCOPES_SINCE = 6
"""The ABI from which signals and abstract sockets can be held inside."""


def abi() -> int:
    """Version of Landlock in this kernel; 0 where there is none."""
    try:
        return syscall(SYS_LANDLOCK_CREATE, 0, 0, 1)
    except OSError:
        return 0


def restrict(read: Iterable[str], write: Iterable[str], devices: Iterable[str], *, tcp: bool) -> None:
    """Confine the calling process and what it starts: `read` may be read and executed, everything may be done beneath
    `write`, `devices` may be opened.

    Paths that do not exist are passed over. `tcp`: it may be used, in a network of the process's own. Else it is
    denied; signals and abstract sockets end at the domain's border, as far as the kernel's ABI goes. Raises OSError.
    """
    version = abi()
    if not version:
        raise OSError("this kernel has no Landlock (Linux 5.13, and `landlock` in its lsm= list)")
    handled = (1 << 13) - 1
    handled |= (1 << 13) if version >= 2 else 0
    handled |= _TRUNCATE if version >= 3 else 0
    handled |= _IOCTL_DEV if version >= 5 else 0
    denied_tcp = 3 if version >= 4 and not tcp else 0
    scopes = _SCOPE_ABSTRACT_SOCKETS | _SCOPE_SIGNALS if version >= SCOPES_SINCE else 0
    size = 24 if version >= SCOPES_SINCE else 16 if version >= 4 else 8
    attributes = struct.pack("QQQ", handled, denied_tcp, scopes)[:size]
    ruleset = syscall(SYS_LANDLOCK_CREATE, ctypes.create_string_buffer(attributes, size), size, 0, what="landlock")
    try:
        rules = [(path, _READ) for path in read]
        rules += [(path, handled & ~_IOCTL_DEV) for path in write]
        rules += [(path, _READ_FILE | _WRITE_FILE | _TRUNCATE) for path in devices]
        for path, access in rules:
            _allow(ruleset, path, access & handled)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0, what="landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            access &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, fd), 12)
        syscall(SYS_LANDLOCK_ADD, ruleset, 1, rule, 0, what=f"landlock_add_rule {path}")
    finally:
        os.close(fd)
