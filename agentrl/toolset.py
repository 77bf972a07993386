"""The tools of a run, and one trajectory's use of them.

Invariant: every call ends in a `ToolResult` that can be shown to the model, or raises ToolInfrastructureError or
CancelledError. Every instance that was created is released exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import pydantic

from agentrl.errors import ConfigError, DataError
from agentrl.plugin import describe, nearest, read_entries
from agentrl.tool import CALL_KEYS, ErrorKind, Tool, ToolError, ToolResponse, ToolSchema
from agentrl.tool_arguments import ArgumentCheck
from agentrl.tool_loading import tool_of_entry, tool_of_function
from agentrl.truncation import Decode, Encode, Side, truncate

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ERROR_CHARACTERS = 500
"""An exception's text is cut here before tokens are counted: a library may put a whole document into it."""


class ToolInfrastructureError(RuntimeError):
    """A tool failed for a reason that is not the policy's: the trajectory may be retried, and has no reward."""


class CallLimits(pydantic.BaseModel):
    """The config keys that every tool has."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["native", "function"] = "native"
    """As in other trainers' files; the entry's `class_name` or `function` already says it."""
    timeout: float = pydantic.Field(30.0, gt=0)
    """Seconds of one call (and of create, calc_reward and release); waiting for a free place does not count."""
    max_concurrent: int = pydantic.Field(1024, gt=0)
    """Calls of this tool that run at once, over all trajectories."""
    max_response_tokens: int = pydantic.Field(1024, gt=0)
    """Tokens of one answer; longer ones are cut with a visible marker."""
    on_error: Literal["tell", "fail"] = "tell"
    """tell: an exception or time-out is the tool's answer; fail: it fails the trajectory as an infrastructure fault."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of one call."""

    text: str
    """What the model is shown."""
    error: ErrorKind | None = None
    reward: float | None = None
    seconds: float = 0.0
    """Of the call itself, without waiting for a free place (metric `tool/queue_seconds`)."""
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Slot:
    """One tool with its limits and what was compiled from them."""

    tool: Tool
    limits: CallLimits
    check: ArgumentCheck
    stateful: bool
    """It has an instance a trajectory: any of create, calc_reward, release is more than the base class's no-op."""
    places: asyncio.Semaphore


