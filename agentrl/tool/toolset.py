"""Tool set of a run: loading, limits, truncation of answers, metrics."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pydantic

from agentrl.errors import CodeError, ConfigError
from agentrl.system.answers import Answers, check_after_kill
from agentrl.system.cassette import Cassette
from agentrl.system.entries import read_entries
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Metrics
from agentrl.system.plugin import describe, nearest
from agentrl.system.quota import Quota
from agentrl.system.throttle import OncePerKey
from agentrl.system.user_code import await_user_code, code_error, collect_numbers
from agentrl.tool import CALL_KEYS, Tool, ToolSchema
from agentrl.tool.arguments import ArgumentCheck
from agentrl.tool.loading import tool_of_function, tools_of_entry
from agentrl.tool.session import CallLimits, Slot, ToolSession
from agentrl.tool.truncation import Decode, Encode, Side, Truncation, Unit
from agentrl.trajectory.picture import Picture

logger = logging.getLogger(__name__)

CODE_ERRORS = (TypeError, AttributeError, NameError, ImportError, SyntaxError, NotImplementedError)
"""Errors of a tool's code rather than of what the policy asked it; an answer of another type than ToolResponse is a
TypeError."""
MIN_FAILED_CALLS = 8
MIN_FAILED_TRAJECTORIES = 4
"""Failed calls of a tool, and trajectories that made them, from which on the tool itself is taken to be in error.

Both are asked for because a policy must not be able to end a run by one odd call, or one trajectory full of them."""


def _raise(error: CodeError) -> None:
    raise error


@dataclass(slots=True)
class FailureCount:
    """Calls that failed through errors of a tool's code, and the trajectories that made them."""

    calls: int = 0
    trajectories: set[str] = field(default_factory=set)
    """Names of the trajectories that made them, up to MIN_FAILED_TRAJECTORIES."""


