"""Every dispatched trajectory ends exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.agent_loop import AgentLoop, Episode, Request, agent_names, get_loop, load_agent_loops, register
from agentrl.agent_loop.limits import seed_of
from agentrl.agent_loop.registry import instantiate
from agentrl.engines.contract import EngineError, SamplingParams
from agentrl.errors import ConfigError, InfrastructureError
from agentrl.trajectory import Status, Trajectory
from tests.agent_loop.conftest import Bench, call, sample
from tests.naming import naming

MakeBench = Callable[..., Bench]


async def test_an_engine_fault_is_retried_and_the_retry_counted(bench: MakeBench) -> None:
    def script(session: str, turn: int) -> str | Exception:
        return EngineError("out of memory") if session.endswith(".0") else "#### 5"

    (t,) = await bench(script).run(sample())
    assert t.status is Status.COMPLETED
    assert t.score == 1.0
    assert t.metrics["retries"] == 1


async def test_a_lasting_fault_is_a_failure_and_never_a_zero(bench: MakeBench) -> None:
    (t,) = await bench(lambda session, turn: EngineError("gone")).run(sample())
    assert t.status is Status.FAILED
    assert t.score is None
    assert (t.failure, t.failure_cause) == ("EngineError: gone", "EngineError")


class Lost(InfrastructureError):
    """A kind of failure of a user's own."""


async def test_an_errors_class_is_the_cause_and_its_message_is_not(bench: MakeBench) -> None:
    class Fails(AgentLoop):
        """Fails by an error, then as it says itself, without a message's form, and with a cause."""

        async def run(self, episode: Episode) -> None:
            attempt = episode.trajectory.attempt
            await episode.start(episode.sample.prompt)
            if attempt == 0:
                raise Lost("https://here: gone")
            episode.finish(Status.FAILED)
            episode.trajectory.failure = "https://there: gone"
            if attempt > 1:
                episode.trajectory.fail("world_lost", "https://there: gone")

    b = bench([])
    b.scheduler.loops = {**b.scheduler.loops, "tool_agent": Fails()}
    (t,) = await b.run(sample())
    assert (t.failure, t.failure_cause) == ("world_lost: https://there: gone", "world_lost")
    retried = {name: count for name, count in t.metrics.items() if name.startswith("retries/")}
    assert (t.metrics["retries"], retried) == (2.0, {"retries/Lost": 1.0, "retries/failed": 1.0})


async def test_the_trajectory_deadline_says_what_it_waited_for(bench: MakeBench) -> None:
    async def stuck() -> str:
        """Hangs."""
        await asyncio.sleep(60)
        return ""

    b = bench([call("stuck")], [stuck], timeout=50, trajectory_timeout=0.3)
    (t,) = await b.run(sample())
    assert t.status is Status.TIMEOUT
    assert t.score is None
    assert "tools: stuck" in (t.failure or "")
    assert b.engine.released == ["t/0.0"]


async def test_the_concurrency_limit_holds(bench: MakeBench) -> None:
    b = bench(["#### 5"], max_concurrent=7)
    b.engine.delay = 0.01
    assert len(await b.run(sample(), n=50)) == 50
    assert b.engine.most_running == 7


async def test_a_thousand_trajectories_under_random_faults_end_exactly_once(bench: MakeBench) -> None:
    rng = random.Random(5)

    async def flaky() -> str:
        """Sometimes slow, sometimes broken."""
        roll = rng.random()
        if roll < 0.02:
            await asyncio.sleep(60)
        if roll < 0.2:
            raise RuntimeError("flaky")
        await asyncio.sleep(rng.random() * 0.01)
        return "ok"

    def script(session: str, turn: int) -> str | Exception:
        if rng.random() < 0.15:
            return EngineError("fault")
        return call("flaky") if turn < 2 else "#### 5"

    b = bench(script, [flaky], timeout=0.1, trajectory_timeout=150, max_concurrent=200, max_retries=1)
    ended: Counter[str] = Counter()

    def on_end(trajectory: Trajectory) -> None:
        ended[trajectory.uid] += 1

    requests = [Request(f"t/{k}", k, sample(), SamplingParams(1), seed=k) for k in range(1000)]
    trajectories = await b.scheduler.run(requests, on_end)
    assert [t.uid for t in trajectories] == [request.uid for request in requests]
    assert set(ended.values()) == {1}
    assert len(ended) == 1000
    statuses = Counter(t.status for t in trajectories)
    assert set(statuses) == {Status.COMPLETED, Status.FAILED}
    assert 50 < statuses[Status.FAILED] < 400
    assert all((t.score is None) == (t.status is Status.FAILED) for t in trajectories)
    assert Counter(b.engine.released) == Counter(list(b.engine.said)), "each try is released once"
    assert not b.scheduler.running


async def test_cancelling_a_run_releases_everything(bench: MakeBench) -> None:
    b = bench(["#### 5"])
    b.engine.delay = 30
    task = asyncio.create_task(b.run(sample(), n=20))
    await asyncio.sleep(0.05)
    assert b.scheduler.waiting_for() == {"the engine": 20}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(b.engine.released) == 20
    assert b.engine.running == 0


