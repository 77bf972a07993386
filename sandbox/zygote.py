"""A warm interpreter that forks a supervisor for each run. A process of its own: it reads one kind of message, forks,
and reaps.

It never sees code, files or output: those go straight between server and supervisor, so that no run can find another's
in the memory that it inherits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox import confine, reseed, root, supervise
from sandbox import syscalls as sc
from sandbox.tiers import Tier

_NAMESPACES = (
    sc.CLONE_NEWUSER
    | sc.CLONE_NEWNS
    | sc.CLONE_NEWPID
    | sc.CLONE_NEWIPC
    | sc.CLONE_NEWUTS
    | sc.CLONE_NEWNET
    | sc.CLONE_NEWCGROUP
)
MAX_FDS = 16


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings of a zygote at its start, as JSON in its last argument."""

    tier: Tier
    preload: list[str]
    place: str
    """An empty folder: mount point of the new root, or place of runs' files."""
    readable: list[str]
    uid: int
    """The user that root becomes; first of the runs' users in the tier that gives each its own."""

    @classmethod
    def from_json(cls, text: str) -> Setup:
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "tier": Tier(values["tier"])})


def main() -> None:
    sys.path.pop(0)  # where this package was found
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1024), most))  # each run closes so many, one by one
    setup = Setup.from_json(sys.argv[-1])
    control = socket.socket(fileno=int(sys.argv[-2]))
    try:
        for name in setup.preload:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError(
                f"a module of {setup.preload} starts threads: a process with threads cannot be forked from"
            )
        if setup.tier.namespaces:
            _enter_namespaces(setup, control)
        sys.path[:] = [path for path in sys.path if os.path.isdir(path) or path.endswith(".zip")]
        post = supervise.Post(
            tier=setup.tier,
            readable=[*setup.readable, "/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"],
            base=setup.place,
            uid=None,
            filter=confine.filter_for(setup.tier),
        )
        loaded = sorted(name for name in setup.preload if name in sys.modules)
    except (OSError, RuntimeError) as error:
        control.send(json.dumps({"error": str(error)}).encode())
        sys.exit(1)
    control.send(json.dumps({"error": None, "loaded": loaded, "pid": os.getpid()}).encode())
    gc.collect()
    reseed.find()
    gc.freeze()
    _serve(control, post, setup)


def _enter_namespaces(setup: Setup, control: socket.socket) -> None:
    """Returns in pid 1 of the zygote's own process namespace, in the new root. The process that called waits for it
    outside and ends with it.
    """
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        # Root inside a user namespace would still be root's user to the kernel: exempt from RLIMIT_NPROC, owner of
        # /proc/sys. So another user comes first; the root file system before that, because only root may be able to
        # reach Python's folders.
        sc.unshare(sc.CLONE_NEWNS)
        root.build(setup.place, setup.readable)
        uid = gid = setup.uid
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        sc.prctl(sc.PR_SET_DUMPABLE, 1)
        sc.unshare(_NAMESPACES)
        sc.map_own_ids(root.USER, uid, gid)
    else:
        sc.unshare(_NAMESPACES)
        sc.map_own_ids(root.USER, uid, gid)
        root.build(setup.place, setup.readable)
    pid = os.fork()
    if pid:
        control.close()
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
    root.fresh_proc()


def _serve(control: socket.socket, post: supervise.Post, setup: Setup) -> None:
    """Fork for each message until the server is gone. A message: JSON {groups, pipes, slot}, with descriptors: the
    run's socket, groups, pipes.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if post.tier.namespaces else -1
    if not post.tier.namespaces:
        sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes the socket
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        data, fds, _, _ = socket.recv_fds(control, 4096, MAX_FDS)
        if not data:
            os._exit(0)
        message = json.loads(data)
        slot = message["slot"]
        own_user = post.tier is Tier.LANDLOCK_UID
        given = supervise.Post(
            post.tier, post.readable, post.base, setup.uid + 1 + slot if own_user else None, post.filter
        )
        try:
            pid = _fork(post.tier)
        except OSError as error:
            print(f"sandbox: cannot start a run: {error}", file=sys.stderr)
            pid = -1
        if pid == 0:
            _become_supervisor(control, fds, message["groups"], given)
        for fd in fds:
            os.close(fd)
        if own >= 0:
            sc.setns(own, sc.CLONE_NEWPID)


def _fork(tier: Tier) -> int:
    if tier.namespaces:
        sc.unshare(sc.CLONE_NEWPID)  # of children; setns takes it back
    return os.fork()


def _become_supervisor(control: socket.socket, fds: list[int], groups: int, post: supervise.Post) -> None:
    status = 1
    try:
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sc.prctl(sc.PR_SET_PDEATHSIG, signal.SIGKILL)
        with socket.socket(fileno=fds[0]) as own:
            supervise.run(own, fds[1 : 1 + groups], fds[1 + groups :], post)
        status = 0
    except EOFError:
        status = 0
    except BaseException as error:
        print(f"sandbox: supervisor: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def launch_command(setup_json: str, fd: int) -> list[str]:
    """Command line of a zygote whose socket is descriptor `fd`."""
    here = str(Path(__file__).resolve().parent.parent)
    program = f"import sys; sys.path.insert(0, {here!r}); from sandbox.zygote import main; main()"
    return [sys.executable, "-I", "-c", program, str(fd), setup_json]