class ToolSet:
    """All tools of a run. `bind` a tokenizer before opening sessions; one object serves all trajectories."""

    def __init__(self, tools: Sequence[Tool], defaults: CallLimits, truncate_side: Side = "middle") -> None:
        """Raises ConfigError: duplicate names, invalid schemas or limits."""
        self.truncate_side = truncate_side
        self.default_max_tokens = defaults.max_response_tokens
        self.slots: dict[str, _Slot] = {}
        self.schemas: list[ToolSchema] = []
        """Always the same list, by which a chat knows what it rendered before."""
        self.encode: Encode | None = None
        self.decode: Decode | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing: set[asyncio.Task[list[float]]] = set()
        for tool in tools:
            self._add(tool, defaults)

    def _add(self, tool: Tool, defaults: CallLimits) -> None:
        check = ArgumentCheck(tool.schema)
        if tool.name in self.slots:
            raise ConfigError(f"two tools are called {tool.name!r}: give one of them another name in its schema")
        limits = _limits(tool, defaults)
        hooks = ("create", "calc_reward", "release")
        stateful = any(getattr(type(tool), hook) is not getattr(Tool, hook) for hook in hooks)
        places = asyncio.Semaphore(limits.max_concurrent)
        self.slots[tool.name] = _Slot(tool, limits, check, stateful, places)
        self.schemas.append(tool.schema)

    @staticmethod
    def of(
        tools: Sequence[Tool | Callable[..., Any]],
        *,
        timeout: float = 30.0,
        max_response_tokens: int = 1024,
        truncate_side: Side = "middle",
    ) -> ToolSet:
        """From tool objects and plain functions. A tool's own config wins over the limits given here.

        Raises ConfigError.
        """
        defaults = CallLimits(timeout=timeout, max_response_tokens=max_response_tokens)
        ready = [item if isinstance(item, Tool) else tool_of_function(item, {}) for item in tools]
        return ToolSet(ready, defaults, truncate_side)

    @staticmethod
    def from_yaml(
        path: str | Path | None,
        *,
        timeout: float = 30.0,
        max_response_tokens: int = 1024,
        truncate_side: Side = "middle",
    ) -> ToolSet:
        """From a YAML file (None: no tools). Its path is relative to the working directory, else to `configs/`.

            tools:
              - class_name: tools.calculator.CalculatorTool
                config: {timeout: 5}          # keys of CallLimits, and the tool's own
                tool_schema: {...}            # optional: an OpenAI function schema, instead of the class's own
              - function: my.module.my_function
                config: {max_concurrent: 4}

        Raises ConfigError naming the file and the entry.
        """
        defaults = CallLimits(timeout=timeout, max_response_tokens=max_response_tokens)
        toolset = ToolSet([], defaults, truncate_side)
        for entry in read_entries(path, "tools") if path is not None else []:
            tool = tool_of_entry(entry)
            try:
                toolset._add(tool, defaults)
            except ConfigError as error:
                raise entry.error(str(error)) from error
        return toolset

    @property
    def names(self) -> list[str]:
        return list(self.slots)

    def bind(self, encode: Encode, decode: Decode) -> None:
        """The tokenizer in whose tokens answers are measured. `encode` takes special-token text as plain text."""
        self.encode, self.decode = encode, decode

    async def open(self, instance_id: str, tools_kwargs: Mapping[str, Mapping[str, Any] | None]) -> ToolSession:
        """Begin a trajectory. Tools that `tools_kwargs` names are created now, the others at their first call.

        Raises DataError for the name of an unknown tool, ToolInfrastructureError when `create` fails.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop  # a semaphore belongs to one event loop
            for slot in self.slots.values():
                slot.places = asyncio.Semaphore(slot.limits.max_concurrent)
        session = ToolSession(self, instance_id)
        if tools_kwargs:
            await session.create_named(tools_kwargs)
        return session

    def cut(self, text: str, limit: int) -> tuple[str, bool]:
        """`text` within `limit` tokens, as text that any tokenizer takes. Raises RuntimeError before `bind`."""
        if self.encode is None or self.decode is None:
            raise RuntimeError("ToolSet.bind(encode, decode) must be called first: tool answers are measured in tokens")
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode()  # lone surrogates
        return truncate(text, limit, self.truncate_side, self.encode, self.decode)


class ToolSession:
    """One trajectory's tools. Calls may run concurrently; `close` it once, however the trajectory ended."""

    __slots__ = ("_closing", "_create_kwargs", "_created", "_locks", "_set", "instance_id")

    def __init__(self, toolset: ToolSet, instance_id: str) -> None:
        self.instance_id = instance_id
        self._set = toolset
        self._create_kwargs: dict[str, dict[str, Any]] = {}
        self._created: dict[str, _Slot] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._closing: asyncio.Task[list[float]] | None = None

    async def create_named(self, tools_kwargs: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Create the tools that the row names. Releases what was created when one of them fails."""
        for name, kwargs in tools_kwargs.items():
            if name not in self._set.slots:
                raise DataError(
                    f"tools_kwargs names the tool {name!r}{nearest(name, self._set.names)}; configured are "
                    f"{', '.join(self._set.names) or 'none'}: see actor_rollout_ref.rollout.multi_turn.tool_config_path"
                )
            if kwargs is not None:  # parquet fills the tools that other rows name with null
                self._create_kwargs[name] = dict(kwargs.get("create_kwargs") or {})
        slots = [self._set.slots[name] for name in self._create_kwargs]
        try:
            for error in await asyncio.gather(*map(self._create, slots), return_exceptions=True):
                if error is not None:
                    raise error
        except BaseException:
            await self.close()
            raise

    async def _create(self, slot: _Slot) -> None:
        """Once a trajectory, also when first calls run concurrently."""
        name = slot.tool.name
        if not slot.stateful or name in self._created:
            return
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._created:
                return
            kwargs = self._create_kwargs.get(name, {})
            await _within(slot, slot.tool.create, self.instance_id, **kwargs)
            self._created[name] = slot

    async def call(self, name: str, arguments: dict[str, Any] | None, parse_error: str | None = None) -> ToolResult:
        """Run one call, as the policy wrote it. `parse_error`: why it could not be read.

        Raises ToolInfrastructureError: the tool is configured with `on_error: fail`, its `create` failed, or it
        answered with something that is no ToolResponse.
        """
        if self._closing is not None:
            raise RuntimeError(f"tool session {self.instance_id} is closed")
        if parse_error is not None or arguments is None:
            return self._error(None, ErrorKind.PARSE, parse_error or "the call has no arguments")
        slot = self._set.slots.get(name)
        if slot is None:
            shown, known = name[:64], self._set.names
            message = f"no tool {shown!r}{nearest(shown, known)}; available: {', '.join(known) or 'none'}"
            return self._error(None, ErrorKind.UNKNOWN_TOOL, message)
        problem = slot.check(arguments)
        if problem is not None:
            return self._error(slot, ErrorKind.ARGUMENTS, problem)
        await self._create(slot)
        return await self._execute(slot, arguments)

    async def _execute(self, slot: _Slot, arguments: dict[str, Any]) -> ToolResult:
        metrics: dict[str, float] = {}
        if slot.places.locked():
            queued = time.perf_counter()
            await slot.places.acquire()
            metrics["tool/queue_seconds"] = time.perf_counter() - queued
        else:
            await slot.places.acquire()
        begun = time.perf_counter()
        deadline = asyncio.timeout(slot.limits.timeout)
        fault: tuple[ErrorKind, str]
        try:
            async with deadline:
                response = await slot.tool.execute(self.instance_id, arguments)
            return self._answer(slot, response, time.perf_counter() - begun, metrics)
        except ToolError as error:
            return self._error(slot, error.kind, str(error), time.perf_counter() - begun, metrics)
        except ToolInfrastructureError:
            raise
        except (Exception, SystemExit) as error:
            cause = error
            if isinstance(error, TimeoutError) and deadline.expired():
                fault = ErrorKind.TIMEOUT, f"{slot.tool.name} gave no answer within {slot.limits.timeout:g} s"
            else:
                fault = ErrorKind.EXECUTION, f"{type(error).__name__}: {error}"
        finally:
            slot.places.release()
        if slot.limits.on_error == "fail":
            raise ToolInfrastructureError(f"tool {slot.tool.name}: {_one_line(fault[1])}") from cause
        return self._error(slot, *fault, time.perf_counter() - begun, metrics)

    def _answer(self, slot: _Slot, response: ToolResponse, seconds: float, metrics: dict[str, float]) -> ToolResult:
        if not isinstance(response, ToolResponse) or not isinstance(response.text, str):
            raise ToolInfrastructureError(
                f"tool {slot.tool.name}: execute must return a ToolResponse with a text, found {response!r:.200}"
            )
        if response.reward is not None and not math.isfinite(response.reward):
            raise ToolInfrastructureError(f"tool {slot.tool.name}: the reward is {response.reward}")
        text, truncated = self._set.cut(response.text, slot.limits.max_response_tokens)
        if response.metrics:
            metrics.update(response.metrics)
        return ToolResult(text, None, response.reward, seconds, truncated, metrics)

    def _error(
        self,
        slot: _Slot | None,
        kind: ErrorKind,
        message: str,
        seconds: float = 0.0,
        metrics: dict[str, float] | None = None,
    ) -> ToolResult:
        limit = slot.limits.max_response_tokens if slot else self._set.default_max_tokens
        text, truncated = self._set.cut(f"Error ({kind.value}): {_one_line(message)}", limit)
        return ToolResult(text, kind, None, seconds, truncated, metrics or {})

    async def close(self) -> list[float]:
        """Ask every created tool for its reward, then release it; the rewards that were given.

        Release happens even when this is cancelled. Closing again changes nothing and gives the same. Raises
        ToolInfrastructureError, after all releases, when `calc_reward` failed.
        """
        if self._closing is None:
            if not self._created:
                return []
            # A task of its own, because the caller may be cancelled in the middle.
            self._closing = asyncio.create_task(self._close())
            self._set.closing.add(self._closing)
            self._closing.add_done_callback(self._set.closing.discard)
        try:
            return await asyncio.shield(self._closing)
        except asyncio.CancelledError:
            await asyncio.wait([self._closing])
            self._closing.exception()  # seen: asyncio would report it as forgotten
            raise

    async def _close(self) -> list[float]:
        rewards: list[float] = []
        fault: Exception | None = None
        for slot in self._created.values():
            try:
                reward = await _within(slot, slot.tool.calc_reward, self.instance_id)
                if reward is not None and not math.isfinite(reward):
                    raise ToolInfrastructureError(f"tool {slot.tool.name}: calc_reward gave {reward}")
                if reward is not None:
                    rewards.append(float(reward))
            except Exception as error:
                fault = fault or error
            finally:
                await self._release(slot)
        if fault is not None:
            raise fault
        return rewards

    async def _release(self, slot: _Slot) -> None:
        try:
            await _within(slot, slot.tool.release, self.instance_id)
        except ToolInfrastructureError as error:
            logger.warning("trajectory %s: %s", self.instance_id, error)  # what it did stays valid


async def _within(slot: _Slot, hook: Callable[..., Awaitable[T]], instance_id: str, **kwargs: Any) -> T:
    """A method of the tool within the tool's deadline. Raises ToolInfrastructureError for whatever goes wrong."""
    deadline = asyncio.timeout(slot.limits.timeout)
    try:
        async with deadline:
            return await hook(instance_id, **kwargs)
    except Exception as error:
        problem = f"{type(error).__name__}: {_one_line(str(error))}"
        if deadline.expired():
            problem = f"not done within {slot.limits.timeout:g} s"
        raise ToolInfrastructureError(f"tool {slot.tool.name}: {hook.__name__}: {problem}") from error


def _one_line(text: str) -> str:
    return " ".join(text[:_ERROR_CHARACTERS].split()) + (" ..." if len(text) > _ERROR_CHARACTERS else "")


def _limits(tool: Tool, defaults: CallLimits) -> CallLimits:
    given = {key: value for key, value in tool.config.items() if key in CALL_KEYS}
    try:
        return CallLimits.model_validate({**defaults.model_dump(), **given})
    except pydantic.ValidationError as error:
        raise ConfigError(f"config of tool {tool.name!r}: {describe(error)}") from error
