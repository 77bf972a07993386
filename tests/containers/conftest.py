"""Containers for tests: podman with runc, and a root whose programs are this machine's own. Nothing is downloaded."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.containers.contract import ContainerOptions
from tests.harnesses.conftest import IS_RIGHT, bench, chat, harnessed

__all__ = ["bench", "chat", "harnessed"]

LINE = ("podman", "--runtime", "runc")
BORROWED = ("usr", "lib", "lib64", "bin", "sbin")
EMPTY = ("etc", "proc", "dev", "sys", "tmp", "run", "work", "var", "var/tmp")


def make_root(folder: Path) -> None:
    """Make a root of empty folders, and the files that podman makes, but not in a root of other numbers."""
    for name in (*BORROWED, *EMPTY):
        (folder / name).mkdir()
    for name in ("hostname", "hosts", "resolv.conf", "passwd", "group"):
        (folder / "etc" / name).touch()
    folder.chmod(0o755)


def mounts() -> list[str]:
    """Return the words that mount this machine's programs."""
    there = [name for name in BORROWED if Path("/", name).exists()]
    return [word for name in there for word in ("--volume", f"/{name}:/{name}:ro")]


@functools.cache
def why_not() -> str | None:
    """Say why no container runs here; None where one does."""
    if os.geteuid() != 0:
        return "containers of tests need root"
    if shutil.which("podman") is None or shutil.which("runc") is None:
        return "containers of tests need podman and runc (apt-get install podman runc)"
    asked = subprocess.run([*LINE, "info"], capture_output=True, text=True, check=False)
    return None if asked.returncode == 0 else f"podman info: {asked.stderr.strip()[-300:]}"


def need_containers() -> None:
    """Skip a test where no container runs. CI as root may not skip it."""
    if (reason := why_not()) is not None:
        if os.environ.get("AGENTRL_CI") == "1" and os.geteuid() == 0:
            pytest.fail(f"CI as root must run containers: {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Root of a container: empty folders, into which those of this machine are mounted."""
    need_containers()
    folder = tmp_path_factory.mktemp("root")
    make_root(folder)
    return folder


Boxed = Callable[..., ContainerOptions]


@pytest.fixture(scope="session")
def boxed(root: Path) -> Boxed:
    """Make options of small containers."""

    def make(**more: Any) -> ContainerOptions:
        given = {"command_line": LINE, "arguments": [*mounts(), *more.pop("arguments", ())], "image": str(root)}
        small = {"memory_megabytes": 256, "disk_megabytes": 32, "processes": 64}
        return ContainerOptions(**{**given, **small, **more})

    return make


@pytest.fixture
def options(boxed: Boxed, tmp_path: Path) -> Callable[..., AgentOptions]:
    """Make options of an agent in a container, a command by default."""

    def make(box: dict[str, Any] | None = None, **more: Any) -> AgentOptions:
        given = {"start": "container", "check": IS_RIGHT, "container": boxed(**(box or {})), "train": "all"}
        return AgentOptions(**{**given, **more})

    return make


def names() -> list[str]:
    """Names of the containers that agentrl started, of any run."""
    words = [*LINE, "ps", "--all", "--filter", "label=agentrl", "--format", "{{.Names}}"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
