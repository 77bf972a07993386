"""A user's observer sees each turn as it is recorded, and its errors are its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.agent_loop import TurnObserver
from agentrl.agent_loop.observer import Observers
from agentrl.agents.agent import AgentOptions
from agentrl.chat import Chat
from agentrl.engines.contract import EngineError
from agentrl.errors import CodeError, ConfigError
from agentrl.observe.plain import PlainDisplay
from agentrl.openai_api.agent_loop import OpenAIProxyLoop
from agentrl.rollouts.context import RunContext
from agentrl.rollouts.local import open_local_rollouts
from agentrl.system.targets import load_target
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status, Trajectory, Turn
from tests.agent_loop.conftest import Bench, call, sample
from tests.config.loading import load
from tests.naming import assert_names, naming

MakeBench = Callable[..., Bench]
KEY = "actor_rollout_ref.rollout.agent.observers"
OPTIONS = "actor_rollout_ref.rollout.agent.observer_options"
PAGE = Path(__file__).parents[2] / "docs" / "tools.md"


def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: one number
        b: another
    """
    return str(a + b)


def watched(b: Bench, observers: Observers) -> Bench:
    b.scheduler.context = replace(b.scheduler.context, observers=observers)
    return b


async def test_the_pages_journal_has_the_turns_of_every_try_in_order(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"^```python\n(# my_journal\.py\n.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_journal.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    config = load(f"{KEY}=my_journal.py:Journal")

    def script(session: str, turn: int) -> str | Exception:
        if session == "t/1.0" and turn == 1:
            return EngineError("gone")
        return call("add", a=2, b=3) if turn == 0 else "#### 5"

    made = list[Any]()
    observers = Observers.load(config.actor_rollout_ref.rollout.agent.observers, tmp_path / "run", {}, made.append)
    b = watched(bench(script, [add]), observers)
    trajectories = await b.run(sample(), n=3)
    made[0].close()

    (file,) = (tmp_path / "run").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for trajectory, attempt in zip(trajectories, (0, 1, 0), strict=True):
        assert trajectory.attempt == attempt == trajectory.metrics["retries"]
        seen = [line for line in lines if line["uid"] == trajectory.uid and line["attempt"] == attempt]
        assert [(line["role"], line["text"]) for line in seen[:-1]] == [
            (one.role, one.text) for one in trajectory.turns
        ]
        assert [line["role"] for line in seen[:-1]] == ["assistant", "tool", "assistant"]
        assert (seen[-1]["status"], seen[-1]["score"]) == ("completed", 1.0)
    lost = [line.get("role") for line in lines if (line["uid"], line["attempt"]) == ("t/1", 0)]
    assert lost == ["assistant", "tool"], "the try that failed was seen as far as it went, and has no end"


class Failing(TurnObserver):
    """Fails as its test says; OSErrors elsewhere are faults that are tried again."""

    def __init__(self, fails: str, error: Exception) -> None:
        self.fails, self.error = fails, error
        self.ended: list[str] = []

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None:
        if self.fails == "on_turn" and trajectory.uid == "t/1":
            raise self.error

    def on_end(self, trajectory: Trajectory) -> None:
        self.ended.append(trajectory.uid)
        if self.fails == "on_end" and trajectory.uid == "t/1":
            raise self.error


@pytest.mark.parametrize("fails", ["on_turn", "on_end"])
@pytest.mark.parametrize("error", [KeyError("x"), OSError(28, "No space left on device")])
async def test_an_observers_error_ends_the_run_or_is_told_once(bench: MakeBench, fails: str, error: Exception) -> None:
    b = watched(bench(["#### 5"]), Observers([Failing(fails, error)]))
    with pytest.raises(CodeError) as told:
        await b.run(sample(row=7), n=3)
    text = str(told.value)
    assert text.startswith(f"turn observer (tests.agent_loop.test_observer.Failing.{fails}): {type(error).__name__}: ")
    assert_names(text, "test.parquet", "row 7", "t/1")
    assert __file__ in text
    assert "on_code_error=count" in text

    observer = Failing(fails, error)
    b = watched(bench(lambda session, turn: "#### 5"), Observers([observer]))
    told_once: list[str] = []
    b.scheduler.on_code_error, b.scheduler.warn = "count", told_once.append
    for trajectory in [*await b.run(sample(), n=3), *await b.run(sample(), n=3)]:
        assert (trajectory.status, trajectory.score) == (Status.COMPLETED, 1.0)
    assert len(told_once) == 1 and "The observer missed this; the trajectory is kept" in told_once[0]
    assert sorted(observer.ended) == sorted(["t/0", "t/1", "t/2"] * 2)
    assert b.engine.released.count("t/1.0") == 2 and "t/1.1" not in b.engine.released


def search(query: str) -> str:
    """Finds.

    Args:
        query: words
    """
    return query


class Filing(TurnObserver):
    """Files each trajectory by step, row and number, as a user's would."""

    def __init__(self) -> None:
        self.filed: list[tuple[int, int, int]] = []

    def on_turn(self, trajectory: Trajectory, turn: Turn) -> None: ...

    def on_end(self, trajectory: Trajectory) -> None:
        assert trajectory.origin is not None
        self.filed.append((trajectory.origin.step, trajectory.origin.row, trajectory.origin.rollout))


ASKING = """
import json
import openai

def agent(sample, base_url, api_key, model):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    client.chat.completions.create(model=model, messages=sample["prompt"])
    return {name: sample["origin"][name] for name in ("step", "row", "rollout")}
"""


@pytest.mark.parametrize("name", ["single_turn", "tool_agent", "react", "search_r1", "openai_proxy"])
async def test_an_observer_files_by_step_row_and_number_whatever_the_loop(
    bench: MakeBench, name: str, tmp_path: Path
) -> None:
    seen, b = Filing(), bench(["<answer>5</answer>"], [search])
    if name == "openai_proxy":
        (tmp_path / "asking.py").write_text(ASKING)
        b.scheduler.loops = {name: OpenAIProxyLoop(AgentOptions(target=f"{tmp_path}/asking.py:agent"))}
    trajectories = await watched(b, Observers([seen])).run(sample(name, row=7), n=2)
    await b.scheduler.close()
    assert [one.failure for one in trajectories] == [None, None]
    assert sorted(seen.filed) == [(3, 7, 0), (3, 7, 1)]
    if name == "openai_proxy":
        told = [[one.score_extra[key] for key in ("step", "row", "rollout")] for one in trajectories]
        assert told == [[3, 7, 0], [3, 7, 1]], "what the agent was given"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("journal", "unknown turn observer 'journal'; known are none, or name one of yours as package"),
        ("nowhere.py:Journal", "no such file: .*nowhere.py"),
        ("agentrl.agent_loop:TurnObservr", "has no 'TurnObservr'; did you mean 'TurnObserver'"),
        ("json:dumps", "expected a subclass of agentrl.agent_loop.observer.TurnObserver as turn observer"),
    ],
)
def test_an_unknown_observer_is_refused_by_the_config(target: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}.*{says}"):
        load(f"{KEY}=[{target}]")


