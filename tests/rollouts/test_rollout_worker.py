"""A rollout worker of Ray's, without Ray around it."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

from agentrl.agent_loop import Scheduler
from agentrl.config import Config
from agentrl.engines.contract import RolloutEngine
from agentrl.errors import CodeError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.rollouts.contract import EndedGroup, PromptTask, training, validation
from agentrl.rollouts.journal import trajectories_in
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.rounds import run_round
from agentrl.rollouts.staleness_scheduler import GroupStatus
from agentrl.system.loop_thread import LoopThread
from agentrl.system.reporter import Reporter
from agentrl.tool import Schema, Tool, ToolResponse
from agentrl.tool.shared import MIN_FAILED_CALLS
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Message
from agentrl.trajectory.parquet import write_trajectories
from agentrl.trajectory.sample import Sample
from tests.trajectory.written import Writer

pytest.importorskip("ray")
from agentrl.rollouts.ray_worker import StatusBuffer
from agentrl.rollouts.worker_groups import GroupBegin, GroupEvent, TrajectoryEnded, WorkerGroups
from agentrl.runtime.ray.pool import raised
from agentrl.runtime.ray.rank import Failure


class EndlessScheduler:
    """A fault: no trajectory ever ends."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cancelled = False

    async def run(self, requests: Any, on_end: Any) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


class EmptyScheduler:
    """Stands for one whose trajectories do not matter."""

    context = SimpleNamespace(tools=ToolSet.from_tools([]))

    async def run(self, requests: Any, on_end: Any) -> list[Any]:
        return []


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread("rollouts") as loop:
        yield loop


SAMPLE = Sample([], "test", "single_turn")


def without_log(ordinal: int = 0) -> GroupBegin:
    return GroupBegin(ordinal, PromptTask(ordinal, SAMPLE, training(Config(), 1), ordinal), None)


@pytest.mark.timeout(60)
def test_rollouts_that_nobody_wants_any_more_are_ended(loop: LoopThread, tmp_path: Path) -> None:
    scheduler = EndlessScheduler()
    rollouts = LocalRollouts(
        Config(), cast(Scheduler, scheduler), cast(RolloutEngine, None), loop, StatusBuffer(), tmp_path
    )
    groups = WorkerGroups(rollouts)
    groups.stop()  # nothing is going on
    groups.begin([without_log()])
    scheduler.begun.wait()
    groups.stop()
    assert scheduler.cancelled and groups.events(0.01)[0] == []


class OneTrajectory(EmptyScheduler):
    """Stands for one that runs trajectories: each ends at once, the prompt of ordinal 9 never.

    The prompt of ordinal 7 meets a cancellation that nobody asked for.
    """

    loops = MappingProxyType({"single_turn": SimpleNamespace(on_resume="none")})

    async def run(self, requests: Any, on_end: Any) -> list[Any]:
        for request in requests:
            request.on_begin()
            if request.group == 9:
                await asyncio.Event().wait()
            if request.group == 7:
                inner = asyncio.ensure_future(asyncio.Event().wait())
                inner.cancel()
                await inner
            if request.group == 8:
                raise CodeError("agent loop mine: TypeError: x", "/home/me/mine.py:7")
            on_end(None)
        return [Writer("p").says("a").ends(1.0) for _ in requests]


