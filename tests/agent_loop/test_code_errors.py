"""An error of a user's code is told with its place and ends the run, or is counted; it is never tried again."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.agent_loop import AgentLoop, Episode, TaggedLoop
from agentrl.config.sections.reward import CustomRewardConfig
from agentrl.engines.contract import EngineError
from agentrl.errors import CodeError, InfrastructureError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.reward import NaiveRewardManager
from agentrl.tool import Schema, Tool, ToolResponse, ToolSchema
from agentrl.tool.shared import MIN_FAILED_CALLS
from agentrl.trajectory import Message, Status, Trajectory
from tests.agent_loop.conftest import Bench, call, sample
from tests.naming import Names, assert_names, naming

MakeBench = Callable[..., Bench]
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}
SCHEMA: ToolSchema = {"type": "function", "function": {"name": "thing", "description": "", "parameters": NO_ARGUMENTS}}


class Loop(AgentLoop):
    """Ends as it should, but for what a test changes; its second trajectory meets that."""

    def __init__(self, fault: Callable[[Episode], Any]) -> None:
        self.fault, self.tries = fault, list[str]()

    async def run(self, episode: Episode) -> None:
        self.tries.append(episode.session)
        if episode.trajectory.uid != "t/1":
            await episode.start(episode.sample.prompt)
            await episode.generate()
            return episode.finish(Status.COMPLETED)
        done = self.fault(episode)  # the call of the fault
        if inspect.isawaitable(done):
            await done
        return None


def raises(error: BaseException) -> Callable[..., Any]:
    def fault(*arguments: Any, **kwargs: Any) -> Any:
        raise error  # the fault itself

    return fault


def here(text: str) -> str:
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    return f"{__file__}:{next(number for number, line in enumerate(lines, 1) if line.endswith(text))}"


def started(change: Callable[[Episode], Any]) -> Callable[[Episode], Any]:
    async def fault(episode: Episode) -> None:
        await episode.start(episode.sample.prompt)
        episode.finish(Status.COMPLETED)
        if inspect.isawaitable(done := change(episode)):
            await done

    return fault


async def forget_to_wait(episode: Episode) -> None:
    await episode.start(episode.sample.prompt)
    await episode.generate()
    episode.observe([{"role": "user", "content": "Go on."}]).close()  # what Python does where `await` is missing
    await episode.generate()


def add_to(numbers: dict[str, Any], value: Any) -> None:
    numbers["x"] = value


def set_status(status: Any) -> Callable[[Episode], Any]:
    return started(lambda episode: setattr(episode.trajectory, "status", status))


ROW = sample("mine", row=7)
PLACE = here("# the call of the fault")
LOOPS = [
    (raises(TypeError("no add")), "TypeError", here("# the fault itself")),
    (raises(KeyError("x")), ("KeyError", "'x'"), here("# the fault itself")),
    (raises(SystemExit(3)), "SystemExit", here("# the fault itself")),
    (lambda episode: episode.nothing, "AttributeError", __file__),
    (lambda episode: episode.observe("text"), "IndexError", __file__),
    (started(lambda episode: episode.observe([None])), "AttributeError", __file__),  # type: ignore[list-item]
    (lambda episode: episode.finish(Status.COMPLETED), "without a transcript", __file__),
    (lambda episode: episode.start(episode.sample.prompt), "trajectory's status", __file__),
    (forget_to_wait, "`await episode.observe(messages)`", __file__),
    (set_status("completed"), "trajectory's status", __file__),
    (set_status(None), "trajectory's status", __file__),
    (started(lambda episode: add_to(episode.trajectory.metrics, "much")), ("'x'", "'much'"), __file__),
    (started(lambda episode: add_to(episode.trajectory.score_extra, [1])), ("'x'", "[1]"), __file__),
]


def loops_of(b: Bench, loop: AgentLoop) -> None:
    b.scheduler.loops = {"mine": loop}


@pytest.mark.parametrize(("fault", "says", "place"), LOOPS)
async def test_a_loops_error_ends_the_run_at_once(
    bench: MakeBench, fault: Callable[..., Any], says: Names, place: str
) -> None:
    b, loop = bench(["#### 5"]), Loop(fault)
    loops_of(b, loop)
    with pytest.raises(CodeError) as told:
        await b.run(ROW, n=3)
    text = str(told.value)
    assert_names(text, "(tests.agent_loop.test_code_errors.Loop.run)")
    assert_names(text, says)
    assert place in text
    assert_names(text, "test.parquet", "row 7", "t/1")
    assert "on_code_error=count" in text
    assert loop.tries.count("t/1.0") == 1 and "t/1.1" not in loop.tries
    assert sorted(b.engine.released) == sorted(loop.tries), "all others were ended in order"
    assert not b.scheduler.running


@pytest.mark.parametrize(("fault", "says", "place"), LOOPS)
async def test_counted_it_is_a_failure_without_another_try_and_told_once_a_place(
    bench: MakeBench, fault: Callable[..., Any], says: Names, place: str
) -> None:
    b, loop, told = bench(["#### 5"] * 2), Loop(fault), list[str]()
    loops_of(b, loop)
    b.scheduler.on_code_error, b.scheduler.warn = "count", told.append
    for _ in range(2):
        first, failed, third = await b.run(ROW, n=3)
        assert (first.score, third.score) == (1.0, 1.0)
        assert (failed.status, failed.score, failed.metrics["retries"]) == (Status.FAILED, None, 0)
        assert failed.failure is not None and failed.failure.startswith("CodeError: agent loop mine (tests.")
        assert_names(failed.failure, says)
        assert "\n" not in failed.failure
    assert len(told) == 1 and place in told[0] and "row 7" in told[0]


class Gone(Exception):
    """What a client of somebody's own raises."""


