"""Programs of agents in containers: a command, or a harness's program, and the check of what it leaves.

The program's container has no network but the way to its own session, and no file of the check. The check runs in a
second container, from the files that were taken out of the first one when its processes had ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import cast

from agentrl.agents.agent import Agent, AgentOptions
from agentrl.agents.harness import Errand, Harness, Launch
from agentrl.agents.harness_agent import HarnessAgent, check_version
from agentrl.agents.place import CannotBeJudged, Desk, Place, Room
from agentrl.agents.process import AgentProcess
from agentrl.agents.task import AgentTask, extra
from agentrl.config.registries import CONTAINERS, HARNESSES
from agentrl.containers.contract import (
    KEY,
    Container,
    ContainerFailed,
    ContainerOptions,
    Containers,
    Spec,
    Unfit,
)
from agentrl.containers.egress import way_out
from agentrl.containers.files import merge, pack
from agentrl.containers.pool import Pool
from agentrl.errors import ConfigError, DataError
from agentrl.remote.credentials import passed_secrets
from agentrl.system.owner import own_folder, remove_left_folders
from agentrl.system.proxies import spare_own_addresses
from agentrl.system.registry import configured

ENDPOINT_PORT, PROXY_PORT = 8011, 8012
"""Ports of a container's own loopback."""
UNPACK = "tar -xf - -C /"
TAKEN = "taken.tar"
KILLED = 137
"""Status of a program that SIGKILL ended."""
TRUSTS_GIT = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""Variables with which git serves a check, though the image's repository is root's."""
HEADS = 128 << 20
"""Bytes of an archive beside the files in it: a head for each."""


def build(options: AgentOptions) -> Agent:
    """Make the agent of `openai_proxy.start=container`. Raises ConfigError, also where no container works."""
    if options.target is not None or (options.command is None and options.harness is None):
        raise ConfigError(
            "openai_proxy.start=container: set openai_proxy.command or openai_proxy.harness, and no target"
        )
    box = options.container
    if box.image is None and not box.images:
        raise ConfigError(f"openai_proxy.start=container: set {KEY}.image=NAME, or {KEY}.images for rows that name one")
    remove_left_folders()
    harness: Harness = PlainCommand()
    if options.harness is not None:
        found = cast(type[Harness], HARNESSES.get(options.harness))
        harness = configured(found, options.harness_options, "openai_proxy.harness_options")()
    program = list(options.command or [harness.program])
    containers = starter_of(box)
    if not containers.listens and box.network == "none":
        raise ConfigError(
            f"{KEY}.starter={box.starter} hands over no sockets, so its programs reach the endpoint by a network "
            f"alone; set {KEY}.network=host, and openai_proxy.host to this machine's address"
        )
    place = InContainers(containers, box, options.pass_env)
    # The caller may be on an event loop, which waits: nothing has begun yet.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, place.first(harness, program)).result()
    return HarnessAgent(harness, program, options, place)


def starter_of(box: ContainerOptions) -> Containers:
    """Make the starter that the options name. Raises ConfigError."""
    starter = cast(type[Containers], CONTAINERS.get(box.starter))
    return configured(starter, box.starter_options, f"{KEY}.starter_options")()


class PlainCommand(Harness):
    """A command that reads the row on stdin. It is given no address for scores: the check, or a scorer, judges."""

    program, install, version = "", "", ""
    takes_conversations = True

    def prepare(self, errand: Errand) -> Launch:
        return Launch([], stdin=json.dumps(errand.sample, default=str))


class InContainers(Place):
    """Containers of one starter: one for the program, and one for its check."""

    def __init__(
        self, containers: Containers, options: ContainerOptions, pass_env: Sequence[str], *, serves: bool = True
    ) -> None:
        """`serves`: programs reach their sessions of the endpoint; False: there are no sessions."""
        self.containers, self.options, self._pass_env = containers, options, tuple(pass_env)
        self._serves = serves
        self._found: set[str] = set()
        """Images that were looked for."""
        self._pool: Pool | None = None

    async def first(self, harness: Harness, program: Sequence[str]) -> None:
        """Try a first container: all parts that a session needs, and the program. Raises ConfigError."""
        await self.containers.open(self.options)
        image = self.options.image
        if image is None:
            return
        with own_folder() as folder:
            try:
                await self._find(image)
                container = await self.containers.start(self._spec(image, self._ports))
                try:
                    await self._tried(container, folder, harness, program)
                finally:
                    await container.stop()
            except ContainerFailed as error:
                raise ConfigError(f"openai_proxy.start=container: {KEY}.image={image}: {error}") from error
            finally:
                await self.containers.close()

    async def _tried(self, container: Container, folder: Path, harness: Harness, program: Sequence[str]) -> None:
        (folder / "file").touch()
        archive = folder.parent / f"{folder.name}.tar"
        await asyncio.to_thread(pack, archive, {str(folder): folder}, self.options.ids)
        try:
            await container.prepare(UNPACK, archive)
        finally:
            archive.unlink()
        if harness.program:
            words = [*program, *harness.version_arguments]
            process = await container.run(words, {"HOME": str(folder)}, str(folder), secret=folder.name, most=1 << 20)
            process.give(b"")
            await asyncio.wait_for(process.ended(), self.options.start_timeout)
            tails = "\n".join(bytes(process.tails[each]).decode(errors="replace") for each in (1, 2))
            check_version(harness, words, process.status, tails, f"in the image: {harness.install}")
        await container.settle()
        await container.take(str(folder), folder / TAKEN, 1 << 20)

    async def start(self) -> None:
        image = self.options.image
        spec = None if image is None else self._spec(image, self._ports)
        self._pool = Pool(self.containers, spec, self.options.pool)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        await self.containers.close()

    async def check(self, sample: Mapping[str, object]) -> None:
        await self._find(self._image(sample))

    @asynccontextmanager
    async def acting(self, task: AgentTask, desk: Desk) -> AsyncIterator[Room]:
        async with AsyncExitStack() as stack:
            container = await self._taken(task, self._ports)
            stack.push_async_callback(container.stop)
            base_url = task.base_url
            if ENDPOINT_PORT in self._ports:
                assert task.door is not None
                await stack.enter_async_context(task.door(container.listeners[ENDPOINT_PORT]))
                base_url = f"http://127.0.0.1:{ENDPOINT_PORT}/{task.token}/v1"
            variables = {name: os.environ[name] for name in self._pass_env if name in os.environ}
            if PROXY_PORT in self._ports:
                await stack.enter_async_context(way_out(container.listeners[PROXY_PORT], self.options.network))
                variables["HTTPS_PROXY"] = variables["https_proxy"] = f"http://127.0.0.1:{PROXY_PORT}"
            spare_own_addresses(variables)
            room = _Inside(self, container, desk, task)
            room.base_url, room.secret, room.variables = base_url, task.token, variables
            yield room

    @asynccontextmanager
    async def judging(self, task: AgentTask, desk: Desk, files: Mapping[str, str]) -> AsyncIterator[Room]:
        if not (desk.folder / TAKEN).exists():
            raise CannotBeJudged("its files could not be taken")
        container = await self._taken(task, ())
        try:
            room = _Inside(self, container, desk, task)
            room.secret, room.files = str(desk.judging), files
            room.variables = {} if self.options.workdir is None else TRUSTS_GIT
            yield room
            await room.check_is_there()
        finally:
            await container.stop()

    @property
    def _ports(self) -> tuple[int, ...]:
        network = self.options.network
        if not self.containers.listens or network == "host":
            return ()
        own = (ENDPOINT_PORT,) if self._serves else ()
        return own if network == "none" else (*own, PROXY_PORT)

    def _spec(self, image: str, ports: tuple[int, ...]) -> Spec:
        return Spec(image, self.options, tempfile.gettempdir(), ports)

    async def _taken(self, task: AgentTask, ports: tuple[int, ...]) -> Container:
        """Take a container, and count it."""
        assert self._pool is not None
        begun = time.monotonic()
        container, seconds = await self._pool.take(self._spec(self._image(task.sample), ports))
        count(task, containers=1, container_start_seconds=seconds, container_wait_seconds=time.monotonic() - begun)
        return container

    async def _find(self, image: str) -> None:
        if image not in self._found:
            await self.containers.find(image)
            self._found.add(image)

    def _image(self, sample: Mapping[str, object]) -> str:
        """Return the image of a row. Raises DataError where the config does not allow the row's image."""
        named = extra(sample, "image")
        if named is None:
            if self.options.image is None:
                raise DataError(f"extra_info.image: it names no image, and neither does {KEY}.image; set one of them")
            return self.options.image
        allowed = self.options.images
        is_name = isinstance(named, str) and not named.startswith(("/", "-"))
        if is_name and any(fnmatchcase(str(named), one) for one in allowed):
            return str(named)
        raise DataError(
            f"extra_info.image: expected an image that {KEY}.images allows ({', '.join(allowed) or 'which has none'}), "
            f"found {named!r:.200}"
        )


