"""One trajectory's use of the run's tools.

Invariant: every call ends in a `ToolResult` that can be shown to the model, or raises ToolInfrastructureError,
CancelledError or, from `create` alone, CodeError. Every instance that was created is released exactly once.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypeVar

from agentrl.errors import CodeError, DataError, InfrastructureError
from agentrl.system.call_journal import CallJournal, Codec, answered, fields_as_json
from agentrl.system.cassette import MethodCall
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON, as_object
from agentrl.system.numbers import finite, number_of
from agentrl.system.plugin import nearest
from agentrl.system.threads import beside_loop
from agentrl.system.throttle import ThrottledWarnings
from agentrl.system.user_code import await_user_code, contract_error, is_fault
from agentrl.tool import ErrorKind, ToolError, ToolResponse
from agentrl.tool.shared import SharedTools, Slot
from agentrl.tool.truncation import NOT_SHOWN
from agentrl.trajectory.picture import Picture, as_picture

if TYPE_CHECKING:
    from PIL.Image import Image

warnings = ThrottledWarnings(logging.getLogger(__name__))
T = TypeVar("T")

_ERROR_CHARACTERS = 500
"""Characters of an exception's text that are kept before tokens are counted: a library may put a whole document into
it."""


class ToolInfrastructureError(InfrastructureError):
    """A tool failed for a reason that is not the policy's: the trajectory may be retried, and has no reward."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one call as the model is shown it."""

    text: str
    """Text that the model is shown."""
    error: ErrorKind | None = None
    reward: float | None = None
    seconds: float = 0.0
    """Duration of the call itself, without waiting for its turn (metric `tool/<name>/queue_seconds`)."""
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Path: base64, as in ToolResponse."""
    images: tuple[Picture, ...] = ()
    """Images that the model is shown before the text."""


@dataclass(slots=True)
class HookOutcome:
    """Outcome of one hook of a tool: an answer, an error to show to the model, or an infrastructure fault."""

    text: str = ""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """ErrorKind of an error to show to the model, whose message is `text`."""
    is_fault: bool = False
    """True for an infrastructure fault; `text` says what failed."""
    is_code_error: bool = False
    """True for an error of the tool's code; `text` describes it."""
    seconds: float = field(default=0.0, compare=False)
    files: dict[str, str] = field(default_factory=dict)
    images: list[str] = field(default_factory=list)
    """Image files in base64."""


OUTCOMES: Codec[HookOutcome] = Codec(fields_as_json, lambda content: HookOutcome(**json.loads(content)))


