"""Contract of a tool: the methods that user code implements, and the errors that the model is shown."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, overload

import pydantic
import pydantic_core

from agentrl.system.call_journal import RENAMED, OnResume
from agentrl.system.plugin import with_present_keys
from agentrl.system.threads import DaemonThreads
from agentrl.tool.schema import (
    FunctionSchema,
    ToolSchema,
    arguments_model,
    function_name,
    parameters_schema,
    parse_docstring,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from agentrl.trajectory.picture import Picture


CALL_KEYS = frozenset({"type", "timeout", "max_concurrent", "max_rate", "max_response_tokens", "on_error", "on_resume"})
"""Config keys that every tool has and the tool set reads; see `agentrl.tool.shared.CallLimits`."""


class ErrorKind(StrEnum):
    """Closed list of the tool errors that the model is shown. Everything else is an infrastructure fault."""

    PARSE = "parse"
    """The call is not valid JSON or not a call."""
    UNKNOWN_TOOL = "unknown_tool"
    """No tool has the call's name."""
    ARGUMENTS = "arguments"
    """An argument is missing, unknown or of the wrong type."""
    TIMEOUT = "timeout"
    """The tool gave no answer within its `timeout`."""
    REFUSED = "refused"
    """The tool refused the call with a `ToolError`."""
    EXECUTION = "execution"
    """The tool, or its server, failed."""
    LIMIT = "limit"
    """The message has more parallel calls than allowed."""


MALFORMED = frozenset({ErrorKind.PARSE, ErrorKind.UNKNOWN_TOOL, ErrorKind.ARGUMENTS})
"""Errors that the policy itself made in writing the call."""


class ToolError(Exception):
    """Error that a tool raises for the model to see and perhaps correct. Its text is shown to the model.

    It counts as an answer to the call, and not as a failure of the tool.
    """

    kind: ErrorKind = ErrorKind.REFUSED


class ToolArgumentsError(ToolError):
    """Error for an argument that fits the schema but is still not acceptable; counted as a malformed call."""

    kind = ErrorKind.ARGUMENTS


class ToolFailed(ToolError):
    """Error for a failure of the tool, or of its server, that the model shall see; counted as the tool's fault."""

    kind = ErrorKind.EXECUTION


@dataclass(frozen=True, slots=True)
class ToolResponse:
    """Answer of a tool. `text` is shown to the model; `reward` is a turn reward; `metrics` are averaged."""

    text: str
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Path: base64. Files that the call made for the reward function, which finds them in `trajectory.tool_calls`."""
    images: Sequence[bytes | Picture | Image] = ()
    """Images shown to the model before the text: bytes of image files, Pillow images or `Picture`s."""


Pieces: TypeAlias = AsyncGenerator[str | ToolResponse, None]
"""Texts of an answer as they come. The last one may be a ToolResponse, whose text ends the answer."""


class Tool(ABC):
    """Base class of a tool. One object serves all trajectories; per-trajectory state is kept by `instance_id`.

    Life of an instance: `create` once a trajectory, before the first call; `execute` any number of times, also
    concurrently; `calc_reward` once at the end; `release` exactly once, however the trajectory ended.
    """

    default_schema: ClassVar[ToolSchema | None] = None
    """Schema that the model is shown unless the YAML's `tool_schema` or the caller gives one."""

    config_model: ClassVar[type[pydantic.BaseModel] | None] = None
    """Model that checks the tool's own config keys, where it has any, and becomes `options`."""

    default_on_error: ClassVar[Literal["tell", "fail"]] = "tell"
    """`on_error` where the YAML does not say; see `agentrl.tool.shared.CallLimits`."""

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        """Take the YAML's config: the keys of `agentrl.tool.shared.CallLimits`, and the tool's own (`own_config`).

        Raises TypeError when there is no schema, pydantic.ValidationError when `config_model` refuses the own keys.
        """
        self.config = with_present_keys(config or {}, RENAMED)
        self.options: pydantic.BaseModel | None = (
            self.config_model.model_validate(self.own_config) if self.config_model else None
        )
        schema = schema or self.default_schema
        if schema is None:
            raise TypeError(f"{type(self).__name__} has no default_schema, so a schema (`tool_schema`) must be given")
        self.schema: ToolSchema = schema
        self.name: str = self.schema["function"]["name"]

    @property
    def own_config(self) -> dict[str, Any]:
        """The config without the keys that every tool has."""
        return own_config(self.config)

    @property
    def is_stateful(self) -> bool:
        """True when trajectories have instances: any of create, calc_reward, release is overridden."""
        hooks = ("create", "calc_reward", "release")
        return any(getattr(type(self), hook) is not getattr(Tool, hook) for hook in hooks)

    @property
    def on_resume(self) -> OnResume:
        """How a trajectory's use of the tool comes back when the run was killed; see `OnResume`.

        A class of yours may set it, and the YAML's `on_resume` comes first. By itself a tool without instances comes
        back by its answers, any other not.
        """
        return "none" if self.is_stateful else "answers"

    @property
    def remembers(self) -> bool:
        """True when answers or reward depend on earlier calls that only this process knows.

        The YAML's `on_resume: answers` is refused then. By itself it is so where `calc_reward` is overridden.
        """
        return type(self).calc_reward is not Tool.calc_reward

    @property
    def code(self) -> Callable[..., object]:
        """The user's own part of `execute`, by which messages name the place of an error."""
        return self.execute

    async def start(self, run: str) -> None:
        """Connect to the tool's resources, as the run named `run` begins in this event loop.

        Raises ConfigError when a resource cannot be reached.
        """
        return None

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        """Begin a trajectory, with `create_kwargs` of the row's `tools_kwargs`."""
        return None

    @abstractmethod
    def execute(
        self, instance_id: str, arguments: dict[str, Any]
    ) -> Awaitable[ToolResponse] | Pieces | Awaitable[ToolResponse | Pieces]:
        """Answer one call: a coroutine function, or an asynchronous generator of the answer's pieces.

        `arguments` have been validated against the schema. The model reads the pieces that came before a
        generator failed, or did not end within `timeout`.

        Raises ToolError for errors that the model should see. Any other exception is shown as `execution` too, and the
        user is shown where it was raised, once a place; with `on_error: fail` it fails the trajectory as an
        infrastructure fault. A tool whose code is in error at every call ends the run (`ToolSet.check`).
        """

    async def calc_reward(self, instance_id: str) -> float | None:
        """Return a reward for the trajectory's use of this tool, or None."""
        return None

    async def release(self, instance_id: str) -> None:
        """End the trajectory's instance."""
        return None

    def take_metrics(self) -> Mapping[str, float]:
        """Return and reset the tool's own numbers; the trainer logs them as `tool/<name>/...`.

        Numbers of several rollout workers are averaged; counts and peaks are kept as such by returning
        `agentrl.tool.Metrics`.
        """
        return {}

    async def close(self) -> None:
        """Free the tool's resources at the end of the run."""
        return None


