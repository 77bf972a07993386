"""Tool set of a run: loading, limits, truncation of answers, metrics."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pydantic

from agentrl.errors import CodeError, ConfigError
from agentrl.system.call_journal import RENAMED, CallJournal, check_on_resume
from agentrl.system.cassette import Cassette
from agentrl.system.entries import read_entries
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Metrics
from agentrl.system.plugin import describe, nearest, with_present_keys, with_present_names
from agentrl.system.quota import Quota
from agentrl.system.user_code import await_user_code, collect_numbers
from agentrl.tool import CALL_KEYS, Tool, ToolSchema
from agentrl.tool.arguments import ArgumentCheck
from agentrl.tool.loading import tool_of_function, tools_of_entry
from agentrl.tool.session import ToolSession
from agentrl.tool.shared import CallLimits, SharedTools, Slot
from agentrl.tool.truncation import Side, Unit

logger = logging.getLogger(__name__)


def _raise(error: CodeError) -> None:
    raise error


class ToolSet(SharedTools):
    """All tools of a run. `bind` a tokenizer before opening sessions; one object serves all trajectories."""

    def __init__(
        self, tools: Sequence[Tool], defaults: CallLimits, truncate_side: Side = "middle", unit: Unit = "tokens"
    ) -> None:
        """Add the tools. Raises ConfigError: duplicate names, invalid schemas or limits."""
        super().__init__(defaults.max_response_tokens, truncate_side, unit)
        self.schemas: list[ToolSchema] = []
        """Schemas of all tools; always the same list object, by which a chat knows what it rendered before."""
        for tool in tools:
            self._add(tool, defaults)

    def _add(self, tool: Tool, defaults: CallLimits) -> None:
        tool = with_present_names(tool, RENAMED)
        check = ArgumentCheck(tool.schema)
        if tool.name in self.slots:
            raise ConfigError(f"two tools are called {tool.name!r}: give one of them another name in its schema")
        limits = _limits(tool, defaults)
        quota = Quota(limits.max_concurrent, limits.max_rate)
        self.slots[tool.name], self.checks[tool.name] = Slot(tool, limits, tool.is_stateful, quota), check
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
        """Load the tools of a YAML file (None: no tools) in the working directory, else in `configs/`.

        `options` are keys of `config` in place of the file's, by the tool's name. `further` are tool objects and plain
        functions that come after the file's tools.

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
        options = {name: with_present_keys(given, RENAMED) for name, given in options.items()}
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
        journal: CallJournal | None = None,
    ) -> ToolSession:
        """Begin a trajectory. Tools that `tools_kwargs` names are created now, the others at their first call.

        Without `images`, images of answers are left out, with a note. `journal` records the answers of calls, and
        replays recorded answers. Raises DataError for the name of an unknown tool,
        ToolInfrastructureError when `create` fails.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop, self.quota = loop, self.quota.fresh()
            for slot in self.slots.values():
                slot.quota = slot.quota.fresh()
        session = ToolSession(self, instance_id, images=images, journal=journal)
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
        if limits.on_resume is not None:
            check_on_resume(limits.on_resume, remembers=tool.remembers)
    except pydantic.ValidationError as error:
        raise ConfigError(f"config of tool {tool.name!r}: {describe(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"config of tool {tool.name!r}: {error}") from error
    return limits