class ToolSession:
    """One trajectory's tools. Calls may run concurrently; `close` it once, however the trajectory ended."""

    __slots__ = (
        *("_closing", "_create_kwargs", "_created", "_images", "_journal", "_locks", "_state_keys", "_tools"),
        "instance_id",
    )

    def __init__(
        self, tools: SharedTools, instance_id: str, *, images: bool = True, journal: CallJournal | None = None
    ) -> None:
        self.instance_id = instance_id
        self._journal = journal
        self._images = images
        self._tools = tools
        self._create_kwargs: dict[str, dict[str, JSON]] = {}
        self._created: dict[str, Slot] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._state_keys: dict[str, str] = {}
        self._closing: asyncio.Task[list[float]] | None = None

    async def create_named(self, tools_kwargs: Mapping[str, Mapping[str, JSON] | None]) -> None:
        """Create the tools that the row names. Releases the created tools when one of them fails."""
        for name, kwargs in tools_kwargs.items():
            if name not in self._tools.slots:
                known = self._tools.names
                raise DataError(
                    f"tools_kwargs names the tool {name!r}{nearest(name, known)}; configured are "
                    f"{', '.join(known) or 'none'}: see actor_rollout_ref.rollout.multi_turn.tool_config_path"
                )
            if kwargs is not None:  # parquet fills the tools that other rows name with null
                self._create_kwargs[name] = dict(as_object(kwargs.get("create_kwargs")))
        slots = [self._tools.slots[name] for name in self._create_kwargs]
        try:
            for error in await asyncio.gather(*map(self._create, slots), return_exceptions=True):
                if error is not None:
                    raise error
        except BaseException:
            await self.close()
            raise

    async def _create(self, slot: Slot) -> None:
        """Create the tool's instance once a trajectory, also when first calls run concurrently."""
        name = slot.tool.name
        if not slot.stateful or name in self._created:
            return
        async with self._locks.setdefault(name, asyncio.Lock()):
            if name in self._created:  # by the call that held the lock
                return
            kwargs = self._create_kwargs.get(name, {})

            async def create() -> HookOutcome:
                await _hook(slot, slot.tool.create, self.instance_id, **kwargs)
                return HookOutcome()

            await self._via_cassette(slot, "create", kwargs, create)
            self._created[name] = slot

    async def call(self, name: str, arguments: dict[str, JSON] | None, parse_error: str | None = None) -> ToolResult:
        """Run one call, as the policy wrote it. `parse_error`: why it could not be read.

        Raises ToolInfrastructureError when the tool is configured with `on_error: fail`, or its `create` failed for a
        fault of the infrastructure; CodeError when `create` failed for any other reason.
        """
        if self._closing is not None:
            raise RuntimeError(f"tool session {self.instance_id} is closed")
        if parse_error is not None or arguments is None:
            return self._error(ErrorKind.PARSE, parse_error or "the call has no arguments")
        slot = self._tools.slots.get(name)
        if slot is None:
            shown, known = name[:64], self._tools.names
            message = f"no tool {shown!r}{nearest(shown, known)}; available: {', '.join(known) or 'none'}"
            return self._error(ErrorKind.UNKNOWN_TOOL, message)
        problem = slot.check(arguments)
        if problem is not None:
            return self._error(ErrorKind.ARGUMENTS, problem, slot.limits.max_response_tokens)
        await self._create(slot)
        # Recorded before it is cut, so that a cassette can be replayed under another tokenizer.
        execute = functools.partial(self._execute, slot, arguments)
        outcome = await self._answered(slot, "execute", arguments, execute)
        limit, seconds, metrics = slot.limits.max_response_tokens, outcome.seconds, dict(outcome.metrics)
        if outcome.error is not None:
            return self._error(ErrorKind(outcome.error), outcome.text, limit, seconds, metrics)
        if not outcome.images:
            cut = functools.partial(self._tools.truncation.text, outcome.text, limit)
            text, truncated = await beside_loop(len(outcome.text), cut)
            return ToolResult(text, None, outcome.reward, seconds, truncated, metrics, outcome.files)
        pictures = [Picture(base64.b64decode(image)) for image in outcome.images]
        fit = functools.partial(self._tools.truncation.with_images, outcome.text, pictures, limit, images=self._images)
        text, kept, truncated = await beside_loop(len(outcome.text), fit)
        return ToolResult(text, None, outcome.reward, seconds, truncated, metrics, outcome.files, tuple(kept))

    async def _answered(
        self, slot: Slot, hook: str, arguments: dict[str, JSON], perform: Callable[[], Awaitable[HookOutcome]]
    ) -> HookOutcome:
        """Run `perform` via the cassette; or give its outcome again, in a run that continues after a kill."""
        ask = functools.partial(self._via_cassette, slot, hook, arguments, perform)
        return await answered(self._journal, f"tool {slot.tool.name}", hook, arguments, ask, OUTCOMES)

    async def _via_cassette(
        self, slot: Slot, hook: str, arguments: dict[str, JSON], perform: Callable[[], Awaitable[HookOutcome]]
    ) -> HookOutcome:
        """Run `perform` and record its outcome, or replay the recorded one.

        Raises ToolInfrastructureError for a fault, CodeError for an error of the tool's code.
        """
        name, cassette = slot.tool.name, self._tools.cassette
        cause: BaseException | None = None
        if cassette is not None:
            asked = MethodCall(name, hook, self.instance_id, arguments, self._state_keys.get(name, ""))
            if slot.stateful:
                self._state_keys[name] = asked.key
        if cassette is not None and cassette.mode == "replay":
            outcome = HookOutcome(**cassette.replay(asked))
        else:
            try:
                outcome = await perform()
            except _Fault as fault:
                outcome, cause = HookOutcome(str(fault), is_fault=True), fault.__cause__
            except CodeError as error:
                if cassette is not None:
                    cassette.record(asked, asdict(HookOutcome(error.summary, is_fault=True, is_code_error=True)))
                raise
            if cassette is not None:
                cassette.record(asked, asdict(outcome))
        if outcome.is_code_error:
            raise CodeError(outcome.text)
        if outcome.is_fault:
            slot.faults += 1
            raise ToolInfrastructureError(f"tool {name}: {outcome.text}") from cause
        return outcome

    async def _execute(self, slot: Slot, arguments: dict[str, JSON]) -> HookOutcome:
        async with slot.quota as first, self._tools.quota as second:
            slot.queued.append(first + second)
            # From here, since a call must not lose its time to those before it in the queue.
            begun = time.perf_counter()
            deadline = within(slot.limits.timeout)
            try:
                async with deadline as timeout:
                    response = await awaited(slot.tool.execute(self.instance_id, arguments))
                check_response(response)
                images = [_encoded(one) for one in response.images] if self._tools.takes_images else []
            except ToolError as error:
                slot.answered = True
                return HookOutcome(str(error), error=error.kind, seconds=time.perf_counter() - begun)
            except ToolInfrastructureError as error:
                raise _Fault(str(error)) from error
            except (Exception, SystemExit) as error:
                kind, text = ErrorKind.EXECUTION, f"{type(error).__name__}: {error}"
                if isinstance(error, TimeoutError) and timeout.expired():
                    kind, text = ErrorKind.TIMEOUT, f"{slot.tool.name} gave no answer within {slot.limits.timeout:g} s"
                elif not is_fault(error):
                    self._tools.report(slot, error, self.instance_id)
                if slot.limits.on_error == "fail":
                    raise _Fault(_one_line(text)) from error
                return HookOutcome(text, error=kind, seconds=time.perf_counter() - begun)
            slot.answered = True
            unseen = len(response.images) - len(images)
            text = response.text + (NOT_SHOWN.format(unseen) if unseen else "")
            self._tools.on_answer(self.instance_id, slot.tool.name, arguments, None if images else text)
            seconds, files = time.perf_counter() - begun, response.files
            reward = None if response.reward is None else float(response.reward)
            metrics = {str(name): float(value) for name, value in response.metrics.items()}
            return HookOutcome(text, reward, metrics, seconds=seconds, files=files, images=images)

    def _error(
        self,
        kind: ErrorKind,
        message: str,
        limit: int | None = None,
        seconds: float = 0.0,
        metrics: dict[str, float] | None = None,
    ) -> ToolResult:
        word = ErrorKind.EXECUTION if kind is ErrorKind.REFUSED else kind  # one word for the model, as ever
        text, truncated = self._tools.truncation.text(
            f"Error ({word.value}): {_one_line(message)}", limit or self._tools.default_max_tokens
        )
        return ToolResult(text, kind, None, seconds, truncated, metrics or {})

    async def close(self) -> list[float]:
        """Ask every created tool for its reward, then release it; return the rewards that were given.

        Release happens even when this is cancelled. Closing again changes nothing and returns the same. Raises
        ToolInfrastructureError or CodeError, after all releases, when `calc_reward` failed.
        """
        if self._closing is None:
            if not self._created:
                return []
            # A task of its own, because the caller may be cancelled in the middle.
            self._closing = asyncio.create_task(self._close())
            self._tools.closing.add(self._closing)
            self._closing.add_done_callback(self._tools.closing.discard)
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
                outcome = await self._answered(slot, "calc_reward", {}, functools.partial(self._reward, slot))
                if outcome.reward is not None:
                    rewards.append(outcome.reward)
            except Exception as error:
                fault = fault or error
            finally:
                if not self._tools.is_replay:
                    try:
                        await _hook(slot, slot.tool.release, self.instance_id)
                    except (_Fault, CodeError) as failed:  # what it did stays valid
                        warnings.warn(f"trajectory {self.instance_id}", f"tool {slot.tool.name}: {failed}")
        if fault is not None:
            raise fault
        return rewards

    async def _reward(self, slot: Slot) -> HookOutcome:
        reward = await _hook(slot, slot.tool.calc_reward, self.instance_id)
        if reward is not None and finite(reward) is None:
            problem = f"it must return a finite number or None, found {reward!r:.100}"
            raise contract_error(f"tool {slot.tool.name}", slot.tool.calc_reward, problem)
        return HookOutcome(reward=None if reward is None else float(reward))