PASSING = [
    EngineError("lost"),
    ConnectionResetError("reset"),
    TimeoutError("late"),
    httpx.ReadTimeout("late"),
    InfrastructureError("my simulator is restarted"),
]


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
async def test_a_fault_inside_a_users_code_is_tried_again(bench: MakeBench, error: Exception) -> None:
    def fault(episode: Episode) -> Any:
        if episode.session == "t/1.0":
            raise error
        if episode.session == "t/1.1":
            raise Gone from error
        return started(lambda _: None)(episode)

    b, loop = bench(["#### 5"]), Loop(fault)
    loops_of(b, loop)
    trajectories = await b.run(ROW, n=3)
    assert [t.metrics["retries"] for t in trajectories] == [0, 2, 0]
    assert {t.status for t in trajectories} == {Status.COMPLETED}


async def test_what_an_engine_raises_is_the_engines_fault_also_under_a_users_loop(bench: MakeBench) -> None:
    b = bench(lambda session, turn: ZeroDivisionError("in the engine") if session.endswith(".0") else "#### 5")
    loops_of(b, Loop(raises(TypeError())))
    (t,) = await b.run(ROW)
    assert (t.score, t.metrics["retries"]) == (1.0, 1)


async def test_a_loop_that_is_not_async_and_one_that_raises_in_a_method_of_its_own(bench: MakeBench) -> None:
    class Sync(AgentLoop):
        def run(self, episode: Episode) -> None:  # type: ignore[override]
            return None

    b = bench(["<answer>5</answer>"])
    loops_of(b, Sync())
    with naming(CodeError, "Sync.run"):
        await b.run(ROW)

    class Broken(TaggedLoop):
        tags, instructions = (), "Say it."

        def action(self, episode: Episode, reply: Any) -> None:
            return reply.nothing  # in action

    loops_of(b, Broken())
    with pytest.raises(CodeError, match=r"AttributeError: .*nothing") as told:
        await b.run(ROW)
    assert here("# in action") in str(told.value), "our `run` called the user's method"


