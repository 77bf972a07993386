"""The file system that a program sees: system folders and Python read-only, a few devices, and one size-limited tmpfs
of its own.

`build` makes what all runs of a zygote share; `own_parts` what each run gets.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from sandbox import syscalls as sc
from sandbox.limits import Limits

HOME = "/home/sandbox"
"""Working directory of programs."""
USER = 1000
_BOX = "/.box"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = ("alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "java-17-openjdk", "java-21-openjdk")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ETC_FILES = {
    "passwd": f"sandbox:x:{USER}:{USER}::{HOME}:/bin/sh\n",
    "group": f"sandbox:x:{USER}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
}
_DEV_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


def readable(extra: Iterable[str]) -> list[str]:
    """Folders of the host that programs may read: the system's, Python's, and `extra`; those inside another one left
    out.
    """
    wanted = [*_SYSTEM, *(os.path.realpath(p) for p in (sys.base_prefix, sys.prefix)), sys.prefix, *extra]
    found: list[str] = []
    for path in dict.fromkeys(wanted):
        inside = any(path == p or path.startswith(p + "/") for p in found)
        if not inside and (os.path.islink(path) or os.path.isdir(path)):
            found.append(path)
    return found


def build(place: str, folders: Iterable[str]) -> None:
    """Make the root at the empty folder `place` and change into it. In a mount namespace of the caller's own. Raises
    OSError.
    """
    sc.mount(None, "/", None, sc.MS_REC | sc.MS_PRIVATE)
    sc.mount("tmpfs", place, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "size=1m,nr_inodes=512,mode=755")
    for folder in folders:
        _show(folder, place)
    etc, dev = Path(place, "etc"), Path(place, "dev")
    etc.mkdir(exist_ok=True)
    for name in _ETC:
        if (Path("/etc") / name).exists():
            _show(f"/etc/{name}", place)
    for name, text in _ETC_FILES.items():
        (etc / name).write_text(text)
    dev.mkdir()
    for device in DEVICES:
        _bind(device, place + device, sc.ATTR_NOSUID | sc.ATTR_NOEXEC)
    for name, target in _DEV_LINKS.items():
        (dev / name).symlink_to(target)
    for empty in ("proc", "tmp", "dev/shm", _BOX[1:], HOME[1:]):
        Path(place, empty).mkdir(parents=True, exist_ok=True)
    sc.mount("/proc", f"{place}/proc", None, sc.MS_BIND | sc.MS_REC)
    sc.pivot_root(place)
    sc.set_mount_attributes("/", sc.ATTR_RDONLY, recursive=False)


def _show(path: str, place: str) -> None:
    target = Path(place + path)
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.islink(path):
        target.symlink_to(os.readlink(path))
    else:
        _bind(path, str(target), sc.ATTR_RDONLY | sc.ATTR_NOSUID | sc.ATTR_NODEV)


def _bind(path: str, target: str, attributes: int) -> None:
    if os.path.isdir(path):
        Path(target).mkdir(exist_ok=True)
    else:
        Path(target).touch()
    sc.mount(path, target, None, sc.MS_BIND | sc.MS_REC)
    sc.set_mount_attributes(target, attributes, recursive=True)


def fresh_proc() -> None:
    """/proc of the caller's process namespace."""
    sc.mount("proc", "/proc", "proc", sc.MS_NOSUID | sc.MS_NODEV | sc.MS_NOEXEC)


def own_parts(limits: Limits) -> None:
    """A run's /proc, and its home, /tmp and /dev/shm, that share one size and inode limit. In a new mount namespace.

    What programs may read inside one of these folders (a Python in /tmp, say) is shown there again.
    """
    fresh_proc()
    options = f"size={limits.disk_bytes},nr_inodes={limits.inodes + 5},mode=711"
    sc.mount("tmpfs", _BOX, "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, options)
    for name, target in (("home", HOME), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        os.mkdir(f"{_BOX}/{name}")
        if name != "home":
            os.chmod(f"{_BOX}/{name}", 0o1777)
        for shown in os.listdir(target):
            os.mkdir(f"{_BOX}/{name}/{shown}")
            sc.mount(f"{target}/{shown}", f"{_BOX}/{name}/{shown}", None, sc.MS_BIND | sc.MS_REC)
        sc.mount(f"{_BOX}/{name}", target, None, sc.MS_BIND | sc.MS_REC)


def full() -> tuple[bool, bool]:
    """Check whether the run's disk, and its inodes, are used up."""
    state = os.statvfs(_BOX)
    return state.f_bavail == 0, state.f_ffree == 0
