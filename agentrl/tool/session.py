"""One trajectory's use of the run's tools.

Invariant: every call ends in a `ToolAnswer` that can be shown to the model, or raises ToolInfrastructureError,
CancelledError or, from `create` alone, CodeError. Every instance that was created is released exactly once.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from agentrl.errors import CodeError, DataError, InfrastructureError
from agentrl.system.call_journal import CallJournal, answered
from agentrl.system.cassette import MethodCall
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON, as_object
from agentrl.system.numbers import finite
from agentrl.system.plugin import nearest
from agentrl.system.throttle import ThrottledWarnings
from agentrl.system.user_code import await_user_code, contract_error, is_fault
from agentrl.tool import ErrorKind, ToolError, ToolResponse
from agentrl.tool.answers import ANSWERS, WrongResponse, answer_of, from_outcome, refusal, to_outcome
from agentrl.tool.shared import SharedTools, Slot, one_line
from agentrl.trajectory import ToolAnswer

warnings = ThrottledWarnings(logging.getLogger(__name__))
T = TypeVar("T")


class ToolInfrastructureError(InfrastructureError):
    """A tool failed for a reason that is not the policy's: the trajectory may be retried, and has no reward."""


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

            async def create() -> ToolAnswer:
                await _hook(slot, slot.tool.create, self.instance_id, **kwargs)
                return ToolAnswer()

            await self._via_cassette(slot, "create", kwargs, create)
            self._created[name] = slot

    async def call(self, name: str, arguments: dict[str, JSON] | None, parse_error: str | None = None) -> ToolAnswer:
        """Run one call, as the policy wrote it; return its answer as the model is shown it.

        parse_error: why the call could not be read. Raises ToolInfrastructureError when the tool is configured with
        `on_error: fail`, or its `create` failed for a fault of the infrastructure; CodeError when `create` failed for
        any other reason.
        """
        if self._closing is not None:
            raise RuntimeError(f"tool session {self.instance_id} is closed")
        slot = self._tools.slots.get(name)
        limit = None if slot is None else slot.limits.max_response_tokens
        refused = refusal(name, arguments, parse_error, self._tools.checks)
        if refused is not None:
            return await self.shown(refused, limit)
        assert slot is not None and arguments is not None
        await self._create(slot)
        # Recorded before it is cut, so that a cassette can be replayed under another tokenizer.
        execute = functools.partial(self._execute, slot, arguments)
        return await self.shown(await self._answered(slot, "execute", arguments, execute), limit)

    async def shown(self, answer: ToolAnswer, limit: int | None = None) -> ToolAnswer:
        """Cut an answer to the part that the model is shown (see `SharedTools.shown`)."""
        return await self._tools.shown(answer, limit, images=self._images)

    async def _answered(
        self, slot: Slot, hook: str, arguments: dict[str, JSON], perform: Callable[[], Awaitable[ToolAnswer]]
    ) -> ToolAnswer:
        """Run `perform` via the cassette; or give its answer again, in a run that continues after a kill."""
        ask = functools.partial(self._via_cassette, slot, hook, arguments, perform)
        return await answered(self._journal, f"tool {slot.tool.name}", hook, arguments, ask, ANSWERS)

    async def _via_cassette(
        self, slot: Slot, hook: str, arguments: dict[str, JSON], perform: Callable[[], Awaitable[ToolAnswer]]
    ) -> ToolAnswer:
        """Run `perform` and record its answer or fault, or replay the recorded one.

        Raises ToolInfrastructureError for a fault, CodeError for an error of the tool's code.
        """
        cassette, asked = self._tools.cassette, self._asked(slot, hook, arguments)
        try:
            if cassette is not None and cassette.mode == "replay":
                answer = _replayed(cassette.replay(asked))
            else:
                answer = await perform()
        except _Fault as fault:
            slot.faults += 1
            self._record(asked, ToolAnswer(str(fault)), is_fault=True)
            raise ToolInfrastructureError(f"tool {slot.tool.name}: {fault}") from fault.__cause__
        except CodeError as error:
            self._record(asked, ToolAnswer(error.summary), is_fault=True, is_code_error=True)
            raise
        self._record(asked, answer)
        return answer

    def _asked(self, slot: Slot, hook: str, arguments: dict[str, JSON]) -> MethodCall:
        """Name a call for the cassette, by the calls before it where the tool keeps state."""
        name = slot.tool.name
        asked = MethodCall(name, hook, self.instance_id, arguments, self._state_keys.get(name, ""))
        if slot.stateful and self._tools.cassette is not None:
            self._state_keys[name] = asked.key
        return asked

    def _record(
        self, asked: MethodCall, answer: ToolAnswer, *, is_fault: bool = False, is_code_error: bool = False
    ) -> None:
        if self._tools.cassette is not None and not self._tools.is_replay:
            self._tools.cassette.record(asked, to_outcome(answer, is_fault=is_fault, is_code_error=is_code_error))

    async def _execute(self, slot: Slot, arguments: dict[str, JSON]) -> ToolAnswer:
        async with slot.quota as first, self._tools.quota as second:
            slot.queued.append(first + second)
            # From here, since a call must not lose its time to those before it in the queue.
            begun = time.perf_counter()
            deadline, pieces = within(slot.limits.timeout), list[str]()
            try:
                async with deadline as timeout:
                    response = await gathered(slot.tool.execute(self.instance_id, arguments), pieces)
                answer = await answer_of(response, begun, images=self._tools.takes_images)
            except ToolError as error:
                slot.answered = True
                return _failed(str(error), ErrorKind(error.kind), begun, pieces)
            except ToolInfrastructureError as error:
                raise _Fault(str(error)) from error
            except (Exception, SystemExit) as error:
                kind, text = ErrorKind.EXECUTION, f"{type(error).__name__}: {error}"
                if isinstance(error, TimeoutError) and timeout.expired():
                    no = "no whole" if pieces else "no"
                    text = f"{slot.tool.name} gave {no} answer within {slot.limits.timeout:g} s"
                    kind = ErrorKind.TIMEOUT
                elif not is_fault(error):
                    self._tools.report(slot, error, self.instance_id)
                if slot.limits.on_error == "fail":
                    raise _Fault(one_line(text)) from error
                return _failed(text, kind, begun, pieces)
            slot.answered = True
            self._tools.on_answer(self.instance_id, slot.tool.name, arguments, None if answer.images else answer.text)
            return answer

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

    async def _reward(self, slot: Slot) -> ToolAnswer:
        reward = await _hook(slot, slot.tool.calc_reward, self.instance_id)
        if reward is not None and finite(reward) is None:
            problem = f"it must return a finite number or None, found {reward!r:.100}"
            raise contract_error(f"tool {slot.tool.name}", slot.tool.calc_reward, problem)
        return ToolAnswer(reward=None if reward is None else float(reward))