class Partner(Interaction):
    """Answers once, as it should but for what a test changes."""

    def __init__(self, **methods: Any) -> None:
        super().__init__({}, "partner")
        self.methods, self.ended = methods, list[str]()

    def _do(self, method: str, usual: Any) -> Any:
        return self.methods[method]() if method in self.methods else usual

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        return self._do("start", None)

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str | None:
        return self._do("open", None)

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        return self._do("respond", InteractionResponse(True, "", 0.25))

    async def calculate_score(self, instance_id: str) -> float | None:
        return self._do("score", None)

    async def finalize_interaction(self, instance_id: str) -> None:
        self.ended.append(instance_id)
        self._do("end", None)


def gives(value: Any) -> Callable[[], Any]:
    return lambda: value


def response(**changes: Any) -> Callable[[], Any]:
    return gives(replace(InteractionResponse(False, "more", 0.0), **changes))


PARTNERS = [
    *(({method: raises(AttributeError("gone"))}, "AttributeError: gone") for method in ("start", "open", "respond")),
    *(({method: raises(IndexError("gone"))}, "IndexError: gone") for method in ("score", "end")),
    ({"open": gives(7)}, "open_dialogue): it must return a text or None, found 7"),
    ({"respond": gives(None)}, "must return an InteractionResponse, found NoneType None"),
    ({"respond": gives((True, "x", 0.0, {}))}, "must return an InteractionResponse, found tuple"),
    ({"respond": response(text=None)}, "the text of its InteractionResponse must be a text, found None"),
    ({"respond": response(score="abc")}, "the score of its InteractionResponse must be a finite number, found 'abc'"),
    ({"respond": response(score=float("nan"))}, "must be a finite number, found nan"),
    ({"respond": response(should_end="no")}, "the should_end of its InteractionResponse must be true or false"),
    ({"respond": response(extra=[1])}, "the extra of its InteractionResponse must be a mapping"),
    ({"respond": response(history="x")}, "the history of its InteractionResponse must be a list of messages"),
    ({"respond": response(history=[{"content": "x"}])}, "the history of its InteractionResponse must be a list of"),
    ({"respond": response(text="", history=[])}, "a rewritten history must end with a message that the policy answers"),
    ({"score": gives("abc")}, "calculate_score): it must return a finite number or None, found 'abc'"),
    ({"score": gives(float("inf"))}, "it must return a finite number or None, found inf"),
]
TALK = sample(interaction_kwargs={"name": "partner"}, row=9)


@pytest.mark.parametrize(("methods", "says"), PARTNERS)
async def test_an_interactions_error_is_told_and_counted(bench: MakeBench, methods: dict[str, Any], says: str) -> None:
    partner, told = Partner(**methods), list[str]()
    b = bench(lambda session, turn: "#### 5", interactions={"partner": partner})
    with pytest.raises(CodeError) as found:
        await b.run(TALK, n=2)
    assert str(found.value).startswith("interaction partner (tests.agent_loop.test_code_errors.Partner.")
    assert says in str(found.value) and f"{__file__}:" in str(found.value) and "row 9" in str(found.value)
    b.scheduler.on_code_error, b.scheduler.warn = "count", told.append
    partner.ended.clear()
    failed = await b.run(TALK, n=2)
    assert [(t.status, t.metrics["retries"]) for t in failed] == [(Status.FAILED, 0)] * 2
    assert len(told) == 1
    assert sorted(partner.ended) == ([] if "start" in methods else ["t/0.0", "t/1.0"]), "each is finalized once"


async def test_a_missing_server_of_an_interaction_is_tried_again(bench: MakeBench) -> None:
    b = bench(["#### 5"], interactions={"partner": Partner(respond=raises(httpx.ConnectError("refused")))})
    (t,) = await b.run(TALK)
    assert (t.failure, t.metrics["retries"]) == ("ConnectError: refused", 2)


