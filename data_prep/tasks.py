"""Tasks of coding agents as rows: `python -m data_prep.tasks --folder TASKS --out DIR`.

Each folder below TASKS is a task: `instruction.md`; an image, by its name in the file `image` or as
`environment/Dockerfile`; `files/`, laid into the working folder at the start; `tests/`, laid there before the check;
and, where there is one, `solution/solve.sh`. Folders of Harbor (https://harborframework.com) with a `task.toml` are
read, too: their tests and solutions lie in the working folder, and the check is their reward. Every task is tried as in
a training, in containers or with `--start process` on this machine, without an image: its solution must pass the check,
and an agent that does nothing must not. A task that fails is left out, and its reason is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from agentrl.agents.container import InContainers
from agentrl.agents.harness_agent import files_of
from agentrl.agents.place import CannotBeJudged, Desk, OnThisMachine, Place
from agentrl.agents.task import AgentError, AgentFailed, AgentTask
from agentrl.config.sections.data import DataConfig
from agentrl.containers.command_line import CommandLine
from agentrl.containers.contract import ContainerFailed, ContainerOptions
from agentrl.errors import ConfigError, DataError, UserError
from agentrl.system.owner import own_folder
from agentrl.system.visible import complain, visible
from data_prep.files import Row, write_splits, write_text
from data_prep.options import positive

BUILT = "agentrl-task"
"""First part of the names of images that are built here."""
SOLVE = "solution/solve.sh"
"""Script that solves a task, in its folder and in the working folder."""
PARTS = (
    *("", "instruction.md", "image", "task.toml", "files", "tests", "solution"),
    *("environment", "environment/Dockerfile", "environment/.dockerignore", "environment/.containerignore"),
)
"""Paths of a task that are read; one that is a link would lead to files of this machine."""
HARBORS = re.compile(r"(?<![\w./})-])/(tests|logs|solution)(?![\w-])")
"""Absolute paths of Harbor's, which lie in the working folder here: nothing else can be written to."""
HARBORS_CHECK = """\
rm -rf logs && mkdir -p logs/verifier && bash tests/test.sh
cd logs/verifier || exit 1
reward=$(cat reward.txt 2>/dev/null || grep -o '"reward": *[0-9.]*' reward.json | tr -d ' ' | cut -d: -f2)
case $reward in 1|1.0) exit 0 ;; *) exit 1 ;; esac
"""
"""The file `tests/run.sh` of a task of Harbor's."""
SHELL = "tools.container_shell.ContainerShell"
PER_TEST_ROW = 10
"""Tasks for each one of test.parquet."""


class LeftOut(Exception):
    """The reason why a task is no row."""


@dataclass(frozen=True, slots=True)
class Task:
    """One folder, read."""

    name: str
    instruction: str
    image: str | None
    """None: it is for this machine."""
    files: dict[str, str]
    tests: dict[str, str]
    solution: dict[str, str]

    def row(self, tool: str | None) -> Row:
        """Make the row for an agent's program, or for the loop `tool_agent` with a tool."""
        given: Row = {"files": listed(self.files), "check_files": listed(self.tests)}
        given = given if self.image is None else {"image": self.image, **given}
        inside = given if tool is None else {"tools_kwargs": {tool: {"create_kwargs": given}}}
        return {
            "data_source": "agent/tasks" if tool is None else "tools/tasks",
            "agent_name": "openai_proxy" if tool is None else "tool_agent",
            "prompt": [{"role": "user", "content": self.instruction}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"task": self.name, **inside},
        }


def listed(files: dict[str, str]) -> list[dict[str, str]]:
    return [{"path": path, "text": text} for path, text in files.items()]


def text_of(file: Path) -> str:
    """Read a text file, with its ends of lines. Raises LeftOut."""
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError:
        raise LeftOut(f"{file}: no UTF-8 text; files of rows are texts, so put it into the image") from None
    except OSError as error:
        raise LeftOut(f"{file}: {error.strerror}") from None


def texts(folder: Path, below: str = "") -> dict[str, str]:
    """Read the text files of a folder, by their paths. Raises LeftOut for a link, and for bytes that are no text."""
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_symlink():
            raise LeftOut(f"{file}: a link; copy the file itself")
        if file.is_file():
            found[below + str(file.relative_to(folder))] = text_of(file)
    return found


