"""Trajectories that run again are answered as before, wherever they were when the process was killed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.compaction import Compaction
from agentrl.agent_loop.registry import FunctionLoop
from agentrl.config.load import load_config
from agentrl.errors import ConfigError
from agentrl.interaction import Interaction, load_interactions
from agentrl.rollouts.context import load_context
from agentrl.rollouts.local import on_resume_of
from agentrl.rollouts.objects import UserObjects
from agentrl.system.call_journal import CallJournal, Entry, Kind, OnResume
from agentrl.system.json_value import JSON
from agentrl.tool import FunctionTool, Tool, ToolResponse
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status, Trajectory
from agentrl.trajectory.sample import Sample
from agentrl.verl.tools import BaseTool
from agentrl.verl.tools import ToolResponse as VerlResponse
from interactions.gsm8k import Gsm8kInteraction
from tests.agent_loop.conftest import Bench, call, sample
from tests.naming import naming
from tests.sandbox.servers import Server
from tests.system.test_call_journal import live
from tests.tools.test_code_interpreter import configured
from tests.tools.test_code_interpreter import server as sandbox  # noqa: F401 - a fixture
from tests.tools.test_http_tool import EchoServer, running, server  # noqa: F401 - fixtures
from tools.check_answer import CheckAnswerTool

MakeBench = Callable[..., Bench]
SCRIPT = [call("add", a=2, b=2), "It is 4. #### 4", call("add", a=2, b=3), "#### 5"]
ROW = sample(interaction_kwargs={"name": "gsm8k", "ground_truth": "5"})


class Count(Tool):
    """Keeps a state for a trajectory, and comes back only where a class says so."""

    def __init__(self) -> None:
        super().__init__({}, plain_adding().schema)
        self.counts: dict[str, int] = {}
        self.executed = 0

    async def create(self, instance_id: str, **create_kwargs: Any) -> None:
        self.counts[instance_id] = 0

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        self.executed += 1
        self.counts[instance_id] += arguments["a"] + arguments["b"]
        return ToolResponse(str(self.counts[instance_id]))

    async def calc_reward(self, instance_id: str) -> float:
        return self.counts[instance_id] / 10

    async def release(self, instance_id: str) -> None:
        del self.counts[instance_id]


class Repeating(Count):
    on_resume: OnResume = "calls"


def plain_adding() -> Tool:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return FunctionTool(add)


async def life(
    make: MakeBench,
    tools: ToolSet | list[Tool],
    recorded: list[Entry],
    interactions: Mapping[str, Interaction] | None = None,
    row: Sample = ROW,
    script: Sequence[str] = SCRIPT,
    compaction: Compaction | None = None,
    **limits: int,
) -> tuple[Trajectory, int, list[Entry], list[str]]:
    """The trajectory of a process that finds the entries: itself, its turns that were sampled, all entries, notes."""
    entries, notes = list(recorded), list[str]()
    bench = make(script, tools, interactions=interactions or {"gsm8k": Gsm8kInteraction({}, "gsm8k")}, **limits)
    bench.scheduler.context = context = replace(bench.scheduler.context, compaction=compaction)
    on_resume = on_resume_of(context.tools, context.interactions)
    journal = CallJournal("t/0", entries.append, live(recorded), on_resume, notes.append)
    done = 0 if notes else sum(one.who.startswith("engine") for one in live(recorded))
    bench.engine.said["t/0.0"] = [[]] * done  # the script goes on where it stood
    (request,) = bench.requests(row)
    (trajectory,) = await bench.scheduler.run([replace(request, journal=journal)])
    await context.tools.close()
    return trajectory, len(bench.engine.said["t/0.0"]) - done, entries, notes


def told(one: Trajectory) -> tuple[object, ...]:
    turns = [(turn.role, turn.text, turn.reward, turn.seed, len(turn.calls)) for turn in one.turns]
    return one.transcripts, turns, one.score, one.score_extra, one.status, one.failure, one.messages


@pytest.mark.parametrize(("tool", "kind"), [(plain_adding, "answers"), (Repeating, "calls"), (Count, "none")])
async def test_from_every_moment_it_goes_on_as_if_nothing_had_happened(
    bench: MakeBench, tool: Callable[[], Tool], kind: OnResume
) -> None:
    assert tool().on_resume == kind
    whole, sampled, entries, _ = await life(bench, [tool()], [])
    assert whole.status is Status.COMPLETED and sampled == len(SCRIPT)
    for killed in range(len(entries) + 1):
        before = entries[:killed]
        found, sampled, after, notes = await life(bench, [tool()], before)
        assert told(found) == told(whole)
        turns = sum(one.who.startswith("engine") for one in before)
        if notes:
            (why,) = notes
            assert kind != "answers" or "interaction gsm8k" in why
            assert sampled == len(SCRIPT) and any(one.kind is Kind.ANEW for one in after)
        else:
            assert sampled == len(SCRIPT) - turns, "no finished turn is sampled twice"
            assert kind != "none" or not any(one.who == "tool add" for one in before)


async def test_react_goes_on_behind_all_its_finished_turns(bench: MakeBench) -> None:
    script = [f'Thought: add.\nAction: add\nAction Input: {{"a": {n}, "b": 2}}\nObservation: ?' for n in range(3)]
    script.append("Thought: done.\nFinal Answer: #### 4")
    row = sample("react")
    whole, sampled, entries, _ = await life(bench, [plain_adding()], [], row=row, script=script)
    assert (whole.status, sampled, len(whole.tool_calls)) == (Status.COMPLETED, 4, 3), whole.failure
    for killed in range(len(entries) + 1):
        before = entries[:killed]
        found, sampled, _, notes = await life(bench, [plain_adding()], before, row=row, script=script)
        assert told(found) == told(whole) and not notes
        assert sampled == len(script) - sum(one.who.startswith("engine") for one in before)


class VerlAdd(BaseTool):
    """A tool of verl's users."""

    asked = 0

    async def execute(
        self, instance_id: str, parameters: dict[str, JSON], **kwargs: Any
    ) -> tuple[VerlResponse, float, dict[str, object]]:
        VerlAdd.asked += 1
        data = kwargs["agent_data"]
        data.extra_fields["calls"] = data.extra_fields.get("calls", 0) + 1
        return VerlResponse(text=f"call {data.extra_fields['calls']}: {parameters}"), 0.5, {}