class Thing(Tool):
    """Answers, but for what a test changes."""

    def __init__(self, config: dict[str, Any] | None = None, **methods: Any) -> None:
        super().__init__(config, SCHEMA)
        self.methods, self.calls, self.released = methods, 0, list[str]()

    def _do(self, method: str, usual: Any) -> Any:
        return self.methods[method]() if method in self.methods else usual

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        self._do("create", None)

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        self.calls += 1
        return self._do("execute", ToolResponse("done"))

    async def calc_reward(self, instance_id: str) -> float | None:
        return self._do("reward", None)

    async def release(self, instance_id: str) -> None:
        self.released.append(instance_id)
        self._do("release", None)


def told_by(b: Bench) -> list[str]:
    told = list[str]()
    b.scheduler.context.tools.warn = b.scheduler.warn = told.append
    return told


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        ({"create": raises(TypeError("no such seed"))}, ("Thing.create", "TypeError")),
        ({"reward": raises(KeyError("x"))}, ("Thing.calc_reward", "KeyError", "'x'")),
        ({"reward": gives("abc")}, ("None", "found 'abc'")),
        ({"reward": gives(float("nan"))}, "None"),
    ],
)
async def test_what_the_policy_has_no_part_in_is_the_tools_error(
    bench: MakeBench, methods: dict[str, Any], says: Names
) -> None:
    script = lambda session, turn: [call("thing"), "#### 5"][turn]  # noqa: E731
    with pytest.raises(CodeError) as found:
        await bench(script, [Thing(**methods)]).run(sample(row=9), n=2)
    assert str(found.value).startswith("tool thing (tests.agent_loop.test_code_errors.Thing.")
    assert_names(found.value, says, "row 9")
    assert __file__ in str(found.value)
    thing = Thing(**methods)
    b = bench(script, [thing])
    b.scheduler.on_code_error = "count"
    (failed,) = await b.run(sample())
    assert (failed.status, failed.metrics["retries"]) == (Status.FAILED, 0)
    assert failed.failure is not None
    assert_names(failed.failure, says)
    assert thing.released == ([] if "create" in methods else ["t/0.0"])


async def test_a_release_that_fails_takes_nothing_back(bench: MakeBench) -> None:
    b = bench([call("thing"), "#### 5"], [Thing(release=raises(TypeError("late")))])
    (t,) = await b.run(sample())
    assert (t.status, t.score) == (Status.COMPLETED, 1.0)


BROKEN = [
    (raises(TypeError("no add")), "TypeError"),
    (raises(AttributeError("x")), "AttributeError"),
    (raises(NameError("x")), "NameError"),
    (raises(ModuleNotFoundError("x")), "ModuleNotFoundError"),
    (gives(None), ("ToolResponse", "found NoneType", "None")),
    (gives("text"), ("ToolResponse", "'text'")),
    (gives(ToolResponse(7)), ("ToolResponse", "found 7")),  # type: ignore[arg-type]
    (gives(ToolResponse("x", reward=float("nan"))), "ToolResponse"),
    (gives(ToolResponse("x", metrics={"a": "b"})), "ToolResponse"),  # type: ignore[dict-item]
    (gives(ToolResponse("x", files=[])), "ToolResponse"),  # type: ignore[arg-type]
    (gives(ToolResponse("x", images="y")), "ToolResponse"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("execute", "says"), BROKEN)
async def test_a_tool_that_answers_no_call_is_broken_and_told_at_once(
    bench: MakeBench, execute: Callable[..., Any], says: Names
) -> None:
    b = bench(lambda session, turn: [call("thing"), "#### 5"][turn], [Thing(execute=execute)])
    told = told_by(b)
    trajectories = await b.run(sample(), n=MIN_FAILED_CALLS)
    assert {t.score for t in trajectories} == {1.0}, "the model is told, and may go on"
    assert "Error (execution)" in trajectories[0].tool_calls[0].response
    assert len(told) == 1 and f"{__file__}:" in told[0]
    assert_names(told[0], says)
    with naming(CodeError, "no call") as found:
        b.scheduler.context.tools.check()
    assert_names(found.value, says, __file__)


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), ZeroDivisionError(), RuntimeError(), IndexError()])
async def test_an_error_that_arguments_may_provoke_breaks_no_tool_and_is_told_once(
    bench: MakeBench, error: Exception
) -> None:
    b = bench(lambda session, turn: [call("thing"), "#### 5"][turn], [Thing(execute=raises(error))])
    told = told_by(b)
    trajectories = await b.run(sample(), n=3)
    assert [t.score for t in trajectories] == [1.0] * 3
    assert len(told) == 1 and here("# the fault itself") in told[0] and type(error).__name__ in told[0]
    b.scheduler.context.tools.check()