class _Fault(Exception):
    """A tool failed, and not through the policy's fault."""


class WrongResponse(TypeError):
    """A tool's `execute` returned a value that its contract forbids."""


async def awaited(answer: Awaitable[T]) -> T:
    """Await the result of `execute`. Raises WrongResponse when it is no coroutine function."""
    if not inspect.isawaitable(answer):
        raise WrongResponse("execute must be a coroutine function (`async def`)")
    return await answer


def check_response(response: object) -> None:
    """Raise WrongResponse for a value that is no ToolResponse, or one with a part of another type."""
    if not isinstance(response, ToolResponse):
        raise WrongResponse(f"execute must return a ToolResponse, found {type(response).__name__} {response!r:.100}")
    if not isinstance(response.text, str):
        raise _wrong_part("text", "a text", response.text)
    if response.reward is not None and finite(response.reward) is None:
        raise _wrong_part("reward", "a finite number or None", response.reward)
    # The builtin class stands first because it answers at once, and an abstract one takes a microsecond.
    if not isinstance(response.metrics, (dict, Mapping)) or None in map(number_of, response.metrics.values()):
        raise _wrong_part("metrics", "a mapping of names to numbers", response.metrics)
    if not isinstance(response.files, (dict, Mapping)):
        raise _wrong_part("files", "a mapping of paths to base64", response.files)
    if not isinstance(response.images, (list, Sequence)) or isinstance(response.images, (str, bytes)):
        raise _wrong_part("images", "a list", response.images)


