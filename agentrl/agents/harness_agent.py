"""Agents that are programs with a harness: each session has a home and a working folder of its own.

The row's files are laid into the working folder, the harness writes the program's settings, the program acts until it
ends, and a command judges the folder that it leaves. The program is given the instruction, and nothing else of the row.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from agentrl.agents import command
from agentrl.agents.agent import Agent, AgentOptions
from agentrl.agents.harness import Errand, Harness
from agentrl.agents.place import CannotBeJudged, Desk, OnThisMachine, Place, Room
from agentrl.agents.process import AgentProcess, ProgramAgent
from agentrl.agents.session_queue import SessionQueue
from agentrl.agents.task import AgentError, AgentTask, CheckFailed, extra
from agentrl.chat.message import content_text
from agentrl.config.registries import HARNESSES
from agentrl.errors import ConfigError, DataError
from agentrl.system.owner import new_folder, remove, remove_left_folders
from agentrl.system.paths import file_below
from agentrl.system.plugin import nearest
from agentrl.system.registry import configured
from agentrl.trajectory import Message

logger = logging.getLogger(__name__)

MAX_FILES, MAX_CHARACTERS = 4096, 16 << 20
"""Files of a row, and characters in all of them."""
VERSION_SECONDS = 60.0
NOT_RUN = range(125, 128)
"""Statuses of a shell (POSIX) or of podman (podman-run(1)) for a program that could not be run."""


def build(options: AgentOptions) -> Agent:
    """Make the agent that `openai_proxy.harness` names. Raises ConfigError where its program is not there."""
    assert options.harness is not None
    remove_left_folders()
    found = cast(type[Harness], HARNESSES.get(options.harness))
    harness = configured(found, options.harness_options, "openai_proxy.harness_options")()
    if options.check and "/" not in (judge := options.check[0]) and shutil.which(judge) is None:
        raise ConfigError(f"openai_proxy.check: no program {judge!r} on PATH; install it, or give its path")
    return HarnessAgent(harness, program_of(harness, options), options)


def program_of(harness: Harness, options: AgentOptions) -> list[str]:
    """Find the words that start the program. Raises ConfigError that says how it is installed."""
    place = shutil.which(harness.program)
    words = list(options.command or ([place] if place else []))
    hint = f"install it ({harness.install}), or name it: openai_proxy.command=[/path/to/{harness.program}]"
    if not words:
        raise ConfigError(f"openai_proxy.harness={options.harness}: no program {harness.program!r} on PATH; {hint}")
    try:
        said = subprocess.run(
            [*words, *harness.version_arguments], capture_output=True, text=True, timeout=VERSION_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
            hint = f"npm 11 leaves such a stub where --allow-scripts does not name the package; {hint}"
        raise ConfigError(f"openai_proxy.harness={options.harness}: {' '.join(words)}: {error}; {hint}") from error
    check_version(harness, words, said.returncode, said.stdout + said.stderr, hint)
    return words


def check_version(harness: Harness, words: Sequence[str], status: int | None, said: str, hint: str) -> None:
    """Raise ConfigError, with `hint`, where a program that was asked for its version does not run.

    One warning names a version other than the tried one.
    """
    if status != 0:
        problem = f"{' '.join(words)} ended with status {status}: {said.strip()[-500:] or 'it wrote nothing'}"
        raise ConfigError(f"openai_proxy.harness: {harness.program}: {problem}; {hint}")
    versions = re.findall(r"\d+\.\d+\.\d+", said)
    if harness.version not in versions:
        logger.warning(
            "%s has the version %s; its harness was tried with %s (%s). The run goes on",
            *(harness.program, versions[0] if versions else "unknown", harness.version, harness.install),
        )


async def new_desk() -> Desk:
    """Make the folder of one try; the next start removes folders of killed processes."""
    return Desk(await asyncio.to_thread(new_folder))


class HarnessAgent(ProgramAgent):
    """Agent that is a program, made ready for each session by its harness.

    With a check its report is `score`: 1 where the check ended with status 0, else 0.
    """

    def __init__(
        self, harness: Harness, program: Sequence[str], options: AgentOptions, place: Place | None = None
    ) -> None:
        """`place`: where the program acts, and its check; None: on this machine."""
        self._harness, self._program, self._options = harness, list(program), options
        self._place = place or OnThisMachine(options.pass_env)
        self.name = f"harness {options.harness}" if options.harness else f"agent command {' '.join(program)}"

    async def start(self, queue: SessionQueue) -> None:
        await self._place.start()

    async def close(self) -> None:
        await self._place.close()

    async def run(self, task: AgentTask) -> dict[str, float]:
        try:
            texts = ("", "") if self._harness.takes_conversations else texts_of(task.sample)
            servers = self._servers(task.sample)
            files, judging = files_of(task.sample, "files"), files_of(task.sample, "check_files")
            await self._place.check(task.sample)
        except DataError as error:
            raise DataError(f"{row_of(task.sample)}{error}") from None
        desk = await new_desk()
        try:
            await asyncio.to_thread(desk.fill, files)
            async with self._place.acting(task, desk) as room:
                process = await self._act(task, desk, texts, servers, room)
                is_over = await room.leave(keep=self._options.check is not None)
            report = await self._judged(task, desk, judging)
            status = process.process.status
            if status != 0 and not is_over:
                failure = process.failure(self.name, both=True)
                failure.report, failure.is_own_end = report, status is not None and status > 0
                raise failure
            return report
        finally:
            await asyncio.shield(asyncio.to_thread(remove, desk.folder))

    async def _act(
        self, task: AgentTask, desk: Desk, texts: tuple[str, str], servers: Mapping[str, str], room: Room
    ) -> AgentProcess:
        """Have the program act on an errand until it ends."""
        errand = Errand(*texts, room.base_url, desk.home, Path(room.work), servers, shown(task.sample))
        launch = self._harness.prepare(errand)
        folders = {"HOME": str(desk.home), "PWD": room.work, "TMPDIR": str(desk.temporary)}
        process = await room.start(
            [*self._program, *launch.arguments, *self._harness.options.arguments],
            {**command.session_variables(room.base_url), **folders, **launch.environment},
            key="openai_proxy.command",
        )
        await command.act(process.process, task, launch.stdin.encode())
        return process

    def _servers(self, sample: Mapping[str, object]) -> dict[str, str]:
        """Choose the MCP servers that a row names; all of them for a row without names."""
        known = self._harness.options.mcp_servers
        chosen = extra(sample, "mcp_servers")
        if chosen is None:
            return known
        if not isinstance(chosen, list) or any(name not in known for name in chosen):
            raise DataError(
                f"extra_info.mcp_servers: expected names of openai_proxy.harness_options.mcp_servers "
                f"({', '.join(known) or 'which has none'}), found {chosen!r:.200}"
                + (nearest(str(chosen[0]), list(known)) if isinstance(chosen, list) else "")
            )
        return {name: known[name] for name in chosen}

    async def _judged(self, task: AgentTask, desk: Desk, files: Mapping[str, str]) -> dict[str, float]:
        """Run the check, if there is one. Return its score, and 0 or 1 for two other ends, whose means are shares."""
        words, seconds = self._options.check, self._options.check_timeout
        if words is None:
            return {}
        report = {"score": 0.0, "check_timeout": 0.0, "check_not_run": 0.0}
        try:
            check = await self._place.judge(task, desk, files, words, seconds, key="openai_proxy.check")
        except CannotBeJudged:
            return report
        except AgentError as error:
            raise CheckFailed(str(error), error.reason) from error
        if check is None:
            return report | {"check_timeout": 1.0}
        status = check.process.status
        # The policy may have removed the check's program, so the score is 0; the share shows a check that never runs.
        return report | {"score": float(status == 0), "check_not_run": float(status in NOT_RUN)}


def row_of(sample: Mapping[str, object]) -> str:
    """Name the place of a row, for an error."""
    origin = sample.get("origin")
    return f"{origin.get('file')}, row {origin.get('row')}: " if isinstance(origin, Mapping) else ""


def texts_of(sample: Mapping[str, object]) -> tuple[str, str]:
    """Return the instruction and the system text of a row's prompt. Raises DataError for another conversation."""
    messages = cast(Sequence[Message], sample["prompt"])
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]) or not all(isinstance(one["content"], str) for one in messages):
        raise DataError(
            f"prompt: a harness gives its program one text, so it takes one user message of text, with a system "
            f"message before it or without, found the roles {', '.join(roles)}"
        )
    *system, instruction = (content_text(one["content"]) for one in messages)
    return instruction, "".join(system)


