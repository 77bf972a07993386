"""Attacks by a program in its container, one session each, while another session of the same endpoint goes on.

An attack is code that ends with an error where it is held, or sets `proof`. The program sends `proof` to the policy.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.trajectory import Status
from tests.containers.test_sessions import mine, todo
from tests.harnesses.conftest import Harnessed

PROGRAM = r"""
import glob, json, os, pathlib, re, socket, stat, subprocess, sys, threading, time, urllib.request

sample = json.load(sys.stdin)
address = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
host = re.match("http://([^/:]+):([0-9]+)(/[^/]+)", address)
door, own = (host[1], int(host[2])), host[3]

def ask(text, tries=1):
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, {"content-type": "text/json"})) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
    except OSError:  # after a flood its door stays full until the endpoint has seen that links are closed
        if tries == 60:
            raise
        time.sleep(0.5)
        return ask(text, tries + 1)

def raw(head, most=10):
    with socket.create_connection(door, timeout=most) as link:
        link.sendall(head.encode())
        link.shutdown(socket.SHUT_WR)
        heard = b""
        while piece := link.recv(1 << 16):
            heard += piece
    return re.findall("HTTP/1.1 ([0-9]+)", heard.decode(errors="replace"))

def get(path, more=""):
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}\r\n"

def post(path, body='{"score": 1}', more=""):
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n{more}\r\n{body}"

def reached(request, own_first=0):
    for other in (f"{own[:-2]}{number}" for number in range(10, 22)):
        if other != own and {"101", "200"} & set(raw(request(other))[own_first:]):
            return other

def shell(line):
    return subprocess.run(["sh", "-c", line], check=True, capture_output=True, text=True, timeout=20).stdout

role = ask("begin")
if role == "attack":
    scope, proof = globals(), None
    open("answer.txt", "w").write("6")
    try:
        exec(pathlib.Path("todo.py").read_text(), scope)
    except Exception:
        pass
    scope.pop("links", None)
    ask(f"ended, proof: {scope['proof']!r}.")
else:
    os.remove("todo.py")
    for _ in range(30):
        if ask("how long?") == "go on":
            break
        time.sleep(0.3)
    open("answer.txt", "w").write("5")
"""

ATTACKS = r"""
# shadow of the machine
proof = open("/etc/shadow").read()
# files of the machine
proof = os.path.exists(MARK) or os.listdir("/work") or None
# root of the first process
proof = os.listdir("/proc/1/root")
# variables of other processes
proof = [one for one in glob.glob("/proc/[0-9]*/environ") if b"SECRET_OF" in open(one, "rb").read()] or None
# settings of the kernel
open("/proc/sys/kernel/core_pattern", "w").write("|/tmp/x"); proof = "written"
# requests to the system
open("/proc/sysrq-trigger", "w").write("h"); proof = "written"
# limits of the container
found = "find /sys/fs/cgroup -name 'memory.*limit*' -o -name memory.max -o -name pids.max"
proof = shell("for f in $(" + found + "); do echo -1 >$f && echo $f; done; true") or None
# a release agent
shell("mkdir /sys/fs/cgroup/new || mkdir /sys/fs/cgroup/memory/new"); proof = "made"
# memory of the machine
proof = [one for one in ("/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore") if os.access(one, os.R_OK)]
proof = [one for one in proof if open(one, "rb").read(1)] or None
# disks
proof = [one for one in glob.glob("/dev/*") if stat.S_ISBLK(os.stat(one).st_mode)] or None
# a device of its own
os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0)); proof = "made"
# modules
shell("insmod x.ko || modprobe dummy"); proof = "loaded"
# a program with its owner's rights
shell("cp /usr/bin/id . && chmod 4755 id"); proof = "uid=0" in shell("./id") or None
# rights of root
proof = shell("sudo -n id || su -c id </dev/null || pkexec id")
# another root
os.chroot("/tmp"); proof = "changed"
# sockets of daemons
names = ("docker.sock", "podman/podman.sock", "containerd/containerd.sock", "dbus/system_bus_socket")
proof = [one for one in names if os.path.exists("/run/" + one)] or None
# the mounted folder
open("/run/agentrl/socket2", "w"); proof = "written"
# the mounted folder moved
os.rename("/run/agentrl", "/run/other"); proof = "moved"
# files of the first process
proof = os.listdir("/proc/1/fd")
# the first process traced
import ctypes
proof = ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 or None
# signals for the first process
for number in set(range(1, 65)) - {19, 32, 33}: os.kill(1, number)
time.sleep(1)
# memory that no process has
for place in ("/dev/shm", "/run", "/var/tmp", "/tmp"):
    try:
        with open(place + "/all", "wb") as file:
            for _ in range(400): file.write(bytes(1 << 20))
    except OSError: pass