def _wrong_part(name: str, kind: str, found: object) -> WrongResponse:
    return WrongResponse(f"the {name} of its ToolResponse must be {kind}, found {found!r:.100}")


def _encoded(image: bytes | Picture | Image) -> str:
    """Encode an image file in base64. Raises DataError for a value that is no image, or a damaged one."""
    picture = as_picture(image)
    picture.decode()
    return base64.b64encode(picture.data).decode()


async def _hook(slot: Slot, hook: Callable[..., Awaitable[T]], /, *arguments: object, **kwargs: object) -> T:
    """Await a method of the tool within the tool's deadline.

    Raises _Fault for a fault of the infrastructure or the row, CodeError for an error of the tool's code.
    """
    deadline = within(slot.limits.timeout)
    try:
        async with deadline as timeout:
            call = functools.partial(hook, *arguments, **kwargs)
            return await await_user_code(f"tool {slot.tool.name}", hook, call, passing=(ToolError,))
    except CodeError:
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {_one_line(str(error))}"
        if timeout.expired():
            problem = f"not done within {slot.limits.timeout:g} s"
        raise _Fault(f"{hook.__name__}: {problem}") from error


def _one_line(text: str) -> str:
    return " ".join(text[:_ERROR_CHARACTERS].split()) + (" ..." if len(text) > _ERROR_CHARACTERS else "")
