"""Machines on a network of their own, made of Linux namespaces: each has its address, loopback, /tmp and processes.

What ends them is the end of their first process, so nothing is left behind however a test ends. Needs root.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

PROJECT = Path(__file__).resolve().parents[1]
SHARED = Path("/mnt")
"""Where each machine has the folder that all of them share."""
HOME = Path("/tmp/home")
"""Home and working folder on each machine, which is not shared."""
# The machine's own name is on loopback, as on Debian.
BEGIN = """
set -e
{mounts}
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
mkdir -m 1777 -p {home}
hostname {name}
printf "127.0.0.1 localhost\\n127.0.1.1 {name}\\n" > /tmp/hosts
mount --bind /tmp/hosts /etc/hosts
ip link set lo up
touch {home}/.up
while :; do sleep 1000 & wait; done
"""
UNSHARE = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
UP_WITHIN = 20.0
"""Seconds in which a machine has started."""


def why_not() -> str | None:
    """Say why there can be no machines here; None: there can."""
    if os.geteuid() != 0:
        return "namespaces and virtual network devices need root"
    hidden = [one for one in (str(PROJECT), sys.prefix) if Path(one).is_relative_to("/tmp")]
    if hidden:
        return f"each machine has a /tmp of its own, and would not see {hidden[0]}"
    tried = subprocess.run(
        [*UNSHARE, "sh", "-c", "ip link add name x type veth peer name y && ip link add name z type bridge"],
        capture_output=True,
        text=True,
    )
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()[:200]}"


class Machine:
    """One machine: the processes that `unshare` began, and theirs."""

    def __init__(self, name: str, shared: Path | None = None) -> None:
        """Start it, without a network but loopback. `shared`: the folder that it has at `SHARED`."""
        self.name = name
        mounts = f"mount --bind {shared} {SHARED}" if shared is not None else ""
        self._outer = subprocess.Popen(
            [*UNSHARE, "bash", "-c", BEGIN.format(mounts=mounts, home=HOME, name=name)],
            preexec_fn=_end_with_parent,
        )
        self.pid = self._first_process()
        """Of its first process, as the host sees it."""

    def _first_process(self) -> int:
        end = time.monotonic() + UP_WITHIN
        while time.monotonic() < end and self._outer.poll() is None:
            children = psutil.Process(self._outer.pid).children()
            if children and Path(f"/proc/{children[0].pid}/root{HOME}/.up").exists():
                return children[0].pid
            time.sleep(0.02)
        self.vanish()
        raise RuntimeError(f"machine {self.name} did not start")

    def popen(self, words: Sequence[str], env: Mapping[str, str] = {}, **options: object) -> subprocess.Popen[str]:
        """Start a command on it, in its home."""
        begun = ["nsenter", f"--target={self.pid}", "--all", "sh", "-c", f'cd {HOME} && exec "$@"', "sh", *words]
        environment = {**os.environ, "HOME": str(HOME), **env}
        return subprocess.Popen(begun, env=environment, text=True, **options)  # type: ignore[call-overload]

    def run(self, words: Sequence[str], env: Mapping[str, str] = {}, timeout: float = 120) -> str:
        """Run a command on it. Returns what it said. Raises AssertionError where it fails."""
        process = self.popen(words, env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            said, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
        assert process.returncode == 0, f"{self.name}: {' '.join(words)}\n{said}"
        return said

    def path(self, path: Path) -> Path:
        """Return where the host finds a path of the machine."""
        return Path(f"/proc/{self.pid}/root{path}")

    def vanish(self) -> None:
        """Kill all its processes at once; its network goes with them."""
        self._outer.kill()
        self._outer.wait()


class Network:
    """Machines 10.99.0.1, 10.99.0.2 and so on, joined by a bridge that is in a namespace of its own."""

    def __init__(self, names: Sequence[str], shared: Path | None = None) -> None:
        self._shared = shared
        self._switch = Machine("switch")
        self._switch.run(["sh", "-c", "ip link add name joint type bridge && ip link set joint up"])
        self.machines: dict[str, Machine] = {}
        self.addresses = {name: f"10.99.0.{number}" for number, name in enumerate(names, 1)}
        for name in names:
            self.start(name)

    def start(self, name: str) -> Machine:
        """Start a machine, for the first time or after it vanished, and connect it."""
        machine = self.machines[name] = Machine(name, self._shared)
        end = f"to-{name}"
        # Of a machine that has just vanished the kernel may still be taking the network down.
        self._switch.run(["sh", "-c", f"ip link delete {end} 2> /dev/null || true"])
        pair = f"ip link add name eth0 type veth peer name {end} netns {self._switch.pid}"
        # In its network, but with the process ids of the host.
        subprocess.run(["nsenter", f"--target={machine.pid}", "--net", *pair.split()], check=True)
        machine.run(["ip", "address", "add", f"{self.addresses[name]}/24", "dev", "eth0"])
        machine.run(["ip", "link", "set", "eth0", "up"])
        self._switch.run(["sh", "-c", f"ip link set {end} master joint && ip link set {end} up"])
        return machine

    def cut(self, name: str) -> None:
        """Take a machine off the network; its processes go on."""
        self._switch.run(["ip", "link", "set", f"to-{name}", "down"])

    def mend(self, name: str) -> None:
        """Connect it again."""
        self._switch.run(["ip", "link", "set", f"to-{name}", "up"])

    def close(self) -> None:
        """End all machines."""
        for machine in [*self.machines.values(), self._switch]:
            machine.vanish()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