def test_one_that_cannot_be_made_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "seeing.py").write_text(
        "from agentrl.agent_loop import TurnObserver\n"
        "class Late(TurnObserver):\n"
        "    async def on_turn(self, trajectory, turn): ...\n"
        "class Broken(TurnObserver):\n"
        "    def __init__(self, run_dir):\n"
        "        run_dir.opn()\n"
        "    def on_turn(self, trajectory, turn): ...\n"
    )

    def made(name: str) -> Any:
        return Observers.load([f"{tmp_path}/seeing.py:{name}"], tmp_path, {}, print)

    with naming(ConfigError, "seeing.py:Late.on_turn", "(`def`)"):
        made("Late")
    with pytest.raises(CodeError, match=r"turn observer \(seeing.Broken\): AttributeError.*\n.*seeing.py:6"):
        made("Broken")


CLOSING = """
from agentrl.agent_loop import TurnObserver
from agentrl.errors import TrainingError

told = []

class First(TurnObserver):
    def on_turn(self, trajectory, turn): ...
    def close(self): told.append(type(self).__name__)

class Second(First):
    def close(self):
        super().close()
        raise ValueError("it is gone")

class Broken(First):
    def __init__(self, run_dir): raise ValueError("no room")

def no_engine(setting, loop): raise TrainingError("no engine")
"""


@pytest.mark.parametrize(("last", "says"), [("Broken", "no room"), ("Second", "it is gone")])
def test_all_are_closed_where_the_next_or_the_engine_cannot_be_made(tmp_path: Path, last: str, says: str) -> None:
    (tmp_path / "closing.py").write_text(CLOSING)
    here = f"{tmp_path}/closing.py"
    config = load(f"{KEY}=['{here}:First','{here}:{last}']", f"actor_rollout_ref.rollout.name={here}:no_engine")
    context = cast(RunContext, SimpleNamespace(tools=ToolSet.from_tools([]), interactions={}))
    chat = cast(Chat, SimpleNamespace(decode=None))
    opened = open_local_rollouts(config, "cpu", chat, context, tmp_path / "run", PlainDisplay("run"))
    with pytest.raises((CodeError, ValueError), match=says):
        opened.__enter__()
    assert load_target(f"{here}:told", "x") == (["First"] if last == "Broken" else ["Second", "First"])


WRITING = """
from pydantic import BaseModel
from agentrl.agent_loop import TurnObserver

class Options(BaseModel):
    file: str

class Writing(TurnObserver):
    def __init__(self, run_dir, options: Options):
        self.path = run_dir / options.file

    def on_turn(self, trajectory, turn):
        self.path.touch()
"""


def test_one_is_given_its_options(tmp_path: Path) -> None:
    (tmp_path / "writing.py").write_text(WRITING)
    name = f"{tmp_path}/writing.py:Writing"
    agent = load(f"{KEY}=['{name}']", f"{OPTIONS}={{'{name}': {{file: a.txt}}}}").actor_rollout_ref.rollout.agent
    observers = Observers.load(agent.observers, tmp_path, agent.observer_options, print)
    observers.on_turn(Trajectory("t", 0, "", ""), Turn("user", "", 0, 0, 0))
    assert (tmp_path / "a.txt").exists() and observers.take_error("t") is None
    with naming(ConfigError, "observer_options", "key 'fil'", "'file'", "unknown"):
        load(f"{KEY}=['{name}']", f"{OPTIONS}={{'{name}': {{fil: a.txt}}}}")
    with naming(ConfigError, "observer_options.other", "observers=", "no effect"):
        load(f"{OPTIONS}={{other: {{file: a.txt}}}}")
