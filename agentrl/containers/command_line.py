"""Containers by an OCI command line: podman, docker, or words of yours.

The first process of a container with ports is a program of Python's standard library: it listens at its own loopback
and hands the listening sockets to this process, through a Unix socket in a folder that is mounted. From then on the
container's connections are accepted here, though it has no network. The first process ends with that Unix socket's
connection, and the container with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import platform
import re
import resource
import shlex
import shutil
import socket
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import IO

from agentrl.containers.contract import KEY, Container, ContainerFailed, ContainerOptions, Containers, Spec, Unfit
from agentrl.containers.files import Heads
from agentrl.errors import ConfigError
from agentrl.system.cancellation import completed
from agentrl.system.owner import PREFIX, is_left, new_folder, new_name, remove, remove_left_folders
from agentrl.system.processes import Process, SharedProcess

logger = logging.getLogger(__name__)

KNOWN = (("podman",), ("docker",))
INFO_SECONDS = 30.0
STOP_SECONDS = 120.0
"""Seconds for a removal. On two cores with a load of 110, removals took more than 30."""
MOST_SAID = 1 << 20
"""Bytes of a call's output that are kept."""
LOOK_SECONDS = 2.0
"""Seconds after which a container that hands over no sockets is looked at."""
MOST_TASKS, MOST_FILES = 32768, 8192
"""Limits of a user's processes, who is the same in all containers, and of a process's open files."""
FILLS = ("CHOWN", "DAC_OVERRIDE", "FOWNER")
"""Capabilities of a container's root, by which it fills it; its programs are the image's own."""
CAPABILITIES = (
    *("CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP"),
    *("LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER"),
    *("SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE"),
    *("SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP"),
    *("MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF"),
    "CHECKPOINT_RESTORE",
)
"""The kernel's capabilities, by number."""
WAY = "/run/agentrl"
"""Folder in the container with the Unix socket."""
PASSED = (
    *("PATH", "HOME", "USER", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "CONTAINERS_CONF"),
    *("CONTAINERS_STORAGE_CONF", "CONTAINER_HOST", "DBUS_SESSION_BUS_ADDRESS"),
    *("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"),
)
"""Variables of the trainer that the command line sees. They do not reach a container."""
LISTENER = """
import array, os, signal, socket, sys
try:  # Programs of the same user cannot look into this process, or make it act for them.
    import ctypes
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
except Exception:
    pass
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for number in (signal.SIGTERM, signal.SIGINT):  # A program within ends this process by no signal.
    signal.signal(number, signal.SIG_IGN)
listeners = []
for port in sys.argv[2:]:
    listeners.append(socket.socket())
    listeners[-1].bind(("127.0.0.1", int(port)))
    listeners[-1].listen(128)
way = socket.socket(socket.AF_UNIX)
way.connect(sys.argv[1])
handed = array.array("i", [one.fileno() for one in listeners])
way.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handed)])
for one in listeners:
    one.close()
way.recv(1)  # until the other side is gone
"""
SLEEPER = "trap '' TERM INT; while :; do sleep 3600 & wait $!; done"
SETTLE = (
    "kill -KILL -1 2>/dev/null; "
    "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null; true"
)
TAKE = 'chmod -R u+rwX "$1" 2>/dev/null; exec tar -cf - -C "$1" .'
"""Line that makes an archive, also of folders that a program has locked."""
BY_THE_LINE = 125
"""Lowest status with which the command line tells of errors of its own."""
BY_SIGNAL = range(129, 193)
"""Statuses of programs that a signal ended."""
FROM_THE_IMAGE = (
    *("--env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/sbin:/usr/local/bin"),
    *("--env", "LD_LIBRARY_PATH="),
    *("--env", "LD_PRELOAD="),
)
"""Variables of what runs after a program: the image's own may name a folder that the program could write to."""
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Names of architectures that images use, and those of this system."""


class EndedBySignal(ContainerFailed):
    """A command in a container that a signal ended, e.g. by the memory limit, or by folders too deep for it."""


class CommandLine(Containers):
    """Containers by `podman`, `docker` or another command line with the same words."""

    listens = True

    def __init__(self) -> None:
        self._words: list[str] = []
        self.is_podman = False
        """False: docker, or one that is taken for it."""
        self._options = ContainerOptions()
        self._ending: set[asyncio.Task[None]] = set()
        self._environment = {name: os.environ[name] for name in PASSED if name in os.environ}
        self._folder: Path | None = None

    async def open(self, options: ContainerOptions) -> None:
        self._options = options
        tried = [list(options.command_line)] if options.command_line is not None else [list(one) for one in KNOWN]
        problems = []
        for words in tried:
            if "/" in words[0]:  # The command line does not work in this process's folder.
                words[0] = str(Path(words[0]).absolute())
            if (problem := await self._answers(words)) is None:
                self._words = words
                break
            problems.append(problem)
        else:
            raise ConfigError(
                f"openai_proxy.start=container: no OCI command line answers: {'; '.join(problems)}. Install one (e.g. "
                f"apt-get install podman runc), start its daemon, or name another: {KEY}.command_line=[podman,--remote]"
            )
        await self._remove_left()

    async def find(self, image: str) -> None:
        if image.startswith("/"):
            if not Path(image).is_dir():
                raise ContainerFailed(f"{KEY}.image={image}: no such folder. A folder is the root of a container")
            return
        form = "{{.Architecture}}"
        status, said = await self._call("image", "inspect", "--format", form, image)
        if status != 0:
            words = "build --tag {} FOLDER" if image.startswith("localhost/") else "pull {}"
            pull = f"type: {self._shown} {words.format(shlex.quote(image))}"
            raise ContainerFailed(f"image {image!r} is not on this machine, and a run downloads none; {pull}")
        made_for, ours = said.strip(), platform.machine()
        if made_for and MACHINES.get(made_for, made_for) != ours:
            raise ContainerFailed(
                f"image {image!r} is for {made_for}, and this machine is {ours}; type: {self._shown} pull --platform "
                f"linux/{next((name for name, one in MACHINES.items() if one == ours), ours)} {shlex.quote(image)}"
            )

    async def start(self, spec: Spec) -> Container:
        container = OCIContainer(self, new_name(), spec)
        beginning = asyncio.ensure_future(container.begin())
        try:
            await asyncio.shield(beginning)
        except BaseException:
            self.later(_undo(beginning, container))
            raise
        return container

    async def close(self) -> None:
        await asyncio.gather(*self._ending)
        if self._folder is not None:
            remove(self._folder)
            self._folder = None

    @property
    def _here(self) -> Path:
        """Working folder of the command line: podman's conmon leaves notes in it."""
        if self._folder is None:
            self._folder = new_folder()
        return self._folder

    def later(self, ending: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Have something ended that nobody may wait for; `close` does."""
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def call(self, what: str, *words: str, stdin: Path | None = None, folder: Path | None = None) -> str:
        """Run the command line to its end, in `folder`; return its output. Raises ContainerFailed."""
        status, said = await self._call(*words, stdin=stdin, folder=folder)
        if status != 0:
            raise self._failed(what, status, said)
        return said

    async def _call(
        self,
        *words: str,
        stdin: Path | None = None,
        seconds: float | None = None,
        line: Sequence[str] = (),
        folder: Path | None = None,
    ) -> tuple[int, str]:
        """Run the command line to its end; return its status, and its output or, where it failed, its errors."""
        seconds = self._options.start_timeout if seconds is None else seconds
        with (stdin or Path(os.devnull)).open("rb") as given:
            async with self._begun(*(line or self._words), *words, stdin=given, folder=folder) as (
                process,
                stdout,
                stderr,
            ):
                try:
                    async with asyncio.timeout(seconds):
                        out, err = await asyncio.gather(_read(stdout), _read(stderr))
                        status = await process.wait()
                except TimeoutError:
                    return -1, f"no end after {seconds:g} s"
        return status, (out if status == 0 else err or out).decode(errors="replace")

    @contextlib.asynccontextmanager
    async def _begun(
        self, *words: str, stdin: IO[bytes] | int = asyncio.subprocess.DEVNULL, folder: Path | None = None
    ) -> AsyncIterator[tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamReader]]:
        """Start a command in its folder and environment, with its stdout and stderr; kill it when this is left."""
        starting = asyncio.create_subprocess_exec(
            *words,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            cwd=folder or self._here,
            start_new_session=True,
        )
        process = await completed(starting, lambda one: one._transport.close())  # type: ignore[attr-defined]
        assert process.stdout is not None and process.stderr is not None
        try:
            yield process, process.stdout, process.stderr
        finally:
            process._transport.close()  # type: ignore[attr-defined]  # kills it; its pipes wait for no collector

    async def run(self, words: Sequence[str], environment: Mapping[str, str], secret: str, most: int) -> Process:
        """Start the command line, and do not wait for it."""
        known = {**environment, **self._environment}
        return await SharedProcess.start([*self._words, *words], known, secret, folder=self._here, most=most)

    async def stream(self, words: Sequence[str], out: Path, most: int) -> None:
        """Write the archive that the command line puts out to a file. Raises ContainerFailed."""
        try:
            async with (
                self._begun(*self._words, *words) as (process, stdout, stderr),
                asyncio.timeout(self._options.start_timeout),
            ):
                size, heads = 0, Heads()
                with out.open("wb") as file:
                    while piece := await stdout.read(1 << 20):
                        size += len(piece)
                        if size > most:
                            raise Unfit(f"its files have more than {most >> 20} MiB ({KEY}.disk_megabytes)")
                        heads.read(piece)
                        await asyncio.to_thread(file.write, piece)
                said = (await _read(stderr)).decode(errors="replace")
                if (status := await process.wait()) != 0:
                    raise self._failed("taking its files", status, said)
        except TimeoutError as error:
            raise ContainerFailed(f"taking its files took more than {KEY}.start_timeout") from error

    async def remove(self, name: str) -> None:
        """Remove a container by force. A container that stays is named in the log, with the command to type."""
        for words in (("rm", "--force", "--volumes", name), ("kill", name), ("rm", "--force", "--volumes", name)):
            status, said = await self._call(*words, seconds=STOP_SECONDS)
            if words[0] == "rm" and (status == 0 or "no such container" in said.lower()):
                return
        logger.warning("container %s does not stop: %s. Type: %s rm --force %s", name, said.strip(), self._shown, name)

    @property
    def words(self) -> Sequence[str]:
        """The words of the command line that answered."""
        return self._words

    @property
    def _shown(self) -> str:
        return shlex.join(self._words)

    async def _answers(self, words: list[str]) -> str | None:
        """Say why a command line is not one that works; None where it does."""
        if shutil.which(words[0]) is None:
            return f"{words[0]}: not on PATH"
        try:
            status, said = await self._call("info", seconds=INFO_SECONDS, line=words)
        except OSError as error:
            return f"{words[0]}: {error}"
        self.is_podman = status == 0 and "buildahVersion" in said
        # docker's client prints what it knows of itself, and ends with status 0 or 1.
        errors = re.findall(r"(?im)^.*(?:error|cannot|refused).*$", said) if status != 0 else []
        return None if status == 0 else f"`{shlex.join(words)} info`: {(errors or [said])[-1].strip()[-300:]}"

    async def _remove_left(self) -> None:
        """Remove the containers whose trainer is gone, as after a SIGKILL, and their folders."""
        said = await self.call(
            "listing containers", "ps", "--all", "--filter", f"label={PREFIX}", "--format", "{{.Names}}"
        )
        left = [name for name in said.split() if is_left(name)]
        await asyncio.gather(*map(self.remove, left))
        if left:
            logger.warning("%d containers that a killed run left are removed: %s ...", len(left), left[0])
        remove_left_folders()

    def _failed(self, what: str, status: int, said: str) -> ContainerFailed:
        """Make the error of a status: an error of the program in a container, or of the command line itself."""
        kind = Unfit if 0 < status < BY_THE_LINE else EndedBySignal if status in BY_SIGNAL else ContainerFailed
        return kind(f"{what}: {self._explained(status, said)}")

    def _explained(self, status: int, said: str) -> str:
        """Add the remedy to an error of the command line."""
        said = said.strip()[-1000:]
        low = said.lower()
        if missing := re.search(r'exec: \\?"(python3|sh|tar)\\?"|(python3|sh|tar):? not found', said):
            program = missing[1] or missing[2]
            why = {"python3": "to reach the endpoint without a network (3.3 or newer)", "tar": "to move files"}
            hint = f"the image has no {program}, which is needed {why.get(program, 'to start programs')}: add it"
            if program == "python3":
                hint += f", or set {KEY}.network=host"
        elif "exec format error" in low:
            hint = f"the image is for another machine than {platform.machine()}: pull or build it for this one"
        elif "no space left" in low:
            hint = f"free space where it keeps containers; {self._shown} system df shows what takes it"
        elif "not known" in low or "no such image" in low:
            hint = f"{self._shown} pull it first: a run downloads nothing"
        else:
            return f"{self._shown} ended with status {status}: {said or 'it wrote nothing'}"
        return f"{hint} ({said})"


class OCIContainer(Container):
    """Container of a command line."""

    def __init__(self, line: CommandLine, name: str, spec: Spec) -> None:
        self.name, self._line, self._spec = name, line, spec
        self.listeners: dict[int, socket.socket] = {}
        self._link: socket.socket | None = None
        """Connection to its first process, which ends with it: also where this process is killed."""
        self._folder: Path | None = None
        """Folder of its start, where podman's conmon notes by a file `oom` that memory has ended its first process."""

    async def begin(self) -> None:
        """Start it."""
        spec, options = self._spec, self._spec.options
        main, mounts = ["sh", "-c", SLEEPER], list[str]()
        self._folder = new_folder()
        with contextlib.ExitStack() as stack:
            receiver: socket.socket | None = None
            if spec.ports:
                # Nobody else on this machine comes through the folder around the socket's.
                door = self._folder / "way"
                door.mkdir()
                door.chmod(0o755)
                receiver = stack.enter_context(_listen(door))
                main = ["python3", "-S", "-c", LISTENER, f"{WAY}/socket", *map(str, spec.ports)]
                mounts = ["--volume", f"{door}:{WAY}:ro"]
            is_root = spec.image.startswith("/")
            image = ["--rootfs", f"{spec.image}:O"] if is_root else ["--pull", "never", spec.image]
            words = ["run", "--detach", "--name", self.name, "--label", PREFIX, *mounts]
            words += _limits(options, spec.folder, self._line.is_podman)
            words += [*options.arguments, "--entrypoint", main[0], *image, *main[1:]]
            await self._line.call(f"starting a container of {spec.image}", *words, folder=self._folder)
            if receiver is not None:
                await self._receive(receiver)

    async def _receive(self, receiver: socket.socket) -> None:
        """Take over the container's listening sockets."""
        handing = asyncio.create_task(_accept(receiver))
        try:
            for _ in range(max(int(self._spec.options.start_timeout / LOOK_SECONDS), 1)):
                await asyncio.wait({handing}, timeout=LOOK_SECONDS)
                if handing.done() or await self._line.call("looking at it", *self._running) != "true\n":
                    break
            if not handing.done():
                said = await self._line.call("reading its log", "logs", self.name)
                raise ContainerFailed(f"{self.name} ended, or hands over no sockets: {said.strip() or 'no output'}")
        finally:
            handing.cancel()
        self._link, handles = handing.result()
        ports = self._spec.ports
        listeners = [_listener(*one) for one in itertools.zip_longest(handles, ports)]
        self.listeners = {port: one for port, one in zip(ports, listeners, strict=False) if one is not None}
        if len(self.listeners) < max(len(ports), len(handles)):
            raise ContainerFailed(
                f"{self.name} hands over {len(handles)} descriptors, not one socket that listens at each of "
                f"{', '.join(map(str, ports))}; look at the python3 of its image"
            )

    @property
    def _running(self) -> tuple[str, ...]:
        return "inspect", "--format", "{{.State.Running}}", self.name

    @property
    def _enter(self) -> tuple[str, ...]:
        return "exec", "--user", self._spec.options.user

    async def prepare(self, script: str, archive: Path | None = None) -> None:
        rights = ["--privileged"] if self._spec.options.ids[0] == 0 else []  # Else it has FILLS.
        words = ["--user", "0:0", *rights, "--interactive", self.name]
        words += ["sh", "-ec", f"chmod 1777 {shlex.quote(self._spec.folder)}; {script}"]
        async with self._blamed():
            await self._line.call("filling a container", "exec", *words, stdin=archive)

    async def run(
        self, words: Sequence[str], environment: Mapping[str, str], folder: str, *, secret: str, most: int
    ) -> Process:
        # Values come from the client's own environment: its command line is everybody's to read. Some it needs itself.
        needed = {name: value for name, value in environment.items() if name in PASSED}
        named = [
            word for name in environment for word in ("--env", f"{name}={needed[name]}" if name in needed else name)
        ]
        given = [*self._enter, "--interactive", "--workdir", folder, *named, self.name, *words]
        return await self._line.run(given, environment, secret, most)

    async def settle(self) -> int:
        async with self._blamed():
            words = (*self._enter, *FROM_THE_IMAGE, self.name, "sh", "-c", SETTLE)
            said = await self._line.call("ending its processes", *words)
        counts = re.findall(r"(?m)^oom_kill (\d{1,9})$", said)
        return int(counts[0]) if counts else 0

    async def take(self, folder: str, archive: Path, most: int) -> None:
        async with self._blamed():
            words = (*self._enter, *FROM_THE_IMAGE, self.name, "sh", "-c", TAKE, "sh", folder)
            await self._line.stream(words, archive, most)

    @contextlib.asynccontextmanager
    async def _blamed(self) -> AsyncIterator[None]:
        """Raise Unfit for a failure that is due to what the program did or left."""
        try:
            yield
        except Unfit:
            raise
        except ContainerFailed as error:
            if await self._is_its_doing(isinstance(error, EndedBySignal)):
                raise Unfit(f"the program, or its files: {error}") from error
            raise

    async def _is_its_doing(self, by_signal: bool) -> bool:
        """Say whether its program ended it, or left what a signal ends commands for.

        Its first process takes no SIGKILL from within, but memory's end is one.
        """
        if by_signal:
            await asyncio.sleep(LOOK_SECONDS)  # Where all of it was killed, that is known by then.
        form = "{{.State.Running}} {{.State.OOMKilled}} {{.State.ExitCode}}"
        said = await self._line.call("looking at it", "inspect", "--format", form, self.name)
        running, by_memory, status = said.split()
        if running == "true":
            return by_signal
        is_noted = self._folder is not None and (self._folder / "oom").exists()
        return by_memory == "true" or is_noted or status != "137"

    async def stop(self) -> None:
        for one in (*self.listeners.values(), self._link):
            if one is not None:
                one.close()
        await asyncio.shield(self._line.later(self._removed()))

    async def _removed(self) -> None:
        await self._line.remove(self.name)
        if self._folder is not None:
            await asyncio.to_thread(remove, self._folder)


def _limits(options: ContainerOptions, folder: str, is_podman: bool) -> list[str]:
    """Write the words of `run` that hold a container's program."""
    room = f"rw,exec,nosuid,nodev,size={options.disk_megabytes}m,mode=1777"
    memory = f"{options.memory_megabytes}m"
    # Both limits are given: without them the highest ones are asked for, which not every root may have.
    tasks, files = (
        _hard(kind, most) for kind, most in ((resource.RLIMIT_NPROC, MOST_TASKS), (resource.RLIMIT_NOFILE, MOST_FILES))
    )
    words = [
        *_rights(options, is_podman),
        *("--security-opt", "no-new-privileges", "--read-only"),
        *("--network", "host" if options.network == "host" else "none"),
        *("--memory", memory, "--memory-swap", memory, "--cpus", f"{options.cpus:g}"),
        *("--pids-limit", str(options.processes)),
        *("--ulimit", f"nproc={tasks}:{tasks}", "--ulimit", f"nofile={files}:{files}", "--ulimit", "core=0:0"),
        *("--log-driver", "json-file", "--log-opt", "max-size=64k", "--stop-timeout", "0"),
        *("--tmpfs", f"{folder}:{room}"),
    ]
    if options.workdir is not None:
        words += ["--tmpfs", f"{options.workdir}:{room},tmpcopyup"]
    return words + (["--uidmap", options.uidmap] if options.uidmap is not None else [])


def _rights(options: ContainerOptions, is_podman: bool) -> list[str]:
    """Write the words of `run` by which root has FILLS, and another user nothing. Where the user is root, it has none.

    podman would give the first process's user what is added, so all others are dropped by name. docker gives root
    nothing in a container that another user began, so root begins it.
    """
    if options.ids[0] == 0:
        return ["--cap-drop", "all", "--user", options.user]
    if not is_podman:
        return ["--cap-drop", "all", *(word for name in FILLS for word in ("--cap-add", name)), "--user", "0:0"]
    known = int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1
    dropped = (word for name in CAPABILITIES[:known] if name not in FILLS for word in ("--cap-drop", name))
    return [*dropped, "--user", options.user]


async def _read(stream: asyncio.StreamReader) -> bytes:
    """Read all of a stream, and keep as much as is needed: a hostile program may be at its other end."""
    kept = bytearray()
    while piece := await stream.read(1 << 16):
        kept += piece[: MOST_SAID - len(kept)]
    return bytes(kept)


def _hard(kind: int, most: int) -> int:
    limit = resource.getrlimit(kind)[1]
    return most if limit == resource.RLIM_INFINITY else min(limit, most)


def _listen(folder: Path) -> socket.socket:
    """Listen at a Unix socket in a folder, whose path may be too long for its address."""
    listener = socket.socket(socket.AF_UNIX)
    handle = os.open(folder, os.O_PATH)
    try:
        listener.bind(f"/proc/self/fd/{handle}/socket")
    finally:
        os.close(handle)
    (folder / "socket").chmod(0o666)
    listener.listen(1)
    listener.setblocking(False)
    return listener


async def _accept(receiver: socket.socket) -> tuple[socket.socket, list[int]]:
    """Take the first connection, and the descriptors that it brings."""
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(receiver)
    is_there = asyncio.Event()
    loop.add_reader(connection, is_there.set)
    try:
        await is_there.wait()
        loop.remove_reader(connection)
        return connection, list(socket.recv_fds(connection, 1, 8)[1])
    except BaseException:
        loop.remove_reader(connection)
        connection.close()
        raise


def _listener(handle: int | None, port: int | None) -> socket.socket | None:
    """Take over a descriptor if it is a socket that listens at a port of the loopback; else close it, and give None."""
    if handle is None:
        return None
    try:
        listener = socket.socket(fileno=handle)
    except OSError:  # no socket at all
        os.close(handle)
        return None
    is_listening = listener.family is socket.AF_INET and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if is_listening and listener.getsockname() == ("127.0.0.1", port):
        listener.setblocking(False)
        return listener
    listener.close()
    return None


async def _undo(beginning: asyncio.Future[None], container: OCIContainer) -> None:
    """Remove a container that nobody wants. Its start is waited for: a daemon continues when its client is gone."""
    await asyncio.wait({beginning})
    if not beginning.cancelled():
        beginning.exception()
    await container.stop()