# abstract sockets
socket.socket(socket.AF_UNIX).connect(chr(0) + ABSTRACT); proof = "connected"
# loopback of the machine
proof = socket.create_connection(("127.0.0.1", PORT), 2)
# loopback, version 6
proof = socket.create_connection(("::1", PORT), 2)
# raw packets
socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP); proof = "made"
# packets below
socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3); proof = "made"
# sockets of virtual machines
socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).connect((2, 22)); proof = "connected"
# an interface
shell("ip link add d0 type dummy || ip link set lo down"); proof = "made"
# its own door, which is open
proof = None if raw(get(own + "/v1/models")) == ["200"] else "the attacks below would show nothing"
# known tokens
proof = reached(lambda other: get(other + "/v1/models"))
# an absolute address
proof = reached(lambda other: get(f"http://127.0.0.1:{PORT}{other}/v1/models"))
# a tunnel
proof = reached(lambda other: "CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n" + get(other + "/v1/models"))
# the second of two requests
proof = reached(lambda other: get(own + "/v1/models") + get(other + "/v1/models"), 1)
# a request within a body
proof = reached(lambda other: post(own + "/v1/x", get(other + "/v1/models")), 1)
# two lengths
length = "Transfer-Encoding: chunked\r\n"
proof = reached(lambda other: post(own + "/v1/x", "0\r\n\r\n" + get(other + "/v1/models"), length), 1)
# an upgrade
proof = reached(lambda other: get("/v1/sessions", "Upgrade: websocket\r\nConnection: Upgrade\r\n"))
# escaped ways
ways = ("/..", "/%2e%2e", "%2f..", ";/..", "/v1/..", "//..", "\\..", "/./..")
proof = [way for way in ways if reached(lambda other: get(own + way + other + "/v1/models"))] or None
# scores of others
paths = ("feedback", "v1/feedback", "result", "v1/result")
proof = [path for path in paths if reached(lambda other: post(f"{other}/{path}"))] or None
# scores of its own
paths = ("feedback", "result", "v1/feedback", "v1/result", "../feedback")
proof = [path for path in paths if "200" in raw(post(f"{own}/{path}"))] or None
# connections
links = []
while len(links) < 10_000: links.append(socket.create_connection(door, 2))
# half heads
links = []
for _ in range(400):
    links.append(socket.create_connection(door, 2))
    links[-1].sendall(b"POST / HTTP/1.1\r\nHost")
# a head without an end
link = socket.create_connection(door, 5)
for _ in range(2000): link.sendall(b"X-A: " + b"a" * 65536 + b"\r\n")
# a body without an end
link = socket.create_connection(door, 5)
link.sendall(f"POST {own}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
for _ in range(4096): link.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
# a body of 1 TB
raw(f"POST {own}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 40}\r\n\r\nx")
# deep JSON
raw(post(f"{own}/v1/chat/completions", "[" * 2_000_000))
# processes
while True: os.fork() or time.sleep(600)
# threads
while True: threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
# memory
held = []
while True: held.append(bytearray(16 << 20))
# shared memory
with open("/dev/shm/all", "wb") as file:
    for _ in range(1024): file.write(bytes(1 << 20))
# disk
with open("/tmp/all", "wb") as file:
    for _ in range(1024): file.write(bytes(1 << 20))
# output
while True: os.write(1, bytes(65536))
# errors
while True: os.write(2, b"\n" * 65536)
# many files
for number in range(120_000): open(f"n{number}", "w").close()
# a program that stays, and takes no signal
import signal
for number in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)
if not os.fork():
    os.setsid()
    time.sleep(600)
