"""Programs that mean harm, and what a sandbox that holds makes of each.

Each program prints what it got away with; `held` is all that it may say. Where a limit has to end it, the limit's name is what counts. PID, PORT, SOCKET,
ABSTRACT, SECRET and OPEN_FOLDER stand for a process of the server's user, listeners of the host, a file of the host and a folder of it that anyone may write to.
"""

from __future__ import annotations

# ruff: noqa: E501
from dataclasses import dataclass, field

from sandbox.limits import Limit

ONLY_NAMESPACES = ("namespaces+cgroup", "namespaces")
BOMB = (Limit.WALL_TIME, Limit.PROCESSES, Limit.CPU_TIME, Limit.MEMORY)
"""Limits of which one stops processes without end: the machine's load decides which is reached first."""


@dataclass(frozen=True, slots=True)
class Attack:
    name: str
    code: str
    language: str = "python"
    limits: tuple[Limit, ...] = ()
    """One of these must be named in the answer; none: the program must say `held`."""
    crash: bool = False
    """It may as well die of a segmentation fault of its own."""
    seconds: float = 4.0
    """Wall time, where that is one of the limits. What anything else has to stop has more: on a busy machine it takes longer."""
    tiers: tuple[str, ...] = field(default=("namespaces+cgroup", "namespaces", "landlock+uid", "landlock"))
    """Where it has to be stopped."""


_TRY = """
import contextlib, ctypes, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
bad = []
def attempt(name, call, good=lambda value: False):
    try:
        value = call()
    except (OSError, ValueError, subprocess.SubprocessError, MemoryError):
        return
    if not good(value):
        bad.append(f"{name}: {value!r}"[:200])
def done():
    print(bad or "held", flush=True)
"""

_HOLD = """
def hold(count, fill):
    # `count` processes fill what they can, and say how many bytes that were; more than 300 MiB may not be there at once.
    read, write = os.pipe()
    for _ in range(count):
        try: pid = os.fork()
        except OSError: break
        if pid == 0:
            os.close(read)
            # What was filled stays: by the value that is returned, or by the frame that the error refers to. Processes
            # that give it back take turns on a busy machine, and never hold together what they say in sum.
            try: kept = fill(lambda size: os.write(write, size.to_bytes(8, "little")))
            except (OSError, MemoryError) as error: kept = error
            os.close(write)
            time.sleep(60)
    os.close(write)
    total = 0
    while part := os.read(read, 8): total += int.from_bytes(part, "little")
    time.sleep(0.3 if total <= 300 << 20 else 2)
    print("held" if total <= 300 << 20 else f"{total >> 20} MiB", flush=True)
def full(s):
    s.setblocking(False)
    sent = 0
    with contextlib.suppress(OSError):
        while True: sent += s.send(bytes(1 << 15))
    return sent
"""


def _attack(name: str, body: str, **more: object) -> Attack:
    return Attack(name, _TRY + body, **more)  # type: ignore[arg-type]


def _kernel_memory(name: str, body: str, **more: object) -> Attack:
    """By memory that no process has, but the kernel for it."""
    return _attack(f"memory in {name}", _HOLD + body, limits=(Limit.MEMORY,), **more)