def test_seeds_depend_on_every_part() -> None:
    seeds = {seed_of(1, step, group, k) for step in range(5) for group in range(20) for k in range(8)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


async def test_a_users_loop_by_decorator(bench: MakeBench) -> None:
    @register("twice")
    class Twice(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.start(episode.sample.prompt)
            await episode.generate()
            await episode.observe([{"role": "user", "content": "Again."}])
            await episode.generate()
            episode.finish(Status.COMPLETED)

    b = bench(["no", "#### 5"])
    b.scheduler.loops = {"twice": get_loop("twice")()}
    (t,) = await b.run(sample("twice"))
    assert [turn.role for turn in t.turns] == ["assistant", "user", "assistant"]
    assert t.score == 1.0
    with pytest.raises(ValueError, match="already registered"):

        @register("tool_agent")
        class Clash(AgentLoop):
            async def run(self, episode: Episode) -> None: ...


def test_users_loops_from_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_loops.py").write_text(
        "from agentrl.agent_loop import AgentLoop\n\nclass Math(AgentLoop):\n    async def run(self, episode): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    good = tmp_path / "loops.yaml"
    good.write_text("- name: math_expression\n  _target_: my_loops.Math\n")
    assert load_agent_loops(good) == {"math_expression": {}}
    assert "math_expression" in agent_names()
    assert instantiate(["math_expression"])["math_expression"].on_resume == "answers"
    good.write_text("- {name: math_anew, _target_: my_loops.Math, on_resume: none}\n")
    assert load_agent_loops(good) == {"math_anew": {}}
    assert instantiate(["math_anew"])["math_anew"].on_resume == "none"
    (tmp_path / "broken_loops.py").write_text("1 / 0\n")
    for text, says in [
        ("- name: x\n  _target_: my_loops.Mth\n", r"agent_loops\[0\] \(x\).*no class 'Mth'; did you mean 'Math'"),
        ("- name: x\n", r"agent_loops\[0\].*`_target_` must be"),
        ("- name: x\n  _target_: my_loops.Math\n  nam: y\n", "unknown key 'nam'; did you mean 'name'"),
        (
            "- name: x\n  _target_: my_loops.Math\n  on_resume: calls\n",
            r"agent_loops\[0\] \(x\): on_resume is 'calls'; expected one of answers, none",
        ),
        ("name: x\n", "expected a list"),
        ("- name: x\n  _target_: pathlib.Path\n", "must be a subclass of agentrl.agent_loop.base.AgentLoop"),
        ("- name: x\n  _target_: broken_loops.Loop\n", "ZeroDivisionError"),
        ("- name: tool_agent\n  _target_: my_loops.Math\n", "already registered by agentrl.agent_loop.tool_agent"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_agent_loops(tmp_path / "bad.yaml")
    with naming(ConfigError, "'tool_agent'"):
        get_loop("tool_agnet")
    assert get_loop("react_agent") is get_loop("react")


def test_a_users_loop_of_a_file_with_options(tmp_path: Path) -> None:
    (tmp_path / "asking.py").write_text(
        "from pydantic import BaseModel\nfrom agentrl.agent_loop import AgentLoop\n\n"
        "class Options(BaseModel):\n    times: int = 2\n\n"
        "class Asking(AgentLoop):\n    def __init__(self, options: Options):\n        self.options = options\n"
        "    async def run(self, episode): ...\n"
    )
    entry = "- name: asking\n  _target_: ${yaml_dir}/asking.py:Asking\n"
    (tmp_path / "loops.yaml").write_text(f"{entry}  options: {{times: 3}}\n")
    loops = instantiate(["asking"], load_agent_loops(tmp_path / "loops.yaml"))
    assert loops["asking"].options.times == 3  # type: ignore[attr-defined]
    for text, says in [
        (f"{entry}  options: {{tims: 3}}\n", r"agent_loops\[0\] \(asking\): options: unknown key 'tims'; did you mean"),
        (f"{entry}  options: {{times: many}}\n", r"options: times: Input should be a valid integer.*found 'many'"),
        (entry.replace(":Asking", ":Options"), r"must be a subclass of agentrl\.agent_loop\.base\.AgentLoop"),
        (entry.replace(":Asking", ":Askin"), r"\(asking\): .*asking\.py has no 'Askin'; did you mean 'Asking'"),
    ]:
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ConfigError, match=says):
            load_agent_loops(tmp_path / "bad.yaml")


@pytest.mark.parametrize("name", ["os:system", "/tmp/evil.py:Loop", "agentrl.agent_loop.react:ReactLoop"])
def test_a_row_names_registered_loops_only(name: str) -> None:
    """Data sets come from anywhere: nothing that a row says is imported."""
    with naming(ConfigError, "agent_name:", "openai_proxy", "unknown"):
        get_loop(name)


def test_a_loop_that_cannot_be_made_is_one_message() -> None:
    @register("unfinished")
    class Unfinished(AgentLoop):
        pass

    with naming(ConfigError, "'unfinished'", "TypeError"):
        instantiate(["unfinished"])