def entry_of(kind: str, url: str) -> dict[str, Any]:
    numbers = {name: {"type": "integer"} for name in ("a", "b")}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    schema = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": parameters}}
    if kind == "verl":
        return {"class_name": f"{__name__}.VerlAdd", "config": {}, "tool_schema": schema}
    query = {name: f"{{{{ {name} }}}}" for name in ("a", "b", "of")}
    config = {"url": f"{url}/add", "query": query, "variables": {"of": "nobody"}, "response_path": "query.*.1"}
    return {"class_name": "tools.http_endpoint.HttpTool", "config": config, "tool_schema": schema}


@pytest.mark.parametrize(
    ("kind", "on_resume"),
    [("http", None), ("http", "calls"), ("http", "answers"), ("verl", None), ("verl", "calls")],
)
async def test_the_yaml_says_how_a_tool_comes_back(
    bench: MakeBench,
    server: EchoServer,  # noqa: F811
    tmp_path: Path,
    kind: str,
    on_resume: str | None,
) -> None:
    """By itself a tool of verl's contract does not, and an HTTP tool does by its answers."""
    entry = entry_of(kind, server.url)
    entry["config"] |= {} if on_resume is None else {"on_resume": on_resume}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    row = replace(ROW, tools_kwargs={"add": {"create_kwargs": {"of": "us"}}})

    async def process(recorded: list[Entry]) -> tuple[Trajectory, int, list[Entry], list[str]]:
        VerlAdd.asked, server.asked = 0, []
        return await life(bench, ToolSet.from_yaml(tmp_path / "tools.yaml"), recorded, row=row)

    whole, sampled, entries, _ = await process([])
    assert (whole.status, sampled) == (Status.COMPLETED, len(SCRIPT)), whole.failure
    assert whole.tool_calls[0].response == ("2\n2\nus" if kind == "http" else "call 1: {'a': 2, 'b': 2}")
    answered = next(n for n, one in enumerate(entries, 1) if one.who == "tool add" and one.kind is Kind.ANSWERED)
    found, sampled, _, notes = await process(entries[:answered])
    asked = VerlAdd.asked + len(server.asked)
    assert told(found) == told(whole)
    if (kind, on_resume) == ("verl", None):
        assert notes == ["tool add keeps a state that cannot be made again (on_resume=none)"]
        assert (sampled, asked) == (len(SCRIPT), 2)
    else:
        assert (notes, sampled) == ([], len(SCRIPT) - 1), "the finished turn is not sampled again"
        assert asked == (2 if on_resume == "calls" else 1)


