"""Places where a program and its check act: on this machine, or in containers (`container.py`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from agentrl.agents.process import AgentProcess
from agentrl.agents.task import AgentTask, extra
from agentrl.errors import DataError
from agentrl.system.owner import remove


class CannotBeJudged(Exception):
    """The program left something that no check can be run on."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Folder of one try on this machine. Its paths are the same for the program, wherever it acts."""

    folder: Path

    @property
    def home(self) -> Path:
        """Folder of the program's settings."""
        return self.folder / "home"

    @property
    def work(self) -> Path:
        """Folder of the row's files."""
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        """Folder for the program's temporary files."""
        return self.folder / "tmp"

    @property
    def judging(self) -> Path:
        """Home of the check; its name names the check's processes."""
        return self.folder / "check"

    def fill(self, files: Mapping[str, str]) -> None:
        """Make the program's folders, with files in the working folder."""
        for each in (self.home, self.work, self.temporary):
            each.mkdir()
        lay(self.work, files)


class Room(ABC):
    """A place that is made ready, while a program or a check is in it."""

    base_url = ""
    """Address of the session, as the program reaches it."""
    work: str
    """Path of the working folder, as the program sees it."""

    @abstractmethod
    async def start(self, words: Sequence[str], variables: Mapping[str, str], *, key: str) -> AgentProcess:
        """Start a program with the files of the desk. `key` says where its words come from.

        In a container, several may be started one after another, and each finds the files that the last one left.
        """

    async def leave(self, *, keep: bool) -> bool:
        """End processes that the program left; with `keep` its files are kept for the check.

        Returns True where a limit of the place had ended the program, which is judged then as it is.
        """
        return False


class Place(ABC):
    """A machine, or machines, where programs act."""

    async def start(self) -> None:  # noqa: B027 - this machine needs nothing
        """Begin, before the first task."""

    async def close(self) -> None:  # noqa: B027
        """End everything that `start` began."""

    async def check(self, sample: Mapping[str, object]) -> None:  # noqa: B027
        """Raise DataError for a row that asks for what this place does not have."""

    @abstractmethod
    def acting(self, task: AgentTask, desk: Desk) -> AbstractAsyncContextManager[Room]:
        """Make a place for the program ready, and clear it away."""

    @abstractmethod
    def judging(self, task: AgentTask, desk: Desk, files: Mapping[str, str]) -> AbstractAsyncContextManager[Room]:
        """Make a place for the check ready, with `files` over the program's own, and clear it away.

        Raises CannotBeJudged.
        """

    async def judge(
        self,
        task: AgentTask,
        desk: Desk,
        files: Mapping[str, str],
        words: Sequence[str],
        seconds: float | None,
        *,
        key: str,
    ) -> AgentProcess | None:
        """Run a check on the files that a program left, with `files` over them; it knows no address of the session.

        Returns the check's process, which has ended; None where it did not end in `seconds`, its start apart. Raises
        CannotBeJudged. `key` says where its words come from.
        """
        async with self.judging(task, desk, files) as room:
            check = await room.start(words, {"HOME": str(desk.judging), "PWD": room.work}, key=key)
            check.process.give(b"")
            try:
                await asyncio.wait_for(check.process.ended(), seconds)
            except TimeoutError:
                return None
            return check


class OnThisMachine(Place):
    """Folders and processes of the trainer's machine and user. This is no sandbox."""

    def __init__(self, pass_env: Sequence[str]) -> None:
        self._pass_env = pass_env

    async def check(self, sample: Mapping[str, object]) -> None:
        if (image := extra(sample, "image")) is not None:
            raise DataError(
                f"extra_info.image: {image!r:.200} would be left unused, as programs act on this machine. Set "
                "openai_proxy.start=container, or leave the image out of the row"
            )

    @asynccontextmanager
    async def acting(self, task: AgentTask, desk: Desk) -> AsyncIterator[Room]:
        yield _Here(self._pass_env, desk.work, task.base_url, task.base_url)

    @asynccontextmanager
    async def judging(self, task: AgentTask, desk: Desk, files: Mapping[str, str]) -> AsyncIterator[Room]:
        try:
            desk.judging.mkdir()
            await asyncio.to_thread(lay, desk.work, files)
            (desk.work / "..").stat()  # reached through a folder alone
        except OSError as error:  # The program left something in the way, or no folder in which a check can begin.
            raise CannotBeJudged(str(error)) from error
        yield _Here(self._pass_env, desk.work, "", str(desk.judging))


class _Here(Room):
    def __init__(self, pass_env: Sequence[str], work: Path, base_url: str, secret: str) -> None:
        self.work, self.base_url = str(work), base_url
        self._pass_env, self._secret = pass_env, secret

    async def start(self, words: Sequence[str], variables: Mapping[str, str], *, key: str) -> AgentProcess:
        return await AgentProcess.start(words, self._pass_env, variables, self._secret, folder=Path(self.work), key=key)


def lay(folder: Path, files: Mapping[str, str]) -> None:
    """Write files below `folder`, in place of anything that is there; no link that a program left is followed."""
    for path, text in files.items():
        place = folder
        for part in PurePosixPath(path).parts[:-1]:
            place = place / part
            if place.is_symlink() or (place.exists() and not place.is_dir()):
                place.unlink()
            place.mkdir(exist_ok=True)
        file = place / PurePosixPath(path).name
        remove(file)
        with file.open("x", encoding="utf-8", newline="") as out:
            out.write(text)
