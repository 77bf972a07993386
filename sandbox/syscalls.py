"""Linux system calls that Python 3.11 does not offer, by ctypes. Each raises OSError."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECUREBITS, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 28, 36, 38, 47
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 2, 4, 8

AT_FDCWD = -100
AT_RECURSIVE = 0x8000

# The same on every architecture that got them after Linux 5.0.
SYS_OPENAT2, SYS_MOUNT_SETATTR = 437, 442
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def machine() -> str:
    """x86_64 or aarch64. Raises OSError elsewhere: the numbers of system calls are not known there."""
    name = platform.machine()
    if name not in SYS_PIVOT_ROOT:
        raise OSError(f"the sandbox knows the system calls of {', '.join(SYS_PIVOT_ROOT)}, not of {name}")
    return name


def syscall(number: int, *arguments: object, what: str = "syscall") -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *converted), what)


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _checked(_libc.setns(fd, kind), "setns")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    flags_ = ctypes.c_ulong(flags)
    options = None if data is None else data.encode()
    _checked(_libc.mount(*encoded, flags_, options), f"mount {source} on {target}")


def set_mount_attributes(path: str, attributes: int, *, recursive: bool) -> None:
    """mount_setattr(2): adds `attributes` (ATTR_*) to the mount at `path`, and to those below it if `recursive`."""
    values = ctypes.create_string_buffer(struct.pack("QQQQ", attributes, 0, 0, 0))
    flags = AT_RECURSIVE if recursive else 0
    arguments = (AT_FDCWD, ctypes.c_char_p(os.fsencode(path)), flags, values, 32)
    syscall(SYS_MOUNT_SETATTR, *arguments, what=f"mount_setattr {path}")


def pivot_root(new_root: str) -> None:
    """Make the mount at `new_root` the root, and let go of the old one."""
    os.chdir(new_root)
    syscall(SYS_PIVOT_ROOT[machine()], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."), what="pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *padded), f"prctl {option}")


def drop_bounding_set() -> None:
    """No exec gives a capability any more. Needs CAP_SETPCAP."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:
            break


def drop_capabilities() -> None:
    """All capabilities, for good: bounding, ambient, permitted, effective and inheritable sets."""
    drop_bounding_set()
    prctl(PR_SET_SECUREBITS, 0b1110_1111)  # noroot, no setuid fixup, no keep-caps, no raising of ambient ones; locked
    prctl(PR_CAP_AMBIENT, 4)
    header = ctypes.create_string_buffer(struct.pack("II", 0x2008_0522, 0))
    syscall(SYS_CAPSET[machine()], header, ctypes.create_string_buffer(24), what="capset")


def open_beneath(directory: int, path: str, flags: int) -> int:
    """openat2(2) that neither leaves `directory` nor follows a symbolic link anywhere on the way."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    arguments = (directory, ctypes.c_char_p(os.fsencode(path)), ctypes.create_string_buffer(how), 24)
    return syscall(SYS_OPENAT2, *arguments, what=path)


def loopback_up() -> None:
    """Switch `lo` on in the network namespace of the caller."""
    siocsifflags, iff_up = 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, siocsifflags, struct.pack("16sH14x", b"lo", iff_up))


def map_own_ids(inside: int, outside_uid: int, outside_gid: int) -> None:
    """Fill the maps of the user namespace that the caller has just made: one user and one group, `inside`."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {outside_uid} 1"),
        ("gid_map", f"{inside} {outside_gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
