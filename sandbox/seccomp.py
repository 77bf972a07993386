"""The system calls that a program may not make, as a BPF filter built by hand.

A deny list over a bound: calls that are newer than the list are answered with ENOSYS, so that a new kernel opens
nothing. What is denied is what a program that computes something does not need and an attacker does: namespaces and
mounts, tracing and other processes' memory, BPF, filters of its own, io_uring, keys, modules, clocks, the scheduling and limits of other
processes, the limit that keeps the host's handler of core dumps out (no other value does), and sockets of rare kinds.
"""

from __future__ import annotations

import ctypes
import errno
import resource
import socket
import struct
from dataclasses import dataclass

from sandbox.syscalls import PR_SET_NO_NEW_PRIVS, prctl

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # ld abs; jeq; jge; jset; ret
_KILL, _ALLOW, _ERRNO = 0x8000_0000, 0x7FFF_0000, 0x0005_0000
_NUMBER, _ARCH = 0, 4
_NAMESPACES = 0x7E02_0000  # every CLONE_NEW* but NEWTIME, whose bit means a signal here
_AUDIT_ARCH = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32 = 0x4000_0000
_FIRST_UNKNOWN = 463

# fmt: off
# ruff: noqa: E501
_DENIED = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "modify_ldt": 154, "pivot_root": 155, "_sysctl": 156, "adjtimex": 159, "chroot": 161, "acct": 163,
        "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
        "setdomainname": 171, "iopl": 172, "ioperm": 173, "create_module": 174, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "nfsservctl": 180, "uselib": 134, "ustat": 136, "sysfs": 139, "vhangup": 153, "lookup_dcookie": 212, "clock_settime": 227,
        "mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "ioprio_set": 251, "migrate_pages": 256, "unshare": 272, "vmsplice": 278, "move_pages": 279, "perf_event_open": 298,
        "fanotify_init": 300, "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320, "bpf": 321,
        "userfaultfd": 323, "seccomp": 317,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "nfsservctl": 42, "quotactl": 60, "vmsplice": 75, "vhangup": 58,
        "acct": 89, "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "ptrace": 117,
        "reboot": 142, "sethostname": 161, "setdomainname": 162, "settimeofday": 170, "adjtimex": 171, "add_key": 217, "request_key": 218,
        "keyctl": 219, "swapon": 224, "swapoff": 225, "mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "migrate_pages": 238,
        "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
        "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "finit_module": 273,
        "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294, "unshare": 97, "ioprio_set": 30, "lookup_dcookie": 18,
        "seccomp": 277,
    },
}
_DENIED_EVERYWHERE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429, "fsopen": 430,
    "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "quotactl_fd": 443, "memfd_secret": 447, "process_mrelease": 448, "set_mempolicy_home_node": 450, "statmount": 457,
    "listmount": 458, "lsm_get_self_attr": 459, "lsm_set_self_attr": 460, "lsm_list_modules": 461,
}
_UNCOUNTED = {  # memory that is in no process, or that outlives them all
    "x86_64": {"shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70,
               "msgctl": 71, "semtimedop": 220, "mq_open": 240, "mq_unlink": 241, "memfd_create": 319, "io_setup": 206, "inotify_init": 253,
               "inotify_init1": 294, "landlock_create_ruleset": 444, "sendfile": 40, "splice": 275, "tee": 276},
    "aarch64": {"mq_open": 180, "mq_unlink": 181, "msgget": 186, "msgctl": 187, "msgrcv": 188, "msgsnd": 189, "semget": 190, "semctl": 191,
                "semtimedop": 192, "semop": 193, "shmget": 194, "shmctl": 195, "shmat": 196, "memfd_create": 279, "io_setup": 0, "inotify_init1": 26,
                "landlock_create_ruleset": 444, "sendfile": 71, "splice": 76, "tee": 77},
}
_SENDING = {"x86_64": {"sendmsg": 46, "sendmmsg": 307}, "aarch64": {"sendmsg": 211, "sendmmsg": 269}}
_GROUPS = {"x86_64": {"setpgid": 109, "setsid": 112}, "aarch64": {"setpgid": 154, "setsid": 157}}
# Whose first argument is a process: 0, the caller itself, only. In setpriority it is the second.
_OWN_ONLY = {
    "x86_64": {"sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203, "sched_setattr": 314},
    "aarch64": {"sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122, "sched_setattr": 274},
}
_NAMED = {
    "x86_64": {"clone": 56, "socket": 41, "socketpair": 53, "setpriority": 141, "personality": 135, "ioctl": 16, "setrlimit": 160, "prlimit64": 302,
               "setsockopt": 54, "fcntl": 72, "prctl": 157},
    "aarch64": {"clone": 220, "socket": 198, "socketpair": 199, "setpriority": 140, "personality": 92, "ioctl": 29, "setrlimit": 164, "prlimit64": 261,
                "setsockopt": 208, "fcntl": 25, "prctl": 167},
}
# fmt: on
_CLONE3 = 435
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_F_SETPIPE_SZ = 1031
_PR_SET_SECCOMP = 22
# Sizes of a socket's buffers, filters, which take memory of their own, and pages of the sender that wait in it.
_LARGER_SOCKETS = {"SO_SNDBUF": 7, "SO_RCVBUF": 8, "SO_SNDBUFFORCE": 32, "SO_RCVBUFFORCE": 33, "SO_ATTACH_FILTER": 26,
                   "SO_ATTACH_BPF": 50, "SO_ATTACH_REUSEPORT_CBPF": 51, "SO_ATTACH_REUSEPORT_EBPF": 52, "SO_ZEROCOPY": 60}  # fmt: skip
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


@dataclass(frozen=True, slots=True)
class _Jump:
    code: int
    value: int
    if_true: int
    if_false: int


def _argument(index: int) -> int:
    return 16 + 8 * index  # the low half, little-endian


def _error(number: int) -> _Jump:
    return _Jump(_RETURN, _ERRNO | number, 0, 0)


def _when(number: int, body: list[_Jump]) -> list[_Jump]:
    """`body` for the system call `number`; each body ends in a return. The accumulator holds the number before."""
    return [_Jump(_EQUAL, number, 0, len(body)), *body]


def _is(argument: int, value: int, if_true: int, if_false: int) -> list[_Jump]:
    """Over how many steps to jump, by the argument's low 32 bits."""
    return [_Jump(_LOAD, _argument(argument), 0, 0), _Jump(_EQUAL, value, if_true, if_false)]


def _only(argument: int, values: list[int], error: int) -> list[_Jump]:
    """Allow where the argument's low 32 bits are one of `values`."""
    tests = [_Jump(_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values)]
    return [_Jump(_LOAD, _argument(argument), 0, 0), *tests, _error(error), _Jump(_RETURN, _ALLOW, 0, 0)]


def _program(arch: str, *, network: bool, uncounted_memory: bool, process_groups: bool) -> list[_Jump]:
    named = _NAMED[arch]
    allow = _Jump(_RETURN, _ALLOW, 0, 0)
    denied = sorted({*_DENIED[arch].values(), *_DENIED_EVERYWHERE.values()})
    if not uncounted_memory:
        denied += sorted(_UNCOUNTED[arch].values())
    if not network:  # what is on its way from one socket to another is in no process
        denied += sorted(_SENDING[arch].values())
    if not process_groups:
        denied += sorted(_GROUPS[arch].values())
    program = [
        _Jump(_LOAD, _ARCH, 0, 0),
        _Jump(_EQUAL, _AUDIT_ARCH[arch], 1, 0),
        _Jump(_RETURN, _KILL, 0, 0),
        _Jump(_LOAD, _NUMBER, 0, 0),
        _Jump(_AT_LEAST, _X32 if arch == "x86_64" else _FIRST_UNKNOWN, 0, 1),
        _error(errno.ENOSYS),
        _Jump(_AT_LEAST, _FIRST_UNKNOWN, 0, 1),
        _error(errno.ENOSYS),
    ]
    for number in denied:
        program += _when(number, [_error(errno.EPERM)])
    program += _when(_CLONE3, [_error(errno.ENOSYS)])  # its flags lie in memory; the C library falls back to clone
    flags = [
        _Jump(_LOAD, _argument(0), 0, 0),
        _Jump(_ANY_BIT, _NAMESPACES, 2, 0),
        _Jump(_ANY_BIT, _CLONE_THREAD, 0, 2),
        _Jump(_ANY_BIT, _CLONE_FILES, 1, 0),  # descriptors of a thread alone would be in no list of its process
        _error(errno.EPERM),
        allow,
    ]
    program += _when(named["clone"], flags)
    # Filters are memory that few kernels count, and compiled ones come out of a store that all runs share.
    program += _when(named["prctl"], [*_is(0, _PR_SET_SECCOMP, 0, 1), _error(errno.EPERM), allow])
    for number in _OWN_ONLY[arch].values():
        program += _when(number, _only(0, [0], errno.EPERM))
    program += _when(named["setrlimit"], [*_is(0, resource.RLIMIT_CORE, 0, 1), _error(errno.EPERM), allow])
    # prlimit64(pid, resource, new, old): of the caller itself; of the size of core dumps only without `new`.
    program += _when(
        named["prlimit64"],
        [
            *_is(0, 0, 1, 0),
            _error(errno.EPERM),
            *_is(1, resource.RLIMIT_CORE, 0, 5),
            *_is(2, 0, 0, 2),
            _Jump(_LOAD, _argument(2) + 4, 0, 0),
            _Jump(_EQUAL, 0, 1, 0),
            _error(errno.EPERM),
            allow,
        ],
    )
    if not uncounted_memory:
        options = list(_LARGER_SOCKETS.values())
        tests = [_Jump(_EQUAL, option, len(options) - place, 0) for place, option in enumerate(options)]
        body = [*_is(1, socket.SOL_SOCKET, 0, 1 + len(options)), _Jump(_LOAD, _argument(2), 0, 0), *tests]
        program += _when(named["setsockopt"], [*body, allow, _error(errno.EPERM)])
        program += _when(named["fcntl"], [*_is(1, _F_SETPIPE_SZ, 0, 1), _error(errno.EPERM), allow])
    program += _when(named["setpriority"], _only(1, [0], errno.EPERM))
    program += _when(named["personality"], _only(0, [0, 0xFFFF_FFFF], errno.EPERM))
    families = [socket.AF_UNIX, socket.AF_INET, socket.AF_INET6] if network else []
    program += _when(named["socket"], _only(0, [int(family) for family in families], errno.EACCES))
    program += _when(named["socketpair"], _only(0, [int(socket.AF_UNIX)], errno.EACCES))
    terminal = [_Jump(_LOAD, _argument(1), 0, 0), _Jump(_EQUAL, _TIOCSTI, 1, 0), _Jump(_EQUAL, _TIOCLINUX, 0, 1)]
    program += _when(named["ioctl"], [*terminal, _error(errno.EPERM), allow])
    return [*program, allow]


def build(arch: str, *, network: bool, uncounted_memory: bool, process_groups: bool) -> bytes:
    """The filter as the kernel reads it (struct sock_filter[]).

    network: sockets of UNIX, IPv4 and IPv6 may be made (in a network namespace of the run's own); else none.
    uncounted_memory: what makes memory that is in no process is there: System V IPC, message queues, memfd_create,
    inotify, larger buffers, pages of a file in a socket (in an IPC namespace and a control group of the run's own). process_groups: sessions and process groups may be made (in a process namespace of the run's
    own).
    """
    steps = _program(arch, network=network, uncounted_memory=uncounted_memory, process_groups=process_groups)
    return b"".join(struct.pack("HBBI", step.code, step.if_true, step.if_false, step.value) for step in steps)


def install(program: bytes) -> None:
    """Put the filter on the calling thread for good; what it starts inherits it. Raises OSError."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    steps = ctypes.create_string_buffer(program, len(program))
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(steps)))
    mode_filter = 2
    prctl(_PR_SET_SECCOMP, mode_filter, ctypes.addressof(filter_))
