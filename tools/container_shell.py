"""Shell in a container of its own for each trajectory: the tool `bash`, for tasks that need an image.

The row's `create_kwargs` name the image (one that the config allows) and hold `files`, laid into the working folder,
and `check_files`. A command runs in a new shell; files stay from one to the next. When the trajectory ends, `check`
judges the files in a second container, as in `openai_proxy.start=container` (docs/containers.md): status 0 is a reward
of 1, any other 0. `python -m data_prep.tasks --tool bash` makes such rows of folders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import pydantic

from agentrl.agents.container import InContainers, PlainCommand, starter_of
from agentrl.agents.harness_agent import files_of, new_desk
from agentrl.agents.place import CannotBeJudged, Desk, Room
from agentrl.agents.task import AgentTask
from agentrl.config.sections.rollout import ContainerConfig
from agentrl.containers.contract import ContainerOptions
from agentrl.errors import ConfigError
from agentrl.system.owner import remove
from agentrl.tool import Tool, ToolArgumentsError, ToolResponse, ToolSchema

FOR_CONTAINERS = 120.0
"""Seconds that a call has in addition to its command's or its check's, where `timeout` does not say."""
KILLED_AFTER = 5
"""Seconds from SIGTERM to SIGKILL for a command that takes too long."""
ENDED_AFTER = 20
"""Seconds after its time in which a command ends, or is ended from outside: it may stop or replace `timeout`."""
LONGEST = 100_000
"""Bytes of a command: the kernel takes no word of more than 131,071."""
RUN = 'exec 2>&1; exec timeout -k "$1" "$2" sh -c "$3"'
LATE = (124, 137)
"""Statuses of `timeout` for a command that took too long, and of one that SIGKILL ended."""


class ContainerShellConfig(pydantic.BaseModel, extra="forbid"):
    """Config of the shell."""

    container: ContainerConfig = ContainerConfig()
    """Keys of `openai_proxy.container` (docs/containers.md): image, images, workdir, limits."""
    check: list[str] | None = pydantic.Field(None, min_length=1)
    """Command that judges the files which a trajectory leaves; null: no reward."""
    check_timeout: float = pydantic.Field(60.0, gt=0)
    """Seconds of the check, after which the reward is 0."""
    command_timeout: float = pydantic.Field(60.0, gt=0)
    """Seconds of one command, after which it is ended and the model is told."""


@dataclass(slots=True)
class _Instance:
    """Container and folder of a trajectory."""

    sample: dict[str, object]
    files: Mapping[str, str]
    judging: Mapping[str, str]
    task: AgentTask
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    desk: Desk | None = None
    room: Room | None = None
    """The container, from the first command on."""
    order: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock by which the commands of one message run in the order of its calls."""


class ContainerShell(Tool):
    """Tool `bash(command)`. A container that cannot be started or asked is a fault of the infrastructure."""

    config_model = ContainerShellConfig
    options: ContainerShellConfig
    default_on_error: ClassVar[Literal["tell", "fail"]] = "fail"
    default_schema: ClassVar[ToolSchema | None] = {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command in the working directory and get its output. Files stay.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "The command."}},
                "required": ["command"],
            },
        },
    }

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        """Complete the config. Raises ConfigError, pydantic.ValidationError."""
        super().__init__(config, schema)
        options = self.options
        least = max(options.command_timeout, options.check_timeout if options.check else 0.0)
        self.config = {"timeout": least + FOR_CONTAINERS, **self.config}
        if (given := self.config["timeout"]) is not None and given <= least + ENDED_AFTER:
            raise ConfigError(
                f"timeout={given:g} must be above command_timeout, check_timeout and {ENDED_AFTER} s more"
            )
        box = options.container
        if box.image is None and not box.images:
            raise ConfigError("tools.container_shell: set container.image, or container.images for rows that name one")
        for finding in box.findings():
            raise ConfigError(f"tools.container_shell: {finding.text}")
        self._instances: dict[str, _Instance] = {}
        self._place: InContainers | None = None

    async def start(self, run: str) -> None:
        box = ContainerOptions(**self.options.container.model_dump())
        self._place = InContainers(starter_of(box), box, (), serves=False)
        await self._place.first(PlainCommand(), [])
        await self._place.start()

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        assert self._place is not None
        sample: dict[str, object] = {"extra_info": create_kwargs}
        files, judging = files_of(sample, "files"), files_of(sample, "check_files")
        await self._place.check(sample)
        self._instances[instance_id] = _Instance(sample, files, judging, AgentTask.without_session(sample))

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        command = arguments["command"]
        if "\0" in command:
            raise ToolArgumentsError("command: it has a null character")
        if (size := len(command.encode())) > LONGEST:
            raise ToolArgumentsError(
                f"command: expected at most {LONGEST:,} bytes, found {size:,}; write large files in several commands"
            )
        one, seconds = self._instances[instance_id], self.options.command_timeout
        async with one.order:
            room = await self._room(one)
            words = ["sh", "-c", RUN, "sh", str(KILLED_AFTER), f"{seconds:g}", command]
            assert one.desk is not None
            process = await room.start(words, {"HOME": str(one.desk.home), "PWD": room.work}, key="bash")
            process.process.give(b"")
            try:
                await asyncio.wait_for(process.process.ended(), seconds + ENDED_AFTER)
                status = process.process.status
            except TimeoutError:
                status = LATE[0]
        said = process.said(both=True)
        if process.process.overran:
            said += f"\n[ended: more than {self.options.container.output_megabytes} MiB of output]"
        elif status in LATE:
            said += f"\n[ended after {seconds:g} s, or by its memory]"
        elif status != 0:
            said += f"\n[exit status {status}]"
        return ToolResponse(said.strip() or "(no output)", metrics={"exit_status_0": float(status == 0)})

    async def calc_reward(self, instance_id: str) -> float | None:
        options, one = self.options, self._instances[instance_id]
        if options.check is None:
            return None
        if one.room is None:
            return 0.0  # Nothing was done.
        assert self._place is not None and one.desk is not None
        await one.room.leave(keep=True)
        try:
            check = await self._place.judge(
                one.task, one.desk, one.judging, options.check, options.check_timeout, key="check"
            )
        except CannotBeJudged:
            return 0.0
        return float(check is not None and check.process.status == 0)

    async def release(self, instance_id: str) -> None:
        one = self._instances.pop(instance_id)
        try:
            await one.stack.aclose()
        finally:
            if one.desk is not None:
                await asyncio.to_thread(remove, one.desk.folder)

    async def close(self) -> None:
        if self._place is not None:
            await self._place.close()

    async def _room(self, one: _Instance) -> Room:
        """Return the trajectory's container, which the first command starts."""
        if one.room is None:
            assert self._place is not None
            one.desk = await new_desk()
            await asyncio.to_thread(one.desk.fill, one.files)
            one.room = await one.stack.enter_async_context(self._place.acting(one.task, one.desk))
        return one.room