CHECKS = [call("check_answer", answer="3"), call("check_answer", answer="5"), call("check_answer", answer="5")]
PROGRAMS = [call("code_interpreter", code=code) for code in ("x = 2\nx", "x = globals().get('x', 0) + 3\nprint(x)")]


@pytest.mark.parametrize(
    ("session", "comes_back"), [(None, "calls"), (False, "answers"), (True, "calls")], ids=["check", "program", "cell"]
)
async def test_our_tools_that_keep_something_for_a_trajectory_come_back(
    bench: MakeBench,
    sandbox: Server,  # noqa: F811
    tmp_path: Path,
    session: bool | None,
    comes_back: OnResume,
) -> None:
    script = [*(CHECKS if session is None else PROGRAMS), "#### 5"]
    row = sample(tools_kwargs={"check_answer": {"create_kwargs": {"ground_truth": "5"}}} if session is None else {})

    def tools() -> list[Tool] | ToolSet:
        if session is None:
            return [CheckAnswerTool()]
        return ToolSet.from_yaml(configured(tmp_path, url=sandbox.url, session=session))

    async def process(recorded: list[Entry]) -> tuple[Trajectory, int, list[Entry], list[str]]:
        return await life(bench, tools(), recorded, row=row, script=script)

    whole, sampled, entries, _ = await process([])
    assert (whole.status, sampled) == (Status.COMPLETED, len(script)), whole.failure
    if session is None:
        assert [turn.reward for turn in whole.turns if turn.calls] == [-0.05, 0.0, -0.05], "it knows the best so far"
    else:
        assert [one.response for one in whole.tool_calls] == ["2", "5" if session else "3"]
    assert any(one.kind is Kind.BEGUN for one in entries) == (comes_back == "calls")
    for killed in range(len(entries) + 1):
        before = entries[:killed]
        found, sampled, _, notes = await process(before)
        assert told(found) == told(whole)
        if before and before[-1].kind is Kind.BEGUN:
            assert sampled == len(script) and "was made and not answered" in notes[0]
        else:
            assert not notes and sampled == len(script) - sum(one.who.startswith("engine") for one in before)


class Guess:
    """Guess a number; it tells how often it was asked."""

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, Any]]:
        self.steps = 0
        return "Guess!", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return f"Not {action}, which was guess {self.steps}.", float(action == "5"), action == "5", False, {}


async def test_an_environment_that_the_yaml_says_can_be_played_again(bench: MakeBench, tmp_path: Path) -> None:
    entry = {
        "name": "game",
        "class_name": "interactions.environment.EnvironmentInteraction",
        "config": {"factory": f"{__name__}.Guess"},
        "on_resume": "calls",
    }
    (tmp_path / "talks.yaml").write_text(yaml.safe_dump({"interaction": [entry]}))
    row, script = sample(interaction_kwargs={"name": "game"}), ["3", "4", "5"]

    async def process(recorded: list[Entry]) -> tuple[Trajectory, int, list[Entry], list[str]]:
        return await life(bench, [], recorded, load_interactions(tmp_path / "talks.yaml"), row, script)

    whole, sampled, entries, _ = await process([])
    assert (whole.status, sampled) == (Status.COMPLETED, 3), whole.failure
    for killed in range(len(entries) + 1):
        before = entries[:killed]
        found, sampled, _, notes = await process(before)
        assert told(found) == told(whole)
        if before and before[-1].kind is Kind.BEGUN:
            assert notes == ["a call of interaction game was made and not answered (on_resume=calls)"] and sampled == 3
        else:
            assert not notes and sampled == 3 - sum(one.who.startswith("engine") for one in before)


async def test_a_loop_that_asks_otherwise_begins_anew(bench: MakeBench) -> None:
    numbers = itertools.count()

    async def moody(episode: Episode) -> None:
        await episode.start([{"role": "user", "content": f"It is {next(numbers)} o'clock."}])
        for _ in range(2):
            await episode.generate()
            await episode.observe([{"role": "user", "content": "And?"}])
        episode.finish(Status.COMPLETED)

    async def run(recorded: list[Entry], texts: list[str]) -> tuple[Trajectory, list[str]]:
        notes = list[str]()
        made = bench(texts)
        made.scheduler.loops = {"tool_agent": FunctionLoop(moody)}
        journal = CallJournal("t/0", entries.append, live(recorded), {}, notes.append)
        (trajectory,) = await made.scheduler.run([replace(made.requests(sample())[0], journal=journal)])
        return trajectory, notes

    entries: list[Entry] = []
    await run([], ["one", "two"])
    trajectory, notes = await run(list(entries), ["three", "four"])
    assert notes == ["engine, as t/0.0 is asked otherwise than before"]
    assert trajectory.status is Status.COMPLETED and trajectory.attempt == 0
    assert [turn.text for turn in trajectory.turns if turn.role == "assistant"] == ["three", "four"]