def test_a_worker_tells_what_becomes_of_its_groups(loop: LoopThread, tmp_path: Path) -> None:
    scheduler = cast(Scheduler, OneTrajectory())
    rollouts = LocalRollouts(Config(), scheduler, cast(RolloutEngine, None), loop, StatusBuffer(), tmp_path)
    rollouts.version = 4
    groups, task = WorkerGroups(rollouts), training(Config(), 1)
    n = task.each
    told: list[GroupEvent] = []

    def begun(key: int, ordinal: int) -> GroupBegin:
        return GroupBegin(key, PromptTask(ordinal, Sample([], "test", "single_turn"), task, ordinal), ())

    groups.begin([begun(1, 3), begun(2, 8), begun(3, 9), begun(5, 7)])
    while sum(isinstance(event.what, EndedGroup | Failure) for event in told) < 3:
        told += groups.events(10)[0]
    of_the_first = [event for event in told if event.key == 1]
    assert of_the_first[: n + 1] == [GroupEvent(1, 4), *[GroupEvent(1, TrajectoryEnded())] * n]
    (ended,) = of_the_first[n + 1 :]
    group = ended.what
    assert isinstance(group, EndedGroup) and ended.trajectories is None and group.outcome is GroupStatus.SCORED
    assert group.record is not None and len(trajectories_in(group.record)) == n
    failed = {event.key: event.what for event in told if isinstance(event.what, Failure)}
    assert sorted(failed) == [2, 5] and isinstance(raised(failed[2], "worker 1"), CodeError)
    assert "prompt 7: something that it waited for was cancelled" in failed[5].message
    assert [event for event in told if event.key == 3] in ([], [GroupEvent(3, 4)])
    groups.stop()
    assert groups.events(0.01)[0] == []
    groups.begin([begun(4, 3)])
    while not isinstance(told[-1].what, EndedGroup) or told[-1].key != 4:
        told += groups.events(10)[0]
    assert rollouts.pop_group(3) is None, "the driver has it"
    groups.begin([replace(begun(6, 4), entries=None)])
    while not isinstance(told[-1].what, EndedGroup) or told[-1].key != 6:
        told += groups.events(10)[0]
    assert told[-1].what.record is None and told[-1].trajectories is None
    assert len(rollouts.pop_group(4) or []) == n, "it stays in the worker, which packs it"


class CarelessScheduler(EmptyScheduler):
    """Meets an error of a user's code."""

    async def run(self, requests: Any, on_end: Any) -> list[Any]:
        raise CodeError("agent loop mine: TypeError: x\n  /home/me/mine.py:7 in run: 1 + None", "/home/me/mine.py:7")


def test_a_workers_error_of_a_users_code_reaches_the_driver_with_its_place(loop: LoopThread, tmp_path: Path) -> None:
    scheduler = cast(Scheduler, CarelessScheduler())
    groups = WorkerGroups(LocalRollouts(Config(), scheduler, cast(RolloutEngine, None), loop, StatusBuffer(), tmp_path))
    groups.begin([without_log()])
    ((event,), _) = groups.events(10)
    assert isinstance(event.what, Failure)
    error = raised(pickle.loads(pickle.dumps(event.what)), "rollout worker 1 of 2")
    assert isinstance(error, CodeError) and "/home/me/mine.py:7 in run" in str(error) and "Traceback" not in str(error)


@pytest.mark.parametrize("on_code_error", ["error", "count"])
def test_a_tool_that_answers_no_call_ends_the_run_with_the_batch(
    loop: LoopThread, tmp_path: Path, on_code_error: str
) -> None:
    def broken(x: int) -> str:
        """Never answers."""
        return str(x + None)  # type: ignore[operator]

    tools = ToolSet.from_tools([broken])
    tools.bind(lambda text: list(text.encode()), lambda ids: bytes(ids).decode())

    class Calling(EmptyScheduler):
        context = SimpleNamespace(tools=tools)

        async def run(self, requests: Any, on_end: Any) -> list[Any]:
            for number in range(MIN_FAILED_CALLS):
                await (await tools.open(f"t/{number}", {})).call("broken", {"x": 1})
            return []

    config = Config.model_validate({"actor_rollout_ref": {"rollout": {"agent": {"on_code_error": on_code_error}}}})
    scheduler, engine = cast(Scheduler, Calling()), cast(RolloutEngine, None)
    rollouts = LocalRollouts(config, scheduler, engine, loop, StatusBuffer(), tmp_path)
    ends = (
        pytest.raises(CodeError, match=rf"{__file__}:\d+ in broken: return str") if on_code_error == "error" else None
    )
    with ends or nullcontext():
        run_round(rollouts, validation(config, 3, greedy=True), [SAMPLE])