class _Fault(Exception):
    """A tool failed, and not through the policy's fault."""


def _replayed(outcome: Mapping[str, Any]) -> ToolAnswer:
    """Read the answer on a cassette. Raises the _Fault or the CodeError that was recorded in its place."""
    if outcome.get("is_code_error"):
        raise CodeError(outcome["text"])
    if outcome.get("is_fault"):
        raise _Fault(outcome["text"])
    return from_outcome(outcome)


async def gathered(answer: object, pieces: list[str]) -> object:
    """Await the result of `execute`, or join its pieces, which are put into `pieces` as they come.

    Raises WrongResponse when `execute` is neither a coroutine function nor a generator of texts.
    """
    if inspect.isawaitable(answer):
        answer = await answer
    elif not isinstance(answer, AsyncGenerator):
        raise WrongResponse("execute must be a coroutine function (`async def`)")
    if not isinstance(answer, AsyncGenerator):
        return answer
    last: ToolResponse | None = None
    async with aclosing(answer):
        async for piece in answer:
            if last is not None or not isinstance(piece, str | ToolResponse):
                what = f"found {type(piece).__name__} {piece!r:.100}"
                raise WrongResponse(f"execute must yield texts, and perhaps a ToolResponse as the last; {what}")
            if isinstance(piece, ToolResponse):
                last = piece
            else:
                pieces.append(piece)
    last = last or ToolResponse("")
    return replace(last, text="".join(pieces) + last.text) if isinstance(last.text, str) else last


def _failed(text: str, kind: ErrorKind, begun: float, pieces: Sequence[str]) -> ToolAnswer:
    return ToolAnswer(text, kind, seconds=time.perf_counter() - begun, pieces="".join(pieces))


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
        problem = f"{type(error).__name__}: {one_line(str(error))}"
        if timeout.expired():
            problem = f"not done within {slot.limits.timeout:g} s"
        raise _Fault(f"{hook.__name__}: {problem}") from error