ATTACKS = [
    _attack(
        "host files",
        """
for path in (SECRET, "/etc/shadow", "/root/.bashrc", "/var/log/dpkg.log", "/proc/1/environ", "/proc/kcore", "/dev/mem", "/dev/vda", "/dev/kmsg"):
    attempt(path, lambda: open(path, "rb").read(20))
attempt("listing", lambda: os.listdir(OPEN_FOLDER))
attempt("roots", lambda: [p for p in os.listdir("/") if p in ("boot", "srv", "var", "sys", "farm")], lambda v: v == [])
done()
""",
    ),
    _attack(
        "host files written",
        """
for path in (SECRET, OPEN_FOLDER + "/new", "/usr/lib/planted.py", "/etc/passwd", "/etc/ld.so.preload", "/bin/planted", sys.prefix + "/planted",
             os.path.dirname(os.__file__) + "/planted.py", "/var/tmp/planted", "/run/planted", "/dev/planted"):
    attempt(path, lambda: open(path, "ab"))
done()
""",
    ),
    _attack(
        "environment",
        """
known = {"PATH", "HOME", "LANG", "TMPDIR", "PYTHONUNBUFFERED", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MPLBACKEND"}
attempt("inherited", lambda: set(os.environ) - known, lambda v: not v)
for pid in ["self", "1", str(PID), *range(2, 40)]:
    attempt("environ", lambda: open(f"/proc/{pid}/environ").read(), lambda v: "AGENTRL_SECRET" not in v)
attempt("memory", lambda: b"AGENTRL_" + b"SECRET" in open("/proc/self/mem", "rb").read(1), lambda v: not v)
done()
""",
    ),
    _attack(
        "loopback and outside",
        """
for address in (("127.0.0.1", PORT), ("10.0.0.1", 80), ("169.254.169.254", 80), ("1.1.1.1", 53)):
    def connect():
        with socket.socket() as s:
            s.settimeout(0.3); s.connect(address); return address
    attempt("tcp", connect)
    def send():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            return s.sendto(b"x", address)
    attempt("udp", send, lambda v: address[0] == "127.0.0.1")
attempt("dns", lambda: socket.getaddrinfo("example.com", 80))
done()
""",
    ),
    _attack(
        "UNIX, abstract and rare sockets",
        """
for address in (SOCKET, "\\0" + ABSTRACT):
    def connect():
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(address); return address
    attempt("unix", connect)
for family in range(3, 46):
    if family not in (socket.AF_INET6,):
        for kind in (1, 2, 3, 5):
            attempt(f"family {family}", lambda: libc.socket(family, kind, 0) >= 0, lambda v: not v)
attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
done()
""",
    ),
    _attack(
        "fork bomb",
        """
while True:
    try: os.fork()
    except OSError: pass
""",
        limits=BOMB,
        seconds=1.0,
    ),
    Attack(
        "fork bomb of the shell",
        ":(){ :|:& };: ; sleep 60",
        "bash",
        BOMB,
        seconds=1.0,
    ),
    _attack(
        "threads",
        """
def hold(): time.sleep(60)
made = 0
try:
    while made < 500:
        threading.Thread(target=hold, daemon=True).start(); made += 1
except RuntimeError: pass
print("held" if made < 100 else made, flush=True)
os._exit(0)
""",
        tiers=("namespaces+cgroup", "namespaces", "landlock+uid"),
    ),
    _attack("memory at once", "x = bytearray(8 << 30)\nx[:] = b'1' * len(x)\n", limits=(Limit.MEMORY,)),
    _attack(
        "memory in steps",
        "x = []\nwhile True: x.append(bytearray(os.urandom(1)) * (4 << 20))\n",
        limits=(Limit.MEMORY,),
    ),
    _attack(
        "memory of many processes",
        """
def fork():
    while True:
        try:
            return os.fork()
        except BlockingIOError:  # where runs share a user, another attack has taken all its processes for now
            time.sleep(0.02)
for _ in range(10):
    if fork() == 0:
        x = bytearray(os.urandom(1)) * (50 << 20)
        time.sleep(20); os._exit(0)
while True:
    try:
        _, status = os.wait()
        if status: break
    except ChildProcessError: break
time.sleep(20)
""",
        limits=(Limit.MEMORY,),
    ),
    _attack(
        "memory in memfd and shared memory",
        """
fds = []
try:
    while True:
        fd = libc.memfd_create(b"x", 0)
        if fd < 0: break
        fds.append(fd)
        for _ in range(50): os.write(fd, bytes(1 << 20))
except OSError: pass
held = len(fds) * 50
try:
    import mmap
    maps = []
    for _ in range(200): m = mmap.mmap(-1, 8 << 20); m.write(b"1" * (8 << 20)); maps.append(m)
    held += 1600
except (OSError, MemoryError): pass
print("held" if held < 400 else f"{held} MiB", flush=True)
time.sleep(1)
""",
        limits=(Limit.MEMORY,),
    ),
    _attack(
        "System V shared memory",
        """
ids = []
for key in range(40):
    n = libc.shmget(0, ctypes.c_size_t(32 << 20), 0o1777)
    if n >= 0:
        libc.shmat.restype = ctypes.c_void_p
        at = libc.shmat(n, None, 0)
        if at and at != 2**64 - 1: ctypes.memset(at, 1, 32 << 20); ids.append(n)
print("held" if len(ids) < 10 else len(ids), flush=True)
""",
        limits=(Limit.MEMORY,),
    ),
    _kernel_memory(
        "sockets made larger",
        """
def fill(say):
    pairs = []
    while True:
        pairs.append(socket.socketpair())
        for s in pairs[-1]:
            with contextlib.suppress(OSError): s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            say(full(s))
hold(4, fill)
""",
    ),
    _kernel_memory(
        "sockets of processes that nobody may look into",
        """
def fill(say):
    libc.prctl(4, 0, 0, 0, 0)
    pairs = []
    while True:
        pairs.append(socket.socketpair())
        for s in pairs[-1]: say(full(s))
hold(20, fill)
""",
    ),
    _kernel_memory(
        "sockets on their way",
        """
def fill(say):
    carriers = []
    for _ in range(1000):
        pair = socket.socketpair()
        sent = full(pair[0]) + full(pair[1])
        carriers.append(socket.socketpair())
        socket.send_fds(carriers[-1][0], [b"x"], [s.fileno() for s in pair])
        for s in pair: s.close()
        say(sent)
hold(8, fill)
""",
    ),
    _kernel_memory(
        "connections that nobody accepts",
        """
def fill(say):
    for family, address in ((socket.AF_UNIX, f"s{os.getpid()}"), (socket.AF_INET, ("127.0.0.1", 0))):
        with contextlib.suppress(OSError):
            server = socket.socket(family); server.bind(address); server.listen(4096)
            globals().setdefault("kept", []).append(server)
            for _ in range(2000):
                with socket.socket(family) as s:
                    s.settimeout(0.1); s.connect(server.getsockname()); say(full(s))
hold(4, fill)
""",
    ),
    _kernel_memory(
        "TCP connections, half of them closed",
        """
def fill(say):
    server = socket.create_server(("127.0.0.1", 0), backlog=1000)
    kept = []
    while True:
        with socket.create_connection(server.getsockname()) as s:
            t = server.accept()[0]
            kept.append(t); say(full(s)); say(full(t))
hold(8, fill)
""",
        tiers=ONLY_NAMESPACES,
    ),
    _kernel_memory(
        "pages that sockets refer to",
        """
def fill(say):
    # A byte of each page keeps the whole of it, also when the file has lost it, and counts as one byte of the buffer.
    pairs, block = [], os.urandom(1 << 20)
    file = os.open(f"pages{os.getpid()}", os.O_RDWR | os.O_CREAT)
    for _ in range(20): pairs += socket.socketpair()
    for s in pairs:
        s.setblocking(False)
        sent = 256
        while sent == 256:
            os.ftruncate(file, 0); os.pwrite(file, block, 0)
            sent = 0
            with contextlib.suppress(OSError):
                while sent < 256: sent += os.sendfile(s.fileno(), file, sent << 12, 1)
            say(sent << 12)
    return pairs
hold(8, fill)
""",
    ),
    _attack(
        "filters of its own",
        """
import platform, struct
program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0x7fff0000))
one = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))
number = {"x86_64": 317, "aarch64": 277}[platform.machine()]
attempt("by prctl", lambda: libc.prctl(22, 2, one, 0, 0), lambda v: v < 0)
attempt("by seccomp", lambda: libc.syscall(number, 1, 0, one, 0, 0), lambda v: v < 0)
attempt("strict", lambda: libc.syscall(number, 0, 0, None, 0, 0), lambda v: v < 0)
done()
""",
    ),
    _kernel_memory(
        "UDP sockets",
        """
def fill(say):
    kept = []
    while True:
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("127.0.0.1", 0)); s.connect(s.getsockname())
        for _ in range(6): s.send(bytes(1 << 15))  # what does not fit is dropped: the kernel says what it holds (SO_MEMINFO)
        kept.append(s); say(int.from_bytes(s.getsockopt(socket.SOL_SOCKET, 55, 36)[:4], "little"))
hold(20, fill)
""",
        tiers=ONLY_NAMESPACES,
    ),
    _kernel_memory(
        "threads with descriptors of their own",
        """
import platform
flags = 0x100 | 0x200 | 0x800 | 0x10000  # CLONE_VM, FS, SIGHAND, THREAD, and not FILES
print("held" if libc.syscall({"x86_64": 56, "aarch64": 220}[platform.machine()], flags, 0, 0, 0, 0) < 0 else "a thread", flush=True)
os._exit(0)
""",
    ),
    _kernel_memory(
        "pipes",
        """
import fcntl
def fill(say):
    pipes = []
    while True:
        pipes.append(os.pipe()); w = pipes[-1][1]
        os.set_blocking(w, False)
        with contextlib.suppress(OSError): fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 1 << 20)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while True: sent += os.write(w, bytes(1 << 16))
        say(sent)
hold(20, fill)
""",
    ),
    _kernel_memory(
        "page tables",
        """
def fill(say):
    libc.mmap.restype = ctypes.c_void_p
    at = libc.mmap(None, ctypes.c_size_t(1 << 40), 1, 0x4022, -1, 0)  # read only, without reserve
    if at in (None, 2**64 - 1): return
    for n in range(30_000):
        ctypes.c_char.from_address(at + n * (2 << 20)).value
        if n % 256 == 0: say(1 << 20)
hold(4, fill)
""",
    ),
    _kernel_memory(
        "what is watched",
        """
import select
def fill(say):
    instances, files = [select.epoll() for _ in range(40)], [os.eventfd(0) for _ in range(100)]
    for slot in range(220, 240):  # the same number stands for another file each time; what is watched stays
        for file in files:
            os.dup2(file, slot)
            for one in instances: one.register(slot, select.EPOLLIN)
        say(len(files) * len(instances) * 200)
    return instances
hold(2, fill)
""",
    ),
    _attack(
        "kernel memory that nothing counts",
        """
import fcntl, platform
arm = platform.machine() == "aarch64"
for name, number in (("inotify", 26 if arm else 294), ("io_setup", 0 if arm else 206), ("landlock", 444), ("memfd", 279 if arm else 319),
                     ("msgget", 186 if arm else 68), ("semget", 190 if arm else 64), ("shmget", 194 if arm else 29), ("mq_open", 180 if arm else 240),
                     ("userfaultfd", 282 if arm else 323), ("io_uring", 425), ("add_key", 217 if arm else 248), ("memfd_secret", 447)):
    ctypes.set_errno(0)
    attempt(name, lambda: libc.syscall(number, 0, 0, 0, 0, 0), lambda v: v == -1 and ctypes.get_errno() in (1, 38))
for option in (7, 8, 32, 33, 26, 50, 51, 52):
    with socket.socketpair()[0] as s: attempt(f"option {option}", lambda: s.setsockopt(socket.SOL_SOCKET, option, 1 << 20))
attempt("pipe", lambda: fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20))
attempt("locked", lambda: libc.mlockall(1), lambda v: v < 0)
done()
""",
        tiers=("namespaces", "landlock+uid", "landlock"),
    ),
    _attack(
        "disk",
        """
written = 0
try:
    for n in range(1000):
        for folder in (".", os.environ["TMPDIR"]):
            with open(f"{folder}/{n}", "wb") as f: written += f.write(bytes(1 << 20))
except OSError: pass
print("held" if written <= 40 << 20 else written, flush=True)
time.sleep(0.3)
sys.exit(1)
""",
        limits=(Limit.DISK,),
    ),
    _attack(
        "inodes",
        """
try:
    for n in range(100_000): os.symlink("x", f"l{n}")
except OSError: pass
time.sleep(0.3)
""",
        limits=(Limit.INODES, Limit.WALL_TIME),  # without a file system of its own, creating starves counting
    ),
    _attack(
        "a file too large",
        """
with open("big", "wb") as f:
    for _ in range(1000): f.write(bytes(1 << 20))
""",
        limits=(Limit.FILE_SIZE, Limit.DISK),
    ),
    _attack("open files", "files = [open('/dev/null') for _ in range(100_000)]\n", limits=(Limit.OPEN_FILES,)),
    _attack(
        "output flood",
        "while True: sys.stdout.write('x' * 65536)\n",
        limits=(Limit.OUTPUT, Limit.WALL_TIME),
        seconds=2.0,
    ),
    _attack(
        "stderr flood", "while True: os.write(2, b'e' * 65536)\n", limits=(Limit.OUTPUT, Limit.WALL_TIME), seconds=2.0
    ),
    _attack(
        "malformed UTF-8",
        "os.write(1, bytes(range(128, 256)) * 100 + b'\\xed\\xa0\\x80\\0\\x1b[2J')\ndone()\n",
        limits=(),
    ),
    _attack(
        "signals to others",
        """
for pid in (PID, os.getppid(), 1):
    for number in (signal.SIGSTOP, signal.SIGKILL):
        attempt(f"kill {pid}", lambda: os.kill(pid, number), lambda v: pid in (1, os.getppid()))
attempt("by descriptor", lambda: signal.pidfd_send_signal(os.pidfd_open(PID), signal.SIGKILL))
attempt("limits of another", lambda: resource.prlimit(PID, resource.RLIMIT_CPU, (1, 1)))
attempt("priority of the supervisor", lambda: os.setpriority(os.PRIO_PROCESS, os.getppid() or 1, 19))
attempt("policy of the supervisor", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
attempt("processors of the supervisor", lambda: os.sched_setaffinity(1, {0}))
attempt("limits of the supervisor", lambda: resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0)))
done()
""",
    ),
    _attack(
        "ptrace and other processes' memory",
        """
for pid in (PID, os.getppid() or 1, 1):
    attempt("attach", lambda: libc.ptrace(16, pid, 0, 0), lambda v: v < 0)
    attempt("seize", lambda: libc.ptrace(0x4206, pid, 0, 0), lambda v: v < 0)
    attempt("vm_readv", lambda: libc.process_vm_readv(pid, None, 0, None, 0, 0), lambda v: v < 0)
    for what in ("mem", "environ", "maps", "fd/0", "root/etc/shadow", "cwd/."):
        attempt(f"{pid} {what}", lambda: open(f"/proc/{pid}/{what}", "rb").read(1))
done()
""",
    ),
    _attack(
        "processes of the host in /proc",
        """
attempt("cmdline", lambda: open(f"/proc/{PID}/cmdline").read())
attempt("many", lambda: [p for p in os.listdir("/proc") if p.isdigit()], lambda v: len(v) < 5)
for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches", "/proc/self/oom_score_adj", "/proc/sys/kernel/hostname"):
    attempt(path, lambda: open(path, "w").write("-1000" if "oom" in path else "x"))
done()
""",
    ),
    _attack(
        "detached daemons",
        """
for _ in range(5):
    if os.fork() == 0:
        with contextlib.suppress(OSError): os.setsid()
        if os.fork(): os._exit(0)
        for number in range(1, 65):
            with contextlib.suppress(OSError, ValueError): signal.signal(number, signal.SIG_IGN)
        for fd in range(3): os.close(fd)
        while True: time.sleep(1)
done()
""",
    ),
    Attack(
        "nohup and setsid of the shell",
        "nohup setsid sleep 300 >/dev/null 2>&1 & (sleep 300 &) ; disown -a; echo held",
        "bash",
    ),
    _attack(
        "links out of the folder",
        """
os.symlink("/etc/shadow", "fetched"); os.symlink("/", "deep"); os.mkfifo("fifo")
for path in ("fetched", "deep/etc/shadow", "deep" + SECRET, "/proc/self/root" + SECRET, "/proc/1/root" + SECRET, "../../.." + SECRET):
    attempt(path, lambda: open(path).read())
attempt("hard link", lambda: os.link(SECRET, "hard"))
done()
""",
    ),
    _attack(
        "shared memory of others",
        """
attempt("shm", lambda: [n for n in os.listdir("/dev/shm")], lambda v: v == [])
attempt("planted", lambda: open("/dev/shm/agentrl-planted", "w"), lambda v: not os.path.exists("/proc/1/root/dev/shm/agentrl-planted"))
done()
""",
    ),
    _attack(
        "time-out evasion",
        """
for number in range(1, 65):
    with contextlib.suppress(OSError, ValueError): signal.signal(number, signal.SIG_IGN)
signal.alarm(0)
while True:
    try:
        while True: pass
    except BaseException: continue
""",
        limits=(Limit.WALL_TIME,),
        seconds=0.7,
    ),
    _attack(
        "sleepers in stopped, traced and vfork states",
        """
if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)
if os.fork() == 0:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(100)
if os.fork() == 0:  # waits in state D for a child that never goes on
    import platform
    vfork = 0x4000 | signal.SIGCHLD
    if libc.syscall({"x86_64": 56, "aarch64": 220}[platform.machine()], vfork, 0, 0, 0, 0) == 0: time.sleep(100)
subprocess.Popen(["sleep", "100"], preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
time.sleep(100)
""",
        limits=(Limit.WALL_TIME,),
        seconds=0.7,
    ),
    _attack(
        "deep recursion",
        "sys.setrecursionlimit(10**9)\ndef f(): return f()\ndef g(n): return [n] if n > 10**9 else [g(n + 1)]\nf()\n",
        crash=True,
        limits=(Limit.MEMORY, Limit.WALL_TIME),
        seconds=3.0,
    ),
    _attack(
        "deep recursion in C",
        "x = ()\nfor _ in range(10**6): x = (x,)\nhash(x)\ndone()\n",
        crash=True,
        limits=(Limit.MEMORY,),
    ),
    _attack(
        "namespaces, mounts and chroot",
        """
for flag in (0x10000000, 0x20000, 0x20000000, 0x40000000, 0x2000000, 0x8000000, 0x4000000):
    attempt("unshare", lambda: libc.unshare(flag), lambda v: v < 0)
attempt("mount", lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), lambda v: v < 0)
attempt("umount", lambda: libc.umount2(b"/proc", 2), lambda v: v < 0)
attempt("remount", lambda: libc.mount(None, b"/usr", None, 32 | 4096, None), lambda v: v < 0)
attempt("chroot", lambda: os.chroot("."))
attempt("setns", lambda: libc.setns(os.open("/proc/1/ns/mnt", 0), 0), lambda v: v < 0)
attempt("fsopen", lambda: libc.syscall(430, b"tmpfs", 0), lambda v: v < 0)
attempt("open_tree", lambda: libc.syscall(428, -100, b"/", 1), lambda v: v < 0)
attempt("pivot_root", lambda: libc.syscall(155, b".", b"."), lambda v: v < 0)
attempt("command", lambda: subprocess.run(["unshare", "-Urm", "true"], stderr=subprocess.DEVNULL).returncode, lambda v: v != 0)
done()
""",
    ),
    _attack(
        "kernel surface",
        """
calls = {"io_uring": (425, 4, ctypes.create_string_buffer(256)), "bpf": (321, 0, None, 0), "perf": (298, None, 0, -1, -1, 0), "keyctl": (250, 0, -3, 0),
         "add_key": (248, b"user", b"x", b"y", 1, -2), "userfaultfd": (323, 0), "kexec": (246, 0, 0, None, 0), "init_module": (175, None, 0, None),
         "open_by_handle": (304, -100, None, 0), "clone3": (435, None, 0), "x32 getpid": (0x40000000 + 39,), "new": (470,), "fanotify": (300, 0, 0),
         "settimeofday": (164, None, None), "swapon": (167, b"x", 0), "reboot": (169, 0, 0, 0), "personality": (135, 0x0040000)}
for name, arguments in calls.items():
    attempt(name, lambda: libc.syscall(*arguments), lambda v: v < 0)
done()
""",
    ),
    _attack(
        "privileges",
        """
for call in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.setgid(0)):
    attempt("id", call)
for command in (["su", "-c", "id"], ["mount"], ["passwd", "-S"]):
    attempt("suid", lambda: subprocess.run(command, capture_output=True, timeout=2, stdin=subprocess.DEVNULL).stdout, lambda v: b"uid=0" not in v)
held = (ctypes.c_uint32 * 6)()
attempt("capget", lambda: libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), held), lambda v: v == 0 and not any(held))
attempt("new privileges", lambda: libc.prctl(39, 0, 0, 0, 0), lambda v: v == 1)
attempt("dev", lambda: os.mknod("sda", 0o60600, os.makedev(254, 0)))
done()
""",
    ),
    _attack(
        "inherited descriptors",
        """
open_ = []
for fd in range(3, 1024):
    try: os.fstat(fd); open_.append(fd)
    except OSError: pass
print("held" if open_ in ([], [3]) else open_)
""",
    ),
    _attack(
        "limits raised again",
        """
for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_CORE):
    soft, hard = resource.getrlimit(kind)
    attempt(f"rlimit {kind}", lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
    attempt(f"unlimited {kind}", lambda: hard, lambda v: v != resource.RLIM_INFINITY)
attempt("core dumps to the host's handler", lambda: resource.setrlimit(resource.RLIMIT_CORE, (0, 0)))
attempt("core dumps", lambda: resource.getrlimit(resource.RLIMIT_CORE), lambda v: max(v) <= 1)
attempt("nice", lambda: os.nice(-5))
attempt("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("cgroup", lambda: os.listdir("/sys/fs/cgroup"))
done()
""",
    ),
    _attack(
        "CPU of many processes",
        """
for _ in range(8):
    if os.fork() == 0:
        while True: pass
time.sleep(60)
""",
        limits=(Limit.CPU_TIME, Limit.WALL_TIME),
        seconds=0.8,
    ),
    _attack(
        "terminal and core dumps",
        """
attempt("tiocsti", lambda: libc.ioctl(0, 0x5412, b"x"), lambda v: v < 0)
attempt("tty", lambda: open("/dev/tty", "w"))
attempt("ptmx", lambda: open("/dev/ptmx"))
if os.fork() == 0: os.abort()
os.wait()
attempt("core", lambda: [n for n in os.listdir(".") if "core" in n], lambda v: v == [])
done()
""",
    ),
    _attack(
        "a forged answer",
        """
for fd in range(3, 64):
    with contextlib.suppress(OSError): os.write(fd, b"\\0\\0\\0\\2\\0\\0\\0\\0\\0\\0\\0\\0{}")
for fd in range(3, 64):
    with contextlib.suppress(OSError): os.close(fd)
done()
""",
    ),
    _attack(
        "deep folders",
        """
for _ in range(3000):
    try: os.mkdir("d"); os.chdir("d")
    except OSError: break
done()
""",
        limits=(Limit.INODES,),
    ),
    Attack(
        "forks of the shell",
        "for i in $(seq 300); do sleep 100 & done 2>/dev/null; echo held; kill -9 -1",
        "bash",
        (Limit.WALL_TIME, Limit.PROCESSES),
        seconds=1.0,
    ),
]