WITH_EARLIER_NAMES = f"""
from agentrl.agent_loop import AgentLoop
from agentrl.tool import tool
from interactions.gsm8k import Gsm8kInteraction
from {__name__} import Count

class Tool(Count):
    said = "calls"
    def __init__(self, config=None, schema=None):
        super().__init__()
    @property
    def after_kill(self):
        return self.said

class Talk(Gsm8kInteraction):
    after_kill = "none"

class Made(Talk):
    def __init__(self, config, name):
        super().__init__(config, name)
        self.after_kill = "answers"

class Loop(AgentLoop):
    after_kill = "none"
    async def run(self, episode): ...

@tool(after_kill="none")
def plain() -> str: ...

@tool(after_kill="none")
def fixed() -> str: ...
"""


def test_the_earlier_name_works_in_classes_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "earlier.py").write_text(WITH_EARLIER_NAMES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    earlier = importlib.import_module("earlier")
    turns = "actor_rollout_ref.rollout.multi_turn"
    keys = ["data.train_files=x", "actor_rollout_ref.model.path=x", f"{turns}.tool_config_path=tools.yaml"]
    keys += [f"{turns}.interaction_config_path=talks.yaml", f"{turns}.tool_options.plain.after_kill=calls"]
    keys += ["actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml"]
    (tmp_path / "tools.yaml").write_text(
        "tools: [{class_name: earlier.Tool}, {function: earlier.plain}, {function: earlier.fixed}]"
    )
    (tmp_path / "talks.yaml").write_text(
        "interaction: [{name: a, class_name: earlier.Talk}, {name: b, class_name: earlier.Made},"
        "{name: c, class_name: earlier.Made, after_kill: calls}]"
    )
    (tmp_path / "loops.yaml").write_text(
        "[{name: earlier_a, _target_: earlier.Loop}, {name: earlier_b, _target_: earlier.Loop, after_kill: answers}]"
    )
    found = load_context(load_config(keys), UserObjects({"own": earlier.Loop()}, interactions=[earlier.Talk({}, "d")]))
    assert on_resume_of(found.tools, found.interactions) == {
        **{"tool add": "calls", "tool plain": "calls", "tool fixed": "none"},
        **{"interaction a": "none", "interaction b": "answers", "interaction c": "calls", "interaction d": "none"},
    }
    loops = {name: found.loops[name].on_resume for name in ("earlier_a", "earlier_b", "own")}
    assert loops == {"earlier_a": "none", "earlier_b": "answers", "own": "none"}
    earlier.Tool.said = "none"
    assert found.tools.slots["add"].on_resume == "none", "a property is asked each time"
    (tmp_path / "tools.yaml").write_text(
        "tools: [{function: earlier.plain, config: {after_kill: calls, on_resume: none}}]"
    )
    with naming(ConfigError, "tools[0]", "(earlier.plain)", "`after_kill`", "`on_resume`"):
        ToolSet.from_yaml(tmp_path / "tools.yaml")


async def test_summaries_are_not_sampled_twice(bench: MakeBench) -> None:
    """The window holds two turns: three summaries stand between the calls."""
    look = [call("add", a=number, b=1) for number in range(4)]
    script = [*look[:2], "Twice, to 2.", look[2], "Three times, to 3.", look[3], "Four times, to 4.", "#### 5"]
    rules = Compaction(0.6, 1, 32, train_summary=True, request="Sum up.")

    async def one(recorded: list[Entry]) -> tuple[Trajectory, int, list[Entry], list[str]]:
        return await life(
            bench, [plain_adding()], recorded, row=sample(), script=script, compaction=rules, max_model_len=225
        )

    whole, sampled, entries, _ = await one([])
    assert (whole.status, whole.score, sampled) == (Status.COMPLETED, 1.0, len(script))
    assert len(whole.transcripts) == whole.metrics["compactions"] + 1 == 4
    for killed in range(len(entries) + 1):
        found, sampled, after, notes = await one(entries[:killed])
        assert told(found) == told(whole) and found.metrics["compactions"] == 3 and not notes
        assert sampled == len(script) - sum(one.who.startswith("engine") for one in entries[:killed])
        assert len(after) == len(entries)