def read(folder: Path, build: Sequence[str] | None, workdir: str | None) -> Task:
    """Read a task, and build its image; without `build` it is for this machine, and has none.

    Nothing is read that does not lie in the folder. Raises LeftOut.
    """
    if not folder.name.isprintable():
        raise LeftOut(f"{str(folder)!r}: expected a name of printable characters")
    for part in PARTS:
        if (folder / part).is_symlink():
            raise LeftOut(f"{folder / part}: a link; copy what it leads to")
    if not (folder / "instruction.md").is_file():
        raise LeftOut(f"{folder / 'instruction.md'}: not there; write the user message into it")
    instruction = text_of(folder / "instruction.md").strip()
    if not instruction:
        raise LeftOut(f"{folder / 'instruction.md'}: it is empty; write the user message into it")
    named = harbors_image(folder / "task.toml")
    files = texts(folder / "files")
    tests, solution = texts(folder / "tests", "tests/"), texts(folder / "solution", "solution/")
    if not tests:
        raise LeftOut(f"{folder / 'tests'}: not there; put the files that --check runs into it")
    if solution and SOLVE not in solution:
        raise LeftOut(f"{folder / SOLVE}: not there; it is the script that solves the task")
    if build is None and named is not None:
        raise LeftOut(f"{folder / 'task.toml'}: a task of Harbor's needs its image; leave out --start process")
    if named is not None:
        if workdir is None:
            raise LeftOut(f"{folder / 'task.toml'}: give --workdir, the WORKDIR of its image, e.g. /app")
        tests, solution = ({path: moved(text, workdir) for path, text in some.items()} for some in (tests, solution))
        tests, instruction = {**tests, "tests/run.sh": HARBORS_CHECK}, moved(instruction, workdir)
    for part, some in {"files": files, "tests": tests, "solution": {**files, **solution}}.items():
        try:
            files_of({"extra_info": {part: listed(some)}}, part)
        except DataError as error:
            raise LeftOut(f"{folder / part}: a row cannot hold it: {error}") from error
    if build is None:
        return Task(folder.name, instruction, None, files, tests, solution)
    if not named and (folder / "image").is_file():
        named = text_of(folder / "image").strip()
    if named and not re.fullmatch(r"[a-z0-9][\w./:@-]*", named, re.ASCII):
        raise LeftOut(f"{folder}: expected the name of an image, found {named!r:.80}")
    if not named and not (folder / "environment" / "Dockerfile").is_file():
        raise LeftOut(f"{folder}: expected a file `image` with a name, or environment/Dockerfile")
    return Task(folder.name, instruction, named or built(folder, build), files, tests, solution)


def harbors_image(file: Path) -> str | None:
    """Read the image of Harbor's `task.toml`, empty where it names none; None without such a file. Raises LeftOut."""
    if not file.is_file():
        return None
    try:
        made = tomllib.loads(text_of(file))
    except (ValueError, RecursionError) as error:
        raise LeftOut(f"{file}: {error}") from error
    place = made.get("environment", {})
    if not isinstance(place, dict):
        raise LeftOut(f"{file}: expected a table [environment], found {place!r:.80}")
    needs = [name for name in ("gpus", "env", "mcp_servers") if place.get(name)] + ["steps"] * ("steps" in made)
    if needs:
        raise LeftOut(f"{file}: it needs {', '.join(needs)}, which containers of agents do not have")
    return str(place.get("docker_image", ""))


def moved(text: str, workdir: str) -> str:
    """Change Harbor's absolute paths to paths in the working folder."""
    return HARBORS.sub(lambda found: f"{workdir}/{found[1]}", text)