SESSION_ATTACK = """
import os, signal, socket
got = []
def attempt(name, call):
    try: got.append((name, call()))
    except OSError: pass
attempt("secret", lambda: open({SECRET!r}).read())
attempt("written", lambda: open({OPEN_FOLDER!r} + "/new", "w"))
attempt("environment", lambda: open("/proc/{PID}/environ").read())
attempt("kill", lambda: os.kill({PID}, signal.SIGKILL))
attempt("loopback", lambda: socket.create_connection(("127.0.0.1", {PORT}), 0.3))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect({SOCKET!r}))
for _ in range(3):
    if os.fork() == 0:
        try: os.setsid()
        except OSError: pass
        if os.fork(): os._exit(0)
        for fd in range(16):
            try: os.close(fd)
            except OSError: pass
        signal.pause()
got
"""
"""A session's cell: its last expression is what it got; three daemons stay behind until the session is closed."""

ORDINARY = """
import asyncio, concurrent.futures, multiprocessing, os, shutil, socket, subprocess, sys
async def main():
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "print(input())", stdin=-1, stdout=-1)
    out, _ = await child.communicate(b"spoken")
    assert out == b"spoken\\n", out
    assert await asyncio.to_thread(sum, [1, 2]) == 3
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.sendall(bytes(50_000) + b"end")
    assert (await reader.readuntil(b"end"))[-3:] == b"end"
    writer.write(b"x"); await writer.drain()
    assert theirs.recv(1) == b"x"
asyncio.run(main())
ours, theirs = multiprocessing.Pipe()
if os.fork() == 0:
    theirs.send({"large": "y" * 500_000}); os._exit(0)
assert len(ours.recv()["large"]) == 500_000
assert subprocess.run("yes | head -c 3000000 | wc -c", shell=True, capture_output=True, text=True).stdout.strip() == "3000000"
with concurrent.futures.ThreadPoolExecutor(20) as threads:
    assert list(threads.map(abs, range(-50, 0)))[0] == 50
ours.send(1)
with open("page", "w+b") as page:
    page.write(b"page"); page.seek(0)
    shutil.copyfile("page", "copy")
    one, other = socket.socketpair()
    one.sendfile(page)
assert (open("copy").read(), other.recv(4)) == ("page", b"page")
import mmap
m = mmap.mmap(-1, 1 << 20)
print("held")
"""
"""What many processes, threads, pipes and an event loop need, which has to work in every tier."""

ORDINARY_NETWORK = """
import asyncio, http.server, socket, threading, urllib.request
async def echo(reader, writer):
    writer.write(await reader.readline()); await writer.drain(); writer.close()
async def main():
    for host in ("127.0.0.1", "::1", "localhost"):
        server = await asyncio.start_server(echo, host, 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        writer.write(b"spoken\\n"); await writer.drain()
        assert await reader.readline() == b"spoken\\n"
        writer.close(); server.close()
asyncio.run(main())
web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=web.serve_forever, daemon=True).start()
open("page", "w").write("x" * 3_000_000)
with urllib.request.urlopen(f"http://127.0.0.1:{web.server_port}/page") as page: assert len(page.read()) == 3_000_000
one, other = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
one.bind(("127.0.0.1", 0)); other.sendto(b"datagram", one.getsockname())
assert one.recv(100) == b"datagram"
print("held")
"""
"""What a run's own loopback is for, in the tiers that have one."""