def shown(sample: Mapping[str, object]) -> dict[str, object]:
    """Return a row as the program may see it."""
    info = sample.get("extra_info")
    kept = {name: one for name, one in info.items() if name != "check_files"} if isinstance(info, Mapping) else info
    return {**sample, "extra_info": kept}


def files_of(sample: Mapping[str, object], name: str) -> dict[str, str]:
    """Read files of a row, `extra_info.NAME`: a list of {"path", "text"}. Raises DataError that names the entry."""
    given = extra(sample, name)
    if given is None:
        return {}
    place = f"extra_info.{name}"
    if not isinstance(given, list) or len(given) > MAX_FILES:
        raise DataError(f'{place}: expected a list of at most {MAX_FILES:,} objects {{"path", "text"}}')
    files: dict[str, str] = {}
    for index, one in enumerate(given):
        path, text = (one.get("path"), one.get("text")) if isinstance(one, Mapping) else (None, None)
        if not isinstance(path, str) or not isinstance(text, str):
            raise DataError(f'{place}[{index}]: expected {{"path": text, "text": text}}, found {one!r:.200}')
        if (plain := file_below(path)) is None:
            raise DataError(
                f"{place}[{index}].path: expected a path below the working folder, with names of at most 255 bytes, "
                f"found {path!r:.200}"
            )
        try:
            f"{path}{text}".encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{place}[{index}]: {path!r:.200} is no file that UTF-8 can write: {error}") from None
        files[plain] = text
    for one, after in itertools.pairwise(sorted(files, key=lambda path: path.split("/"))):
        if after.startswith(f"{one}/"):
            raise DataError(f"{place}: {one!r:.200} is a file, and the folder of {after!r:.200}; rename one of them")
    if sum(map(len, files.values())) > MAX_CHARACTERS:
        raise DataError(f"{place}: expected at most {MAX_CHARACTERS:,} characters in all files")
    return files