class Counting(Tool):
    """Whose own numbers cannot be taken."""

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        return ToolResponse("done")

    def take_metrics(self) -> dict[str, float]:
        return {"x": float("much")}


class Partner(Interaction):
    """Of which the same is true."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None: ...

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        return InteractionResponse(True, "")

    def take_metrics(self) -> dict[str, float]:
        return {"x": 1 / 0}


def test_numbers_that_cannot_be_taken_end_the_run_or_are_left_out_and_told_once(
    loop: LoopThread, tmp_path: Path
) -> None:
    class Healthy:
        async def health(self) -> Any:
            return SimpleNamespace(metrics={"requests": 1.0})

    parameters: Schema = {"type": "object", "properties": {}}
    tool = Counting({}, {"type": "function", "function": {"name": "t", "description": "", "parameters": parameters}})
    context = SimpleNamespace(tools=ToolSet.from_tools([tool]), interactions={"p": Partner({}, "p")})
    scheduler = cast(Scheduler, SimpleNamespace(context=context, reward=None))
    for on_code_error in ("error", "count"):
        config = Config.model_validate({"actor_rollout_ref": {"rollout": {"agent": {"on_code_error": on_code_error}}}})
        status = StatusBuffer()
        rollouts = LocalRollouts(config, scheduler, cast(RolloutEngine, Healthy()), loop, status, tmp_path)
        if on_code_error == "error":
            with pytest.raises(CodeError, match=r"tool t .*ValueError"):
                rollouts.metrics()
            continue
        taken = [dict(rollouts.metrics()) for _ in range(2)]
        assert all(one.pop("rollout/loop_delay_seconds") >= 0 for one in taken)
        assert taken == [{"engine/requests": 1.0}] * 2
        first, second = status.take().warnings
        assert first.startswith("tool t (") and second.startswith("interaction p (")


def test_a_file_on_another_machine_has_no_rewards_filled_in_and_that_is_told(loop: LoopThread, tmp_path: Path) -> None:
    status, missing = StatusBuffer(), tmp_path / "train_000001.1of2.parquet"
    rollouts = LocalRollouts(
        Config(), cast(Scheduler, EmptyScheduler()), cast(RolloutEngine, None), loop, status, tmp_path
    )
    made = [Writer("p", uid=uid).says("a").ends(1.0) for uid in "ab"]
    path = write_trajectories(tmp_path, made[1:], step=1, split="train", turn_reward_coef=None)
    outlines = [replace(one.outline(), model_reward=2.0) for one in made]
    rollouts.fill_rewards([(missing, 1), (path, 1)], outlines)
    assert [warning.split(" is not")[0] for warning in status.take().warnings] == [str(missing)]
    assert pq.read_table(path)["reward"].to_pylist() == [3.0], "the others are, each with its own"


def test_all_workers_parts_of_a_validation_have_one_name(loop: LoopThread, tmp_path: Path) -> None:
    """Of one that is done again by another number of workers, too."""

    def validate(number: int, count: int, first: int, file: int) -> None:
        scheduler, engine = cast(Scheduler, EmptyScheduler()), cast(RolloutEngine, None)
        reporter = cast(Reporter, StatusBuffer())
        rollouts = LocalRollouts(Config(), scheduler, engine, loop, reporter, tmp_path)
        task = replace(validation(Config(), 3, greedy=True, first=file), share=(number, count))
        rollouts.pack(task, [], None, first)

    for number in (1, 2):
        validate(number, 2, 48 * (number - 1), 0)
        validate(number, 2, 96 + 48 * (number - 1), 96)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"val_000003_greedy{part}.{k}of2.parquet" for part in ("", "_000096") for k in (1, 2)}
    validate(1, 1, 0, 0)
    validate(1, 1, 96, 96)
    assert {path.name for path in tmp_path.iterdir()} == {
        "val_000003_greedy.parquet",
        "val_000003_greedy_000096.parquet",
    }
