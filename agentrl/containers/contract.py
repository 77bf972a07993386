"""The contract of a starter of containers: an OCI command line, or one of yours for Kubernetes, Modal or Daytona.

A container is started, filled by root, used by one program of a user without rights, emptied and stopped. Nothing of it
is used again.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field

from agentrl.errors import InfrastructureError
from agentrl.system.processes import Process

KEY = "openai_proxy.container"


class ContainerFailed(InfrastructureError):
    """A container that could not be started, filled or emptied."""


class Unfit(ContainerFailed):
    """Files of a program that cannot be taken out, or laid in: too many bytes, or names that are too long."""


class ContainerOptions(BaseModel, frozen=True):
    """The keys `openai_proxy.container.*`."""

    starter: str = "command_line"
    """Name of the starter in `agentrl.config.registries.CONTAINERS`."""
    starter_options: Mapping[str, object] = {}
    """Options of a starter of yours."""
    command_line: Sequence[str] | None = None
    """Words of the OCI command line; None: podman or docker, whichever answers."""
    arguments: Sequence[str] = ()
    """Further words of its `run`."""
    image: str | None = None
    """Image, or the absolute path of a folder that is the root."""
    images: Sequence[str] = ()
    """Patterns of images that rows may name."""
    workdir: str | None = None
    """Folder of the image in which the program works."""
    history: bool = False
    """True: `.git` of that folder stays."""
    pool: int = 0
    """Containers that are started ahead."""
    memory_megabytes: int = 2048
    """MiB of memory."""
    cpus: float = 1.0
    """Cores."""
    processes: int = 256
    """Processes and threads."""
    disk_megabytes: int = 1024
    """MiB of each folder that can be written to, and of the files that are taken out."""
    output_megabytes: int = 64
    """MiB that the program may print."""
    network: str | Sequence[str] = "none"
    """`none`, `host`, or hosts that are reached by a proxy."""
    user: str = "1000:1000"
    """Number of the user and the group."""
    uidmap: str | None = None
    """Map of the container's users to those of the machine."""
    start_timeout: float = Field(60.0, gt=0)
    """Seconds that a start, and each step of filling and emptying, may take."""

    @property
    def ids(self) -> tuple[int, int]:
        """Return the numbers of user and group."""
        user, _, group = self.user.partition(":")
        return int(user), int(group or user)


@dataclass(frozen=True, slots=True)
class Spec:
    """One container that is wanted."""

    image: str
    options: ContainerOptions
    folder: str
    """Folder, absolute, in which everyone can write."""
    ports: tuple[int, ...] = ()
    """Ports of its own loopback whose listening sockets are handed to this process."""


class Container(ABC):
    """A container that has started."""

    name: str
    listeners: Mapping[int, socket.socket] = {}
    """Listening sockets of its loopback by port."""

    @abstractmethod
    async def prepare(self, script: str, archive: Path | None = None) -> None:
        """Run a shell script as its root, who may change all files within, with `archive` as input, to its end.

        Called before the program of the policy begins, and never after it. Raises ContainerFailed; Unfit where the
        script itself ended with another status than 0.
        """

    @abstractmethod
    async def run(
        self, words: Sequence[str], environment: Mapping[str, str], folder: str, *, secret: str, most: int
    ) -> Process:
        """Start a program as the user without rights, in `folder`, with these variables and the image's own.

        `secret`: text in `environment`. `most`: bytes of output. The status 127 says that the program is not there.
        """

    @abstractmethod
    async def settle(self) -> int:
        """Kill all that the program left, by programs of the image alone.

        Returns the number of processes that the memory limit had ended. Raises ContainerFailed; Unfit where the program
        has ended the container, which costs its score and no other try.
        """

    @abstractmethod
    async def take(self, folder: str, archive: Path, most: int) -> None:
        """Write a tar archive of a folder. Raises ContainerFailed; Unfit for what the program
        left, e.g. more than `most` bytes."""

    @abstractmethod
    async def stop(self) -> None:
        """End it and remove it, without an error; what cannot be removed is named in the log."""


class Containers(ABC):
    """Starter of containers. It is made with the parameter `options` if it has one, of a pydantic model."""

    listens: ClassVar[bool] = False
    """True: it hands over the listening sockets of `Spec.ports`. Else programs need a network to the endpoint."""

    @abstractmethod
    async def open(self, options: ContainerOptions) -> None:
        """Find what starts containers, and remove what killed runs left. Raises ConfigError."""

    @abstractmethod
    async def find(self, image: str) -> None:
        """Raise ContainerFailed, with the remedy, where an image cannot be started."""

    @abstractmethod
    async def start(self, spec: Spec) -> Container:
        """Start a container. Raises ContainerFailed; cancelled, it leaves nothing."""

    @abstractmethod
    async def close(self) -> None:
        """End all of it, once no container is in use."""