@pytest.mark.parametrize("batches", [[(4, 2)], [(4, 1), (4, 1)], [(1, 1)] * 8, [(8, 1)], [(1, 4), (4, 1)]])
async def test_a_tool_is_broken_after_enough_failed_calls_of_enough_trajectories(
    bench: MakeBench, batches: list[tuple[int, int]]
) -> None:
    """Batches of so many trajectories with so many calls each; over several, while no call is answered."""
    calls = {"each": 1}
    b = bench(
        lambda session, turn: call("thing") * calls["each"] if turn == 0 else "#### 5",
        [Thing(execute=raises(TypeError("no add")))],
    )
    for number, (trajectories, calls["each"]) in enumerate(batches):
        requests = [replace(one, uid=f"{number}/{k}") for k, one in enumerate(b.requests(sample(), n=trajectories))]
        await b.scheduler.run(requests)
        if number < len(batches) - 1:
            b.scheduler.context.tools.check()
    with naming(CodeError, "8 failed"):
        b.scheduler.context.tools.check()


@pytest.mark.parametrize(("trajectories", "each"), [(1, 1), (1, 4), (2, 4), (3, 4), (4, 1), (7, 1)])
async def test_odd_calls_of_few_trajectories_end_no_run(bench: MakeBench, trajectories: int, each: int) -> None:
    thing = Thing(execute=raises(TypeError("no add")))
    b = bench(lambda session, turn: call("thing") * each if turn == 0 else "#### 5", [thing])
    await b.run(sample(), n=trajectories)
    assert thing.calls == trajectories * each
    b.scheduler.context.tools.check()


async def test_an_answer_takes_earlier_failures_back_and_counts_for_its_batch_alone(bench: MakeBench) -> None:
    thing = Thing()
    b = bench(lambda session, turn: [call("thing"), "#### 5"][turn % 2], [thing])
    for breaks in (True, False, True):
        thing.methods = {"execute": raises(TypeError("no add"))} if breaks else {}
        await b.run(sample(), n=MIN_FAILED_CALLS - 1 if breaks else 1)
        b.scheduler.context.tools.check()
    await b.run(sample(), n=1)
    with naming(CodeError, "no call"):
        b.scheduler.context.tools.check()


async def test_a_policy_cannot_end_a_run_by_arguments_once_the_tool_has_answered(bench: MakeBench) -> None:
    def add(values: dict[str, Any]) -> str:
        """Add."""
        return str(values["a"] + values["b"])

    says = {"t/0.0": {"a": 1, "b": 2}, "t/1.0": {"a": 1, "b": None}, "t/2.0": {"a": []}}
    script = lambda session, turn: [call("add", values=says[session]), "#### 5"][turn]  # noqa: E731
    b = bench(script, [add])
    told = told_by(b)
    trajectories = await b.run(sample(), n=3)
    assert [t.tool_calls[0].error for t in trajectories] == [None, "execution", "execution"]
    assert len(told) == 1, "both errors are of one line"
    b.scheduler.context.tools.check()


