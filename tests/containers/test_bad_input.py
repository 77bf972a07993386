"""What is not there or does not work: each message says what, where, and what to type."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.agents.agent import AgentOptions
from agentrl.agents.container import build
from agentrl.config.registries import AGENT_STARTERS
from agentrl.config.sections.rollout import OpenAIProxyConfig
from agentrl.containers.command_line import CommandLine, OCIContainer, _listen
from agentrl.containers.contract import ContainerFailed, ContainerOptions, Spec
from agentrl.errors import ConfigError
from tests.containers.conftest import LINE, names, need_containers
from tests.containers.test_sessions import COMMAND, WRITES, mine, todo
from tests.harnesses.conftest import Harnessed
from tests.naming import Names, assert_names, naming
from tests.small_disk import small_disk_in
from tests.waiting import until

Options = Callable[..., AgentOptions]


def script(file: Path, text: str) -> list[str]:
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return [str(file)]


@pytest.mark.parametrize("said", ["Cannot connect to the Docker daemon at unix:///var/run/docker.sock.", ""])
def test_a_client_whose_daemon_does_not_answer(tmp_path: Path, said: str) -> None:
    line = script(tmp_path / "docker", f"echo Client:; echo '{said}' >&2; exit 1")
    with naming(ConfigError, "docker info", "apt-get", "container.command_line"):
        build(AgentOptions(command=COMMAND, container={"command_line": line, "image": "x"}))


def test_a_call_that_a_stop_cuts_off_leaves_no_pipe_to_the_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    line = script(tmp_path / "podman", f'[ "$1" = image ] || exit 0; sleep 3600 & echo $! >{began}; wait')

    async def cut_off() -> None:
        starter = CommandLine()
        await starter.open(ContainerOptions(command_line=line))
        calling = asyncio.create_task(starter.find("x"))
        await until(lambda: began.exists() and began.read_text() != "")
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling

    ignored: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    asyncio.run(cut_off())
    gc.collect()
    os.kill(int(began.read_text()), signal.SIGKILL)  # it holds the pipes, as a container's monitor does
    assert not ignored


def test_no_command_line_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "docker", "echo 'Cannot connect to the daemon' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with naming(ConfigError, "podman:", "PATH", "`docker info`"):
        build(AgentOptions(command=COMMAND, container={"image": "x"}))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"container": {}}, r"container\.image=NAME"),
        ({"command": None}, r"openai_proxy\.command or openai_proxy\.harness"),
    ],
)
def test_half_of_the_keys(given: dict[str, Any], said: str) -> None:
    assert AGENT_STARTERS.get("container") is build
    with pytest.raises(ConfigError, match=said):
        build(AgentOptions(**{"command": COMMAND, "container": {"image": "x"}, **given}))


@pytest.mark.parametrize("handed", [(), (0,), (0, 1, 1), (1, 0), (0, "file")])
async def test_an_image_that_hands_over_other_descriptors(tmp_path: Path, handed: tuple[int | str, ...]) -> None:
    """The python3 of an image may be anything; what it hands over is closed."""
    receiver = _listen(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = tuple(each.getsockname()[1] for each in (one, two))
        given = [0 if each == "file" else (one, two)[int(each)].fileno() for each in handed]
        box = OCIContainer(CommandLine(), "mine", Spec("x", ContainerOptions(), "/tmp", ports))
        with socket.socket(socket.AF_UNIX) as way:
            way.connect(str(tmp_path / "socket"))
            socket.send_fds(way, [b"."], given)
            before = len(list(Path("/proc/self/fd").iterdir()))
            with receiver, naming(ContainerFailed, f"hands over {len(given)} descriptors", "python3 of its image"):
                await box._receive(receiver)
        for listener in (*box.listeners.values(), box._link):
            assert listener is not None
            listener.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before - 2, "those of the receiver and of its peer"


SOCKETLESS = """
from agentrl.containers.contract import Containers

class Mine(Containers):
    async def open(self, options): ...
    async def find(self, image): ...
    async def start(self, spec): ...
    async def close(self): ...
"""


def test_a_starter_that_hands_over_no_sockets_needs_a_network(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SOCKETLESS)
    box = {"image": "x", "starter": f"{tmp_path}/mine.py:Mine"}
    with pytest.raises(ConfigError, match=r"container\.network=host, and openai_proxy\.host"):
        build(AgentOptions(command=COMMAND, container=box))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"container": {"user": "root"}}, "1000:1000"),
        ({"container": {"network": "bridge"}}, "none, host"),
        ({"container": {"network": ["https://pypi.org"]}}, "pypi.org:443"),
        ({"container": {"workdir": "testbed"}}, "absolute path"),
        ({"container": {"workdir": "/a:/b"}}, "absolute path"),
    ],
)
def test_values_of_another_form(given: dict[str, Any], said: Names) -> None:
    with naming(ValidationError, said):
        OpenAIProxyConfig.model_validate(given)


def test_root_needs_a_map_of_users() -> None:
    given = OpenAIProxyConfig.model_validate({"container": {"user": "0:0"}})
    assert [finding.text for finding in given.container.findings() if "uidmap" in finding.text]
    given = OpenAIProxyConfig.model_validate({"container": {"user": "0:0", "uidmap": "0:100000:65536"}})
    assert not list(given.container.findings())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Make images of nothing but folders."""
    need_containers()
    made: list[str] = []

    def make(*words: str, folders: tuple[str, ...] = ("usr", "lib", "lib64", "bin", "tmp", "run")) -> str:
        archive = tmp_path_factory.mktemp("image") / "image.tar"
        with tarfile.open(archive, "w") as out:
            for name in folders:
                member = tarfile.TarInfo(name)
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                out.addfile(member)
        name = f"localhost/agentrl-test-{os.getpid()}-{len(made)}"
        subprocess.run([*LINE, "import", *words, str(archive), name], check=True, capture_output=True)
        made.append(name)
        return name

    yield make
    for name in made:
        subprocess.run([*LINE, "rmi", "--force", name], check=True, capture_output=True)