# a sparse file
os.truncate(os.open("sparse", os.O_CREAT | os.O_WRONLY), 1 << 40)
# links out of the folder
os.symlink("/", "tests")
for name, place in (("a", MARK), ("b", ".."), ("c", "/proc/self/mem"), ("d", "d")): os.symlink(place, name)
# pipes, sockets, rights
os.mkfifo("pipe"); open("s", "w"); os.chmod("s", 0o7777)
os.chdir("/tmp"); socket.socket(socket.AF_UNIX).bind("sock")
# names
for name in ("a\nb", "-rf", "--checkpoint-action=exec=sh x", b"\xff", "*", " "): open(name, "w")
# deep folders
for number in range(400): os.mkdir("d"); os.chdir("d")
# shadows of the check
code = "import os; os._exit(0)"
for name in ("unittest", "sitecustomize", "usercustomize", "subprocess", "os", "conftest", "site", "json", "ctypes"):
    open(name + ".py", "w").write(code)
for place in (os.environ.get("HOME", "/tmp"), os.getcwd(), "/tmp"):
    for name in (".profile", ".bashrc", ".pythonrc", ".env", "ld.so.preload"):
        open(os.path.join(place, name), "w").write("exit 0")
for name in ("python3", "sh", "cat", "tar", "chmod"):
    open(name, "w").write("#!/bin/sh\nexit 0"); os.chmod(name, 0o755)
os.makedirs("tests"); open("tests/subprocess.py", "w").write(code); os.symlink("/bin/true", "tests/judge.py")
"""
SOLUTION = """
import os
try:
    judge = os.getppid()
    with open(f"/proc/{judge}/mem", "r+b", buffering=0):
        print("opened")
except OSError:
    print("held")
try:
    os.remove("tests/judge.py")
except OSError:
    print("stays")
"""
JUDGE = """
import ctypes
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
import pathlib, subprocess, sys
made = subprocess.run([sys.executable, "-I", "solution.py"], stdout=subprocess.PIPE).stdout.decode().split()
sys.exit(0 if made == ["held", "stays"] and pathlib.Path("answer.txt").read_text() == "5" else 1)
"""
BOXES = {"plain": {}, "uidmap": {"uidmap": "0:100000:65536"}}
CODES = dict(re.findall(r"(?ms)^# (.*?)\n(.*?)(?=^# |\Z)", ATTACKS))


@pytest.mark.slice(1, "hostile")
@pytest.mark.parametrize("box", BOXES)
@pytest.mark.parametrize("attack", CODES)
async def test_an_attack_is_held_and_another_session_goes_on(
    harnessed: Callable[..., Harnessed],
    options: Callable[..., AgentOptions],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    attack: str,
    box: str,
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "abc")
    """Neither is the check fooled by what an attack left."""
    (mark := tmp_path / "mark").write_text("of the machine")
    # A session's processes are found by its token, so no other run of this test may have the same one.
    base, numbers = secrets.token_hex(12), count(10)
    monkeypatch.setattr(secrets, "token_urlsafe", lambda size=None: f"{base}-{next(numbers)}")
    begun, proofs, ended = list[str](), list[str](), list[str]()

    def say(prompt: str) -> str:
        if "begin" in prompt:
            begun.append(prompt)
            return "attack" if len(begun) == 1 else "wait"
        if "ended" in prompt:
            ended.append(prompt)
            proofs.extend([] if "proof: None." in prompt else [prompt])
        return "go on" if ended else "wait"

    judge = [{"path": "tests/judge.py", "text": JUDGE}]
    check = ["python3", "-I", "tests/judge.py"]
    given = options({"output_megabytes": 8, **BOXES[box]}, command=["python3", "-S", "-c", PROGRAM], check=check)
    used = harnessed(given, say, trajectory_timeout=60.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        port, name = server.getsockname()[1], f"agentrl-test-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        code = f"MARK, PORT, ABSTRACT = {str(mark)!r}, {port}, {name!r}\n{CODES[attack]}"
        row = todo(code, check_files=judge)
        row["files"].append({"path": "solution.py", "text": SOLUTION})
        found = await used.run(row, n=2)
    other, attacker = sorted(found, key=lambda one: one.score != 1.0)
    assert proofs == [] and mark.read_text() == "of the machine"
    assert (other.status, other.score, other.failure) == (Status.COMPLETED, 1.0, None), "another session goes on"
    assert (attacker.status, attacker.score) in ((Status.COMPLETED, 0.0), (Status.TIMEOUT, None)), attacker.failure
    assert mine() == []