async def test_what_a_tool_tells_the_model_on_purpose_and_its_servers_faults_are_not_told_the_user(
    bench: MakeBench,
) -> None:
    from agentrl.tool import ToolError

    for error in (ToolError("must be above 0"), ConnectionError("refused"), httpx.ConnectError("refused")):
        b = bench([call("thing"), "#### 5"], [Thing(execute=raises(error))])
        told = told_by(b)
        (t,) = await b.run(sample())
        assert (t.score, told) == (1.0, [])
        b.scheduler.context.tools.check()


async def test_a_broken_tool_with_on_error_fail_is_tried_again_and_told(bench: MakeBench) -> None:
    b = bench(lambda session, turn: call("thing"), [Thing({"on_error": "fail"}, execute=raises(TypeError("x")))])
    told = told_by(b)
    (t,) = await b.run(sample())
    assert (t.status, t.metrics["retries"], len(told)) == (Status.FAILED, 2, 1)


def scorer(path: Path, body: str) -> NaiveRewardManager:
    (path / "mine.py").write_text(f"def compute_score(solution_str):\n    {body}\n")
    return NaiveRewardManager(custom=CustomRewardConfig(path=str(path / "mine.py")))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return solution_str.nothing", "AttributeError"),
        ("return {}['x']", ("KeyError", "'x'")),
        ("return None", ("float32", "found None")),
        ("return 'abc'", ("float32", "found 'abc'")),
        ("return float('nan')", "float32"),
        ("return {'reward': 1}", "key 'score'"),
        ("return 10 ** 400", "finite number"),
    ],
)
async def test_a_scorers_error_ends_the_run_or_is_counted(
    bench: MakeBench, tmp_path: Path, body: str, says: Names
) -> None:
    b = bench(lambda session, turn: "#### 5")
    b.scheduler.reward = scorer(tmp_path, body)
    with pytest.raises(CodeError) as found:
        await b.run(sample(row=9), n=3)
    text = str(found.value)
    assert text.startswith(f"custom_reward_function: {tmp_path}/mine.py: compute_score (mine.")
    assert_names(text, says, f"{tmp_path}/mine.py", "row 9")
    told = told_by(b)
    b.scheduler.on_code_error = "count"
    failed = await b.run(sample(), n=3)
    assert [(t.status, t.score, t.metrics["retries"]) for t in failed] == [(Status.FAILED, None, 0)] * 3
    assert len(told) == 1
    assert failed[0].failure is not None and failed[0].failure.startswith("scorer: CodeError: ")


async def test_a_scorers_fault_fails_its_trajectory_only(bench: MakeBench, tmp_path: Path) -> None:
    b = bench(["#### 5"])
    b.scheduler.reward = scorer(tmp_path, "raise ConnectionError('gone')")
    (t,) = await b.run(sample())
    assert (t.status, t.failure) == (Status.FAILED, "scorer: ConnectionError: gone")


async def test_siblings_are_ended_in_order_and_nothing_is_lost(bench: MakeBench) -> None:
    """Tools are released and interactions finalized of those that wait while another one meets an error."""
    thing = Thing()
    b = bench(lambda session, turn: [call("thing"), "#### 5"][turn], [thing])
    b.engine.delay = 0.2

    class Late(AgentLoop):
        async def run(self, episode: Episode) -> None:
            while thing.calls < 5:  # the others' second turns are far from their ends then
                await asyncio.sleep(0.001)
            raise TypeError("late")

    ended: list[Trajectory] = []
    b.scheduler.loops = {**b.scheduler.loops, "late": Late()}
    requests = [
        replace(request, sample=sample("late") if number == 3 else sample())
        for number, request in enumerate(b.requests(sample(), n=6))
    ]
    with pytest.raises(CodeError, match="TypeError: late"):
        await b.scheduler.run(requests, ended.append)
    assert len(thing.released) == 5 and len(b.engine.released) == 6
    assert ended == []