def refused(options: AgentOptions) -> str:
    with pytest.raises(ConfigError) as raised:
        build(options)
    assert mine() == []
    return str(raised.value)


def test_an_image_that_is_not_there(options: Options) -> None:
    said = refused(options({"image": "localhost/nothing:1"}, command=COMMAND))
    assert_names(said, "container.image=localhost/nothing:1", "--runtime", "localhost/nothing:1")
    said = refused(options({"image": "/no/folder"}, command=COMMAND))
    assert_names(said, "container.image=/no/folder", "no such folder")


def test_an_image_of_another_machine(options: Options, images: Callable[..., str]) -> None:
    said = refused(options({"image": (name := images("--arch", "riscv64"))}, command=COMMAND))
    assert f"{name!r} is for riscv64" in said and "pull --platform linux/" in said


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize(
    ("left_out", "said"), [("python3", "no python3.*network=host"), ("sh", "no sh,"), ("tar", "no tar,")]
)
def test_an_image_without_a_program(
    options: Options, images: Callable[..., str], tmp_path: Path, left_out: str, said: str
) -> None:
    """The image has a folder of links to this machine's programs, without one of them."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in {"python3", "sh", "tar", "chmod", "cat", "kill"} - {left_out}:
        (programs / name).symlink_to(f"/usr/bin/{name}")
    mounts = ["--volume", f"{programs}:/bin:ro", "--env", "PATH=/bin"]
    folders = [word for name in ("usr", "lib", "lib64") for word in ("--volume", f"/{name}:/{name}:ro")]
    box = {"image": images(), "arguments": mounts}
    given = options(box, command=COMMAND)
    given = given.model_copy(
        update={"container": given.container.model_copy(update={"arguments": [*folders, *mounts]})}
    )
    assert re.search(said, refused(given))


@pytest.mark.slice(0, "kill")
def test_a_full_disk(options: Options) -> None:
    need_containers()
    # podman takes short paths alone.
    with tempfile.TemporaryDirectory() as folder, small_disk_in(Path(folder), "8m") as disk:
        line = [*LINE, "--root", f"{disk}/root", "--runroot", f"{disk}/run"]
        try:
            subprocess.run([*line, "info"], check=True, capture_output=True)
            subprocess.run(["dd", "if=/dev/zero", f"of={disk}/full"], capture_output=True)
            said = refused(options({"command_line": line}, command=COMMAND))
        finally:
            subprocess.run(["umount", "--quiet", f"{disk}/root/overlay"], check=False)  # podman's own
    assert "free space" in said and f"{' '.join(line)} system df" in said


@pytest.mark.slice(0, "matrix")
def test_a_harness_whose_program_the_image_lacks(options: Options, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LACKING)
    said = refused(options(harness=f"{tmp_path}/mine.py:Mine"))
    assert "not-in-the-image" in said and "pip install not-in-the-image==1.0" in said and "image" in said


LACKING = """
from agentrl.agents.harness import Harness, Launch

class Mine(Harness):
    program = "not-in-the-image"
    install = "pip install not-in-the-image==1.0"
    version = "1.0"

    def prepare(self, errand):
        return Launch([])
"""


@pytest.mark.slice(0, "kill")
async def test_a_container_that_does_not_stop_is_named_and_the_run_goes_on(
    harnessed: Callable[..., Harnessed],
    options: Options,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = script(tmp_path / "podman", f'case "$1" in rm|kill) exit 1;; esac; exec {" ".join(LINE)} "$@"')
    used = harnessed(options({"command_line": line}, command=COMMAND), lambda prompt: "5")
    (found,) = await used.run(todo(WRITES))
    left = mine()
    subprocess.run([*LINE, "rm", "--force", *left], check=True, capture_output=True)
    assert found.score == 1.0 and len(left) == 3
    assert all(f"Type: {line[0]} rm --force {name}" in caplog.text for name in left) and not set(left) & set(names())


@pytest.mark.slice(0, "kill")
async def test_an_error_of_a_later_start_is_one_of_the_infrastructure(
    harnessed: Callable[..., Harnessed], options: Options, tmp_path: Path
) -> None:
    """The first container works, and later ones do not: the row is tried again, and left out."""
    count = tmp_path / "count"
    fails = f"echo x >>{count}; [ $(wc -l <{count}) = 1 ] || {{ echo no space left >&2; exit 125; }}"
    line = script(tmp_path / "podman", f'[ "$1" != run ] || {{ {fails}; }}\nexec {" ".join(LINE)} "$@"')
    used = harnessed(options({"command_line": line}, command=COMMAND), lambda prompt: "5", max_retries=1)
    (found,) = await used.run(todo(WRITES))
    assert found.failure is not None and "system df" in found.failure and count.read_text() == "x\n" * 3