class ToolSet:
    """All tools of a run. `bind` a tokenizer before opening sessions; one object serves all trajectories."""

    def __init__(
        self, tools: Sequence[Tool], defaults: CallLimits, truncate_side: Side = "middle", unit: Unit = "tokens"
    ) -> None:
        """Add the tools. Raises ConfigError: duplicate names, invalid schemas or limits."""
        self.truncate_side, self.unit = truncate_side, unit
        self.default_max_tokens = defaults.max_response_tokens
        self.slots: dict[str, Slot] = {}
        self.schemas: list[ToolSchema] = []
        """Schemas of all tools; always the same list object, by which a chat knows what it rendered before."""
        self.cassette: Cassette | None = None
        self.quota = Quota()
        """Limit of all tools of the run together."""
        self._truncation: Truncation | None = None
        self.warn: Callable[[str], None] = logger.warning
        """Function that tells the user what is wrong with a tool."""
        self._is_new_place = OncePerKey()
        self._failed: dict[str, FailureCount] = {}
        """Failures by tool, since it last answered in a batch."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.closing: set[asyncio.Task[list[float]]] = set()
        for tool in tools:
            self._add(tool, defaults)

    def _add(self, tool: Tool, defaults: CallLimits) -> None:
        check = ArgumentCheck(tool.schema)
        if tool.name in self.slots:
            raise ConfigError(f"two tools are called {tool.name!r}: give one of them another name in its schema")
        limits = _limits(tool, defaults)
        quota = Quota(limits.max_concurrent, limits.max_rate)
        self.slots[tool.name] = Slot(tool, limits, check, tool.is_stateful, quota)
        self.schemas.append(tool.schema)

    @staticmethod
    def from_tools(
        tools: Sequence[Tool | Callable[..., object]],
        *,
        timeout: float = 30.0,
        max_response_tokens: int = 1024,
        truncate_side: Side = "middle",
    ) -> ToolSet:
        """Make a tool set of tool objects and plain functions. A tool's own config wins over the limits given here.

        Raises ConfigError.
        """
        defaults = CallLimits(timeout=timeout, max_response_tokens=max_response_tokens)
        ready = [item if isinstance(item, Tool) else tool_of_function(item, {}) for item in tools]
        return ToolSet(ready, defaults, truncate_side)

    @staticmethod
    def from_yaml(
        path: str | Path | None,
        *,
        options: Mapping[str, Mapping[str, JSON]] = {},
        timeout: float = 30.0,
        max_response_tokens: int = 1024,
        truncate_side: Side = "middle",
        unit: Unit = "tokens",
        cassette: Cassette | None = None,
        further: Sequence[Tool | Callable[..., object]] = (),
    ) -> ToolSet:
        """Load the tools of a YAML file (None: no tools), looked for in the working directory, else in `configs/`.

        `options` are keys of `config` in place of the file's, by the tool's name. `further` are tool objects and plain
        functions that come behind those of the file.

            tools:
              - class_name: tools.calculator.CalculatorTool
                config: {timeout: 5}          # keys of CallLimits, and the tool's own
                tool_schema: {...}            # optional: an OpenAI function schema, instead of the class's own
              - function: my.module.my_function
                config: {max_concurrent: 4}

        Raises ConfigError naming the file and the entry.
        """
        defaults = CallLimits(timeout=timeout, max_response_tokens=max_response_tokens)
        toolset = ToolSet([], defaults, truncate_side, unit)
        toolset.cassette = cassette
        for entry in read_entries(path, "tools") if path is not None else []:
            for tool in tools_of_entry(entry, cassette, options):
                try:
                    toolset._add(tool, defaults)
                except ConfigError as error:
                    raise entry.error(str(error)) from error
        for name in options:
            if name not in toolset.slots:
                raise ConfigError(
                    f"actor_rollout_ref.rollout.multi_turn.tool_options: unknown tool {name!r}"
                    f"{nearest(name, toolset.names)}; {path} has {', '.join(toolset.names) or 'none'}"
                )
        for item in further:
            toolset._add(item if isinstance(item, Tool) else tool_of_function(item, {}), defaults)
        return toolset

    @property
    def names(self) -> list[str]:
        """Names of the tools, in the order of their entries."""
        return list(self.slots)

    @property
    def is_replay(self) -> bool:
        """True when answers come from a cassette, and no tool is asked."""
        return self.cassette is not None and self.cassette.mode == "replay"

    def bind(self, encode: Encode, decode: Decode, image_tokens: Callable[[Picture], int] | None = None) -> None:
        """Set the tokenizer in whose tokens answers are measured. `encode` takes special-token text as plain text.

        `image_tokens` returns the number of tokens that stand for an image; None: the model takes no images.
        """
        if self.unit == "characters":
            self._truncation = Truncation.by_characters(image_tokens, self.truncate_side)
        else:
            self._truncation = Truncation(encode, decode, image_tokens, self.truncate_side)

    @property
    def truncation(self) -> Truncation:
        """Truncation of answers to their limits. Raises RuntimeError before `bind`."""
        if self._truncation is None:
            raise RuntimeError("ToolSet.bind(encode, decode) must be called first: tool answers are measured in tokens")
        return self._truncation

    @property
    def takes_images(self) -> bool:
        """True when the model can be shown images; False before `bind`."""
        return self._truncation is not None and self._truncation.image_tokens is not None

    def limit_run(self, max_concurrent: int | None, max_rate: float | None) -> None:
        """Limit all tools together: calls that run at once, and that begin in a second; None: no limit."""
        self.quota = Quota(max_concurrent, max_rate)

    async def start(self, run: str) -> None:
        """Start every tool for the run of that name. Raises ConfigError."""
        if not self.is_replay:
            for slot in self.slots.values():
                await await_user_code(
                    f"tool {slot.tool.name}", slot.tool.start, functools.partial(slot.tool.start, run)
                )

    async def close(self) -> None:
        """End what trajectories left, then close all tools, at the end of the run."""
        await asyncio.gather(*self.closing, return_exceptions=True)
        for slot in self.slots.values():
            try:
                await slot.tool.close()
            except Exception as error:
                logger.warning("tool %s: close: %s: %s", slot.tool.name, type(error).__name__, error)
        if self.cassette is not None:
            self.cassette.close()

    def report_error(self, slot: Slot, error: BaseException, instance_id: str) -> None:
        """Tell the user, once a place, where an exception of `execute` was raised; the model is told its text.

        An exception does not say whether the code or the policy's arguments are to blame, and a policy must not be able
        to end a run. So it is the tool's error, for `check`, only where it is of a kind that arguments seldom provoke.
        """
        found = code_error(f"tool {slot.tool.name}", error, slot.tool.code)
        if isinstance(error, CODE_ERRORS):
            slot.broken = slot.broken or found
            failed = self._failed.setdefault(slot.tool.name, FailureCount())
            failed.calls += 1
            if len(failed.trajectories) < MIN_FAILED_TRAJECTORIES:
                failed.trajectories.add(instance_id)
        if self._is_new_place(found.place or found.summary):
            self.warn(f"{found}\n  The model is told; errors that it should see are raised as agentrl.tool.ToolError")

    def check(self) -> None:
        """Raise CodeError for a tool that answers no call any more; called after each batch of trajectories.

        Such a tool answered no call of this batch, nor of those before since its code's first error, and enough calls
        of enough trajectories failed with such errors.
        """
        for name, slot in self.slots.items():
            if slot.answered:
                slot.answered, slot.broken = False, None
                self._failed.pop(name, None)
            failed = self._failed.get(name, FailureCount())
            is_enough = failed.calls >= MIN_FAILED_CALLS and len(failed.trajectories) >= MIN_FAILED_TRAJECTORIES
            if slot.broken is not None and is_enough:
                raise CodeError(
                    f"{slot.broken}\nThe tool {name} has answered no call any more: {failed.calls} failed for errors "
                    "of its code. Mend it and start the same command again, or go on, and let the model be told, with "
                    "actor_rollout_ref.rollout.agent.on_code_error=count",
                    slot.broken.place,
                )

    def take_metrics(self, on_error: Callable[[CodeError], None] = _raise) -> Metrics:
        """Return and reset the metrics by tool: seconds that calls waited for their turn, faults, and the tool's own.

        A remote tool's own numbers are retries, faults by kind and the state of its breaker. `on_error` is called with
        an error of a tool's code, whose own numbers are left out. The largest 99th percentile of several rollout
        workers is kept.
        """
        metrics = Metrics()
        for name, slot in self.slots.items():
            metrics.add(collect_numbers(f"tool {name}", slot.tool.take_metrics, on_error), f"tool/{name}/")
            if slot.queued:
                waited, slot.queued = sorted(slot.queued), []
                metrics.mean(f"tool/{name}/queue_seconds_mean", sum(waited) / len(waited), len(waited))
                metrics.max(f"tool/{name}/queue_seconds_p99", percentile(waited, 0.99))
            if slot.faults:
                metrics.sum(f"tool/{name}/faults", slot.faults)
                slot.faults = 0
        return metrics

    async def open(
        self,
        instance_id: str,
        tools_kwargs: Mapping[str, Mapping[str, JSON] | None],
        *,
        images: bool = True,
        answers: Answers | None = None,
    ) -> ToolSession:
        """Begin a trajectory. Tools that `tools_kwargs` names are created now, the others at their first call.

        Without `images`, images of answers are left out, with a note. `answers` takes down what calls are answered, and
        gives again what is recorded. Raises DataError for the name of an unknown tool,
        ToolInfrastructureError when `create` fails.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop  # quotas belong to one event loop
            self.quota = self.quota.fresh()
            for slot in self.slots.values():
                slot.quota = slot.quota.fresh()
        session = ToolSession(self, instance_id, images=images, answers=answers)
        if tools_kwargs:
            await session.create_named(tools_kwargs)
        return session


def percentile(ascending: Sequence[float], fraction: float) -> float:
    """Nearest-rank percentile of a non-empty ascending sequence; `fraction` in (0, 1]."""
    return ascending[math.ceil(fraction * len(ascending)) - 1]


def _limits(tool: Tool, defaults: CallLimits) -> CallLimits:
    given = {key: value for key, value in tool.config.items() if key in CALL_KEYS}
    try:
        limits = CallLimits.model_validate({**defaults.model_dump(), "on_error": tool.default_on_error, **given})
        if limits.after_kill is not None:
            check_after_kill(limits.after_kill, remembers=tool.remembers)
    except pydantic.ValidationError as error:
        raise ConfigError(f"config of tool {tool.name!r}: {describe(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"config of tool {tool.name!r}: {error}") from error
    return limits
