"""The contract of a tool: what user code implements, and what the model is shown when a call goes wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

ToolSchema = dict[str, Any]
"""An OpenAI function schema: {"type": "function", "function": {"name", "description", "parameters"}}."""


class ErrorKind(StrEnum):
    """The closed list of tool errors that the model is shown. Everything else is an infrastructure fault."""

    PARSE = "parse"
    """The call is not valid JSON or not a call."""
    UNKNOWN_TOOL = "unknown_tool"
    ARGUMENTS = "arguments"
    """An argument is missing, unknown or of the wrong type."""
    TIMEOUT = "timeout"
    EXECUTION = "execution"
    """The tool raised."""
    LIMIT = "limit"
    """More parallel calls than allowed."""


class ToolError(Exception):
    """Raised by a tool for a fault that the model should see and may correct. Its text is shown to the model."""


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """What a tool answers. `text` is shown to the model; `reward` is a turn reward; `metrics` are averaged."""

    text: str
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class Tool(ABC):
    """One tool. An object serves all trajectories; per-trajectory state is kept by `instance_id`.

    Life of an instance: `create` once a trajectory, before the first call; `execute` any number of times, also
    concurrently; `calc_reward` once at the end; `release` exactly once, however the trajectory ended.
    """

    def __init__(self, config: dict[str, Any], schema: ToolSchema) -> None:
        self.config = config
        self.schema = schema
        self.name: str = schema["function"]["name"]

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Begin a trajectory, with `create_kwargs` of the row's `tools_kwargs`."""
        return None

    @abstractmethod
    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        """Answer one call. `arguments` have been validated against the schema.

        Raises ToolError for what the model should see; any other exception is shown as `execution` too, unless the
        tool is configured with `on_error: fail`, which fails the trajectory as an infrastructure fault.
        """

    async def calc_reward(self, instance_id: str) -> float | None:
        """A reward for the trajectory's use of this tool, or None."""
        return None

    async def release(self, instance_id: str) -> None:
        """End the trajectory's instance."""
        return None
