"""The tools of a run."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from agentrl.errors import CodeError, ConfigError
from agentrl.system.cassette import Cassette
from agentrl.system.plugin import describe, read_entries
from agentrl.system.quota import Quota
from agentrl.system.recurring import ToldOnce
from agentrl.system.user_code import answer_of, code_error, numbers_of
from agentrl.tool import CALL_KEYS, FunctionTool, Tool, ToolSchema
from agentrl.tool.arguments import ArgumentCheck
from agentrl.tool.loading import tool_of_function, tools_of_entry
from agentrl.tool.session import NOT_SHOWN, CallLimits, Slot, ToolSession
from agentrl.tool.truncation import Decode, Encode, Side, truncate
from agentrl.trajectory.picture import Picture

logger = logging.getLogger(__name__)

BROKEN = (TypeError, AttributeError, NameError, ImportError, SyntaxError, NotImplementedError)
"""Errors of a tool's code rather than of what the policy asked it; an answer of another type than ToolResponse is a
TypeError."""
ENOUGH_CALLS = 8
ENOUGH_TRAJECTORIES = 4
"""Failed calls of a tool, and trajectories that made them, from which on they speak of the tool rather than of what the
policy asked it: a policy must not be able to end a run by one odd call, or one trajectory full of them."""


def _raise(error: CodeError) -> None:
    raise error


@dataclass(slots=True)
class Failed:
    """Calls that failed for errors of a tool's code."""

    calls: int = 0
    trajectories: set[str] = field(default_factory=set)
    """Their tries, up to as many as are enough."""