def own_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tool entry's config without the keys that every tool has."""
    return {key: value for key, value in config.items() if key not in CALL_KEYS}


class ToolSource(ABC):
    """Base class of an entry that brings several tools, known only when it is loaded, e.g. an MCP server's tools."""

    config_model: ClassVar[type[pydantic.BaseModel] | None] = None
    """Model that checks the entry's own config keys, where it has any, and becomes `options`."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Take the YAML's config. Raises pydantic.ValidationError when `config_model` refuses the own keys."""
        self.config = config
        self.options: pydantic.BaseModel | None = (
            self.config_model.model_validate(own_config(config)) if self.config_model else None
        )

    @abstractmethod
    def tools(self) -> list[Tool]:
        """Return the tools, each with the entry's CallLimits keys in its config. Raises ConfigError."""


class FunctionTool(Tool):
    """Plain function, sync or async, as a tool. Still callable as the function it was.

    It may return str, ToolResponse, or anything that has a JSON form (None, numbers, lists, dicts, dataclasses,
    pydantic models). A sync function runs in a thread of its own, unless `in_loop` says that it never waits and takes
    microseconds. An asynchronous generator yields the answer's pieces, which are texts.
    """

    def __init__(
        self,
        function: Callable[..., object],
        config: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        description: str | None = None,
        in_loop: bool = False,
    ) -> None:
        """Make the schema from the function's signature and docstring.

        Raises TypeError when no schema can be made of its parameters.
        """
        self.function = function
        self.arguments = arguments_model(function)
        text, _ = parse_docstring(inspect.getdoc(function) or "")
        declaration: FunctionSchema = {
            "name": name or function_name(function),
            "description": description or text,
            "parameters": parameters_schema(self.arguments),
        }
        super().__init__(config, {"type": "function", "function": declaration})
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(type(function), "__call__", None)  # noqa: B004 - an object whose __call__ is async
        )
        self._in_loop = in_loop
        self._threads = DaemonThreads(f"tool {self.name}")

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.function(*args, **kwargs)

    @property
    def code(self) -> Callable[..., object]:
        return self.function

    def checked(self, arguments: Mapping[str, object]) -> dict[str, Any]:
        """Convert a call's arguments to the types of the function's hints. Raises ToolArgumentsError."""
        try:
            return self.arguments.model_validate(arguments).__dict__
        except pydantic.ValidationError as error:
            problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
            raise ToolArgumentsError("; ".join(problems)) from error

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse | Pieces:
        checked = self.checked(arguments)
        if self._is_async or self._in_loop:
            answer = self.function(**checked)
            answer = await answer if inspect.isawaitable(answer) else answer
        else:
            answer = await self._threads.run(self.function, **checked)
        return answer if isinstance(answer, AsyncGenerator) else as_response(answer)


def as_response(value: object) -> ToolResponse:
    """Convert a function's return value to a response: text as it is, anything else as JSON.

    Raises TypeError for an object that has neither a JSON form nor a text of its own.
    """
    if isinstance(value, ToolResponse):
        return value
    if isinstance(value, str):
        return ToolResponse(value)
    try:
        return ToolResponse(pydantic_core.to_json(value, inf_nan_mode="constants", fallback=_text).decode())
    except pydantic_core.PydanticSerializationError as error:
        raise TypeError(f"a tool's answer must be a text or have a JSON form: {error}") from error


def _text(value: object) -> str:
    """Write an object without a JSON form. A text with its address says nothing, and another one in each run."""
    text = str(value)
    if hex(id(value)) in text:
        raise TypeError(f"found {type(value).__name__}")
    return text


@overload
def tool(function: Callable[..., object], /) -> FunctionTool: ...
@overload
def tool(
    *,
    name: str | None = None,
    description: str | None = None,
    in_loop: bool = False,
    **config: object,
) -> Callable[[Callable[..., object]], FunctionTool]: ...
def tool(
    function: Callable[..., object] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    in_loop: bool = False,
    **config: object,
) -> FunctionTool | Callable[[Callable[..., object]], FunctionTool]:
    """Make a tool of a function (decorator). `config` takes the keys of `agentrl.tool.shared.CallLimits`.

    @tool(timeout=5)
    async def weather(city: str) -> str:
        \"\"\"Tell the weather.

        Args:
            city: Where.
        \"\"\"
    """
    if function is not None:
        return FunctionTool(function)
    return lambda wrapped: FunctionTool(wrapped, config, name=name, description=description, in_loop=in_loop)