def built(folder: Path, build: Sequence[str]) -> str:
    """Build the image of a task's environment, unless it is there already; return its name. Raises LeftOut."""
    context = folder / "environment"  # Neither tests nor solution are in it.
    content = hashlib.sha256(repr(list(build)).encode())
    for one in [context, *sorted(context.rglob("*"))]:
        state = one.lstat()
        part = os.fsencode(one.readlink()) if one.is_symlink() else one.read_bytes() if one.is_file() else b""
        content.update(repr((os.fsencode(one.relative_to(context)), state.st_mode, part)).encode())
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "task"
    tag = f"{BUILT}/{name}:{content.hexdigest()[:12]}"
    if subprocess.run([build[0], "image", "inspect", tag], capture_output=True, check=False).returncode == 0:
        return tag
    words = [*build, "--tag", tag, "--file", str(context / "Dockerfile"), str(context)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LeftOut(f"{shlex.join(words)} ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
    return tag


class Trial:
    """Tries tasks in containers, by the check of the training."""

    def __init__(self, place: Place, check: Sequence[str], seconds: float) -> None:
        self._place, self._check, self._seconds = place, check, seconds

    async def verify(self, task: Task) -> None:
        """Raise LeftOut where a task's solution fails its check, or doing nothing passes."""
        if (await self._passes(task, {}))[0]:
            raise LeftOut("the check passes though nothing was done")
        passed, said = await self._passes(task, task.solution) if task.solution else (True, "")
        if not passed:
            raise LeftOut(f"the solution does not pass the check: {said or 'it printed nothing'}")

    async def _passes(self, task: Task, solution: dict[str, str]) -> tuple[bool, str]:
        """Have a program lay the solution, and run the check; return what it printed, too."""
        sample: dict[str, object] = {"prompt": [], "extra_info": {"image": task.image} if task.image else {}}
        one = AgentTask.without_session(sample)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._acted(one, task, solution)
        except TimeoutError:
            return False, f"no end after {self._seconds:g} s (--timeout)"
        except (ContainerFailed, AgentFailed, AgentError, CannotBeJudged, UserError) as error:
            raise LeftOut(str(error)) from error

    async def _acted(self, one: AgentTask, task: Task, solution: dict[str, str]) -> tuple[bool, str]:
        await self._place.check(one.sample)
        with own_folder() as folder:
            desk = Desk(folder)
            desk.fill({**task.files, **solution})
            async with self._place.acting(one, desk) as room:
                words = ["sh", "-c", f"if [ -e {SOLVE} ]; then sh {SOLVE} && rm -r solution; fi"]
                process = await room.start(words, {"HOME": str(desk.home), "PWD": room.work}, key=SOLVE)
                process.process.give(b"")
                await process.process.ended()
                await room.leave(keep=True)
            if process.process.status != 0:
                return (
                    False,
                    f"{SOLVE} ended with status {process.process.status}: {process.said(both=True)[-500:]}",
                )
            check = await self._place.judge(one, desk, task.tests, self._check, None, key="--check")
            assert check is not None, "it has no time of its own"
            return check.process.status == 0, check.said(both=True)[-500:]


async def good_tasks(
    folders: Sequence[Path], trial: Trial, build: Sequence[str] | None, workdir: str | None, at_once: int
) -> list[Task]:
    """Try the tasks, and print the fate of each; return those that stay, by name."""
    good: list[Task] = []
    turns, done = asyncio.Semaphore(at_once), 0

    async def one(folder: Path) -> None:
        nonlocal done
        async with turns:
            try:
                task = await asyncio.to_thread(read, folder, build, workdir)
                await trial.verify(task)
            except LeftOut as reason:
                fate = f"left out: {reason}"
            else:
                fate = "kept" if task.solution else f"kept without a trial of a solution: {SOLVE}: not there"
                good.append(task)
            done += 1
            line = f"[{done}/{len(folders)}] {folder.name}: {fate}"
            print(visible(line), flush=True)

    await asyncio.gather(*map(one, folders))
    return sorted(good, key=lambda task: task.name)


async def prepare(given: argparse.Namespace) -> int:
    if (given.folder / "instruction.md").is_file():
        raise ConfigError(f"--folder {given.folder}: it is a task itself; give the folder that holds it")
    below = sorted(given.folder.iterdir()) if given.folder.is_dir() else []
    folders = [one for one in below if one.is_dir() and not one.name.startswith(".")]
    if not folders:
        raise ConfigError(f"--folder {given.folder}: expected a folder of folders, one for each task")
    is_here, check = given.start == "process", shlex.split(given.check)
    if is_here and (wrong := [key for key in ("tool", "workdir") if getattr(given, key) is not None]):
        raise ConfigError(f"--start process: --{wrong[0]} is for containers; leave out one of them")
    line = shlex.split(given.command_line) if given.command_line else None
    options = ContainerOptions(
        command_line=line,
        arguments=shlex.split(given.arguments),
        images=["*"],
        workdir=given.workdir,
        memory_megabytes=given.memory_megabytes,
    )
    starter = CommandLine()
    place: Place = OnThisMachine(()) if is_here else InContainers(starter, options, (), serves=False)
    if not is_here:
        await starter.open(options)
    await place.start()
    try:
        build = None if is_here else [*starter.words, "build", *shlex.split(given.build_arguments)]
        kept = await good_tasks(folders, Trial(place, check, given.timeout), build, given.workdir, given.at_once)
    finally:
        await place.close()
    if not kept:
        raise UserError(f"--folder {given.folder}: no task can be used, so nothing was written")
    tests = kept[::PER_TEST_ROW] if len(kept) >= PER_TEST_ROW else []
    splits = {"train": [task for task in kept if task not in tests], "test": tests}
    files = {given.out / f"{name}.parquet": [task.row(given.tool) for task in some] for name, some in splits.items()}
    files = {path: some for path, some in files.items() if some}
    write_splits(files)
    for path, some in files.items():
        print(f"{path}: {len(some)} tasks")
    # One pattern for all images that share the first part of a long name.
    images = sorted({re.sub(r"/[^/]*$", "/*", task.image) for task in kept if task.image})
    keys = [f"data.{'train' if path.stem == 'train' else 'val'}_files={path}" for path in files]
    if (rows := len(splits["train"])) < DataConfig().train_batch_size:
        keys.append(f"data.train_batch_size={rows}")
    if given.tool is None:
        proxy = "actor_rollout_ref.rollout.agent.openai_proxy"
        if not is_here:  # A run tries the program in `image` before its first step.
            keys += [f"{proxy}.start=container", f"{proxy}.container.image={kept[0].image}"]
            keys.append(f"{proxy}.container.images={json.dumps(images)}")
        keys += [f"{proxy}.container.workdir={given.workdir}"] * (given.workdir is not None)
        keys.append(f"{proxy}.check={json.dumps(check)}")
    else:
        box = {"images": images, "workdir": given.workdir, "memory_megabytes": given.memory_megabytes}
        box |= {"command_line": line, "arguments": options.arguments}
        given_keys = {name: value for name, value in box.items() if value}
        entry = {"class_name": SHELL, "config": {"container": given_keys, "check": check}}
        write_text(given.out / "tools.yaml", yaml.safe_dump({"tools": [entry]}, sort_keys=False))
        keys.append(f"actor_rollout_ref.rollout.multi_turn.tool_config_path={given.out / 'tools.yaml'}")
    program = "" if given.tool else "a program (openai_proxy.harness, or openai_proxy.command) and "
    print(f"{len(kept)} of {len(folders)} tasks; train with {program}{shlex.join(keys)}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Write the files and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.tasks", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the tasks' folders")
    parser.add_argument("--out", type=Path, required=True, help="directory to write train.parquet and test.parquet to")
    parser.add_argument("--start", choices=["container", "process"], default="container", help="where agents act")
    parser.add_argument("--tool", choices=["bash"], help="rows for tool_agent with this tool; none: for a program")
    parser.add_argument("--check", default="sh tests/run.sh", help="command that judges the working folder")
    parser.add_argument("--workdir", help="folder of the images in which agents work; none: one with the files alone")
    parser.add_argument("--command-line", help="words of the OCI command line; none: podman or docker")
    parser.add_argument("--arguments", default="", help="further words of its `run`")
    parser.add_argument("--build-arguments", default="", help="further words of its `build`")
    parser.add_argument("--memory-megabytes", type=positive, default=2048, help="of a container")
    parser.add_argument("--timeout", type=positive, default=600, help="seconds of a trial: solution and check")
    parser.add_argument("--at-once", type=positive, default=2, help="tasks that are tried side by side")
    try:
        return asyncio.run(prepare(parser.parse_args(arguments)))
    except UserError as error:
        return complain(error)


if __name__ == "__main__":
    sys.exit(main())