class ToolSet:
    """All tools of a run. `bind` a tokenizer before opening sessions; one object serves all trajectories."""

    def __init__(self, tools: Sequence[Tool], defaults: CallLimits, truncate_side: Side = "middle") -> None:
        """Raises ConfigError: duplicate names, invalid schemas or limits."""
        self.truncate_side = truncate_side
        self.default_max_tokens = defaults.max_response_tokens
        self.slots: dict[str, Slot] = {}
        self.schemas: list[ToolSchema] = []
        """Always the same list, by which a chat knows what it rendered before."""
        self.cassette: Cassette | None = None
        self.quota = Quota()
        """Of all tools of the run together."""
        self.encode: Encode | None = None
        self.image_tokens: Callable[[Picture], int] | None = None
        self.decode: Decode | None = None
        self.warn: Callable[[str], None] = logger.warning
        """Tells the user what is wrong with a tool."""
        self._once = ToldOnce()
        self._failed: dict[str, Failed] = {}
        """By tool, since it last answered in a batch."""
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
        cassette: Cassette | None = None,
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
        toolset.cassette = cassette
        for entry in read_entries(path, "tools") if path is not None else []:
            for tool in tools_of_entry(entry, cassette):
                try:
                    toolset._add(tool, defaults)
                except ConfigError as error:
                    raise entry.error(str(error)) from error
        return toolset

    @property
    def names(self) -> list[str]:
        return list(self.slots)

    @property
    def is_replay(self) -> bool:
        """Answers come from a cassette, and no tool is asked."""
        return self.cassette is not None and self.cassette.mode == "replay"

    def bind(self, encode: Encode, decode: Decode, image_tokens: Callable[[Picture], int] | None = None) -> None:
        """The tokenizer in whose tokens answers are measured. `encode` takes special-token text as plain text.

        `image_tokens`: how many stand for an image; None: the model takes none.
        """
        self.encode, self.decode, self.image_tokens = encode, decode, image_tokens

    def limit_run(self, max_concurrent: int | None, max_rate: float | None) -> None:
        """Calls of all tools together that run at once, and that begin in a second; None: no limit."""
        self.quota = Quota(max_concurrent, max_rate)

    async def start(self, run: str) -> None:
        """The run of that name begins: every tool reaches what it needs. Raises ConfigError."""
        if not self.is_replay:
            for slot in self.slots.values():
                await answer_of(f"tool {slot.tool.name}", slot.tool.start, functools.partial(slot.tool.start, run))

    async def close(self) -> None:
        """The run is over: end what trajectories left, then free what the tools hold."""
        await asyncio.gather(*self.closing, return_exceptions=True)
        for slot in self.slots.values():
            try:
                await slot.tool.close()
            except Exception as error:
                logger.warning("tool %s: close: %s: %s", slot.tool.name, type(error).__name__, error)
        if self.cassette is not None:
            self.cassette.close()

    def meet(self, slot: Slot, error: BaseException, instance_id: str) -> None:
        """What `execute` raised is told to the model; tell the user where it was raised, once a place.

        An exception does not say whether the code or the policy's arguments are to blame, and a policy must not be able
        to end a run. So it is the tool's error, for `check`, only where it is of a kind that arguments seldom provoke.
        """
        found = code_error(f"tool {slot.tool.name}", error, _code_of(slot.tool))
        if isinstance(error, BROKEN):
            slot.broken = slot.broken or found
            failed = self._failed.setdefault(slot.tool.name, Failed())
            failed.calls += 1
            if len(failed.trajectories) < ENOUGH_TRAJECTORIES:
                failed.trajectories.add(instance_id)
        if self._once(found.place or found.summary):
            self.warn(f"{found}\n  The model is told; errors that it should see are raised as agentrl.tool.ToolError")

    def check(self) -> None:
        """A batch of trajectories is over. Raises CodeError for a tool that answered no call of it, nor of those before
        since its code's first error, when enough calls of enough trajectories failed for such errors."""
        for name, slot in self.slots.items():
            if slot.answered:
                slot.answered, slot.broken = False, None
                self._failed.pop(name, None)
            failed = self._failed.get(name, Failed())
            is_enough = failed.calls >= ENOUGH_CALLS and len(failed.trajectories) >= ENOUGH_TRAJECTORIES
            if slot.broken is not None and is_enough:
                raise CodeError(
                    f"{slot.broken}\nThe tool {name} has answered no call any more: {failed.calls} failed for errors "
                    "of its code. Mend it and start the same command again, or go on, and let the model be told, with "
                    "actor_rollout_ref.rollout.agent.on_code_error=count",
                    slot.broken.place,
                )

    def take_metrics(self, meet: Callable[[CodeError], None] = _raise) -> dict[str, float]:
        """By tool, since they were last taken: seconds that calls waited for their turn, infrastructure faults, and
        the tool's own numbers (of a remote one: retries, faults by kind, the state of its breaker).

        `meet` is given an error of a tool's code, whose own numbers are left out."""
        metrics: dict[str, float] = {}
        for name, slot in self.slots.items():
            own = numbers_of(f"tool {name}", slot.tool.take_metrics, meet)
            numbers = {f"tool/{name}/{key}": value for key, value in own.items()}
            if slot.queued:
                waited, slot.queued = sorted(slot.queued), []
                numbers[f"tool/{name}/queue_seconds_mean"] = sum(waited) / len(waited)
                numbers[f"tool/{name}/queue_seconds_p99"] = percentile(waited, 0.99)
            if slot.faults:
                numbers[f"tool/{name}/faults"], slot.faults = float(slot.faults), 0
            metrics |= numbers
        return metrics

    async def open(
        self, instance_id: str, tools_kwargs: Mapping[str, Mapping[str, Any] | None], *, images: bool = True
    ) -> ToolSession:
        """Begin a trajectory. Tools that `tools_kwargs` names are created now, the others at their first call.

        Without `images` those of answers are left out, with a note.

        Raises DataError for the name of an unknown tool, ToolInfrastructureError when `create` fails.
        """
        if self._loop is not (loop := asyncio.get_running_loop()):
            self._loop = loop  # quotas belong to one event loop
            self.quota = self.quota.anew()
            for slot in self.slots.values():
                slot.quota = slot.quota.anew()
        session = ToolSession(self, instance_id, images=images)
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

    def cut_with_images(
        self, text: str, pictures: Sequence[Picture], limit: int, *, images: bool = True
    ) -> tuple[str, list[Picture], bool]:
        """Of an answer what is shown in `limit` tokens, and whether that is less than all: the images that fit, then as
        much text. A note says which images were left out; without `images` all are."""
        assert self.encode is not None and self.image_tokens is not None
        shown, used, notes = [], 0, ""
        if not images:
            pictures, notes = [], NOT_SHOWN.format(len(pictures))
        for number, picture in enumerate(pictures, 1):
            tokens = self.image_tokens(picture)
            if used + tokens <= limit:
                shown.append(picture)
                used += tokens
            else:
                notes += f"\n[image {number} left out: it has {tokens} tokens, and {limit - used} were left]"
        room = limit - used
        notes = self.cut(notes, room)[0] if notes and room else ""
        room -= len(self.encode(notes))
        kept, truncated = self.cut(text, room) if room > 0 else ("", bool(text))
        return kept + notes, shown, truncated or len(shown) < len(pictures) or bool(notes)


def _code_of(tool: Tool) -> Callable[..., Any]:
    """What a user wrote of a tool."""
    return tool.function if isinstance(tool, FunctionTool) else tool.execute


def percentile(ascending: Sequence[float], fraction: float) -> float:
    """The smallest of the values (at least one) that so large a fraction of them does not exceed."""
    return ascending[math.ceil(fraction * len(ascending)) - 1]


def _limits(tool: Tool, defaults: CallLimits) -> CallLimits:
    given = {key: value for key, value in tool.config.items() if key in CALL_KEYS}
    try:
        return CallLimits.model_validate({**defaults.model_dump(), "on_error": tool.default_on_error, **given})
    except pydantic.ValidationError as error:
        raise ConfigError(f"config of tool {tool.name!r}: {describe(error)}") from error