class _Inside(Room):
    """A container, with the files of a desk."""

    secret: str
    variables: Mapping[str, str] = {}
    files: Mapping[str, str] | None = None
    """Files of a check, which is what acts here; None: a program does."""

    def __init__(self, place: InContainers, container: Container, desk: Desk, task: AgentTask) -> None:
        self._container, self._desk, self._task, self._options = container, desk, task, place.options
        self._pass_env = place._pass_env
        self._process: AgentProcess | None = None
        self._is_filled = False
        self.work = self._options.workdir or str(desk.work)

    async def start(self, words: Sequence[str], variables: Mapping[str, str], *, key: str) -> AgentProcess:
        if not self._is_filled:
            await (self._fill() if self.files is None else self._fill_for_check(self.files))
            self._is_filled = True
        environment = {**self.variables, **variables}
        process = await self._container.run(
            words, environment, self.work, secret=self.secret, most=self._options.output_megabytes << 20
        )
        self._process = AgentProcess(process, self.secret, environment, passed_secrets(self._pass_env))
        return self._process

    async def leave(self, *, keep: bool) -> bool:
        if self._process is None:  # It could not be filled: nothing acted, and nothing is judged.
            return False
        try:
            kills = await self._container.settle()
        except Unfit:
            return True  # There are no files to judge.
        count(self._task, container_memory_kills=kills, container_overruns=self._process.process.overran)
        if keep:
            most = (self._options.disk_megabytes << 20) + HEADS
            try:
                await self._container.take(self.work, self._desk.folder / TAKEN, most)
            except Unfit:
                (self._desk.folder / TAKEN).unlink(missing_ok=True)
        return self._process.process.overran or (kills > 0 and self._process.process.status == KILLED)

    async def check_is_there(self) -> None:
        """Raise ContainerFailed where a check ended because its container ended, which the policy did not cause."""
        if self._process is not None and (self._process.process.status or 0) >= KILLED:
            with suppress(Unfit):
                await self._container.settle()

    async def _fill(self) -> None:
        desk, work = self._desk, self.work
        folders = {str(desk.home): desk.home, work: desk.work, str(desk.temporary): desk.temporary}
        script = UNPACK
        if self._options.workdir is not None:
            history = "" if self._options.history else HIDE_HISTORY
            script = f"{UNPACK}; cd {shlex.quote(work)}\n{history}\nchown -R {self._ids} ."
        await self._prepared(script, partial(pack, folders=folders, ids=self._options.ids))

    async def _fill_for_check(self, files: Mapping[str, str]) -> None:
        options, work = self._options, self.work
        hidden = frozenset((".git",) if options.workdir is not None and not options.history else ())
        home = shlex.quote(str(self._desk.judging))
        # Root runs nothing after the files are there: a folder of PATH may be among them.
        script = f"mkdir -p {home}; chown {self._ids} {home}; {UNPACK}"
        if options.workdir is not None:
            rest = "" if not hidden else "! -name .git"
            script = f"cd {shlex.quote(work)}; find . -mindepth 1 -maxdepth 1 {rest} -exec rm -rf {{}} +; {script}"
        taken, most = self._desk.folder / TAKEN, options.disk_megabytes << 20
        write = partial(merge, taken=taken, place=work, files=files, ids=options.ids, most=most, without=hidden)
        try:
            await self._prepared(script, write)
        except Unfit as error:
            raise CannotBeJudged(str(error)) from error

    async def _prepared(self, script: str, write: partial[None]) -> None:
        archive = self._desk.folder / "laid.tar"
        await asyncio.to_thread(write, archive)
        await self._container.prepare(script, archive)
        archive.unlink()

    @property
    def _ids(self) -> str:
        return "{}:{}".format(*self._options.ids)


HIDE_HISTORY = """
if [ -e .git ]; then
    find . -name .git -prune -exec rm -rf {} +
    if command -v git >/dev/null; then
        export HOME=/tmp
        chown 0:0 .  # git serves the owner alone
        git init -q .
        git add -A
        git -c user.name=agentrl -c user.email=agentrl@localhost commit -qm start
    fi
fi
"""
"""Lines of a shell that leave one commit of a repository: the row's solution may be in a later one."""


def count(task: AgentTask, **numbers: float) -> None:
    """Add to the metrics of a trajectory."""
    for name, number in numbers.items():
        task.metrics[name] = task.metrics.get(name, 0.0) + number
