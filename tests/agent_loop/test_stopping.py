"""Stop conditions of the run, in each loop."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from agentrl.agent_loop import StopCondition
from agentrl.agent_loop.stopping import load_stop_conditions
from agentrl.chat import Chat
from agentrl.config import load_config
from agentrl.config.registries import STOP_CONDITIONS
from agentrl.errors import CodeError, ConfigError
from agentrl.trajectory import Status, Trajectory
from tests.agent_loop.conftest import Bench, call, sample
from tests.conftest import PROJECT
from tests.naming import naming
from tests.openai_api.conftest import scripted

MakeBench = Callable[..., Bench]
MINE = """
from pydantic import BaseModel
from agentrl.trajectory import Status

def second_turn(episode, reply):
    return Status.TURN_LIMIT if episode.assistant_turns == 2 else None

def said_stop(episode, reply):
    return Status.ABORTED if "stop" in reply.message.text else None

def wrong(episode, reply):
    return "completed"

def broken(episode, reply):
    return reply.absent

class Options(BaseModel):
    most: int = 3

def with_options(episode, reply, options: Options):
    return None
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., tuple[StopCondition, ...]]:
    (tmp_path / "mine.py").write_text(MINE)
    return lambda *names: load_stop_conditions([f"{tmp_path}/mine.py:{name}" for name in names])


def search(query: str) -> str:
    """Search.

    Args:
        query: What for.
    """
    return f"about {query}"


async def ended(b: Bench, conditions: tuple[StopCondition, ...], agent: str) -> Trajectory:
    b.scheduler.context = replace(b.scheduler.context, stop_conditions=conditions)
    tags: dict[str, Any] = {"data_source": "nq", "ground_truth": {"target": ["Paris"]}}
    (t,) = await b.run(sample(agent, **(tags if agent == "search_r1" else {})))
    return t


SEARCHES = {
    "tool_agent": call("search", query="a"),
    "react": 'Action: search\nAction Input: {"query": "a"}\nObservation:',
    "search_r1": "<search>a</search>",
}


@pytest.mark.parametrize("agent", SEARCHES)
async def test_a_condition_ends_every_loop_of_turns_before_it_runs_the_calls(
    bench: MakeBench, mine: Callable[..., tuple[StopCondition, ...]], agent: str
) -> None:
    without = await ended(bench([SEARCHES[agent]] * 9, [search]), (), agent)
    stopped = await ended(bench([SEARCHES[agent]] * 9, [search]), mine("said_stop", "second_turn"), agent)
    assert len(without.tool_calls) > 2
    assert (stopped.status, len(stopped.tool_calls)) == (Status.TURN_LIMIT, 1)
    assert [turn.role for turn in stopped.turns] == ["assistant", "tool", "assistant"]


async def test_the_first_condition_that_ends_it_counts(
    bench: MakeBench, mine: Callable[..., tuple[StopCondition, ...]]
) -> None:
    assert (await ended(bench(["stop #### 5"]), mine("said_stop"), "single_turn")).status is Status.ABORTED
    talk = [SEARCHES["tool_agent"], "stop " + SEARCHES["tool_agent"]]
    assert (await ended(bench(talk, [search]), mine("second_turn", "said_stop"), "tool_agent")).status is (
        Status.TURN_LIMIT
    )


async def test_at_an_answer_no_call_is_run(bench: MakeBench) -> None:
    says = ["<answer>5</answer>" + SEARCHES["tool_agent"]]
    t = await ended(bench(says, [search]), load_stop_conditions(["answer_tag"]), "tool_agent")
    assert (t.status, t.tool_calls) == (Status.COMPLETED, [])


async def test_the_condition_of_the_page_ends_the_third_equal_call(bench: MakeBench, tmp_path: Path) -> None:
    found = re.search(r"```python\n(# my_stops\.py\n.*?)```", (PROJECT / "docs/extending.md").read_text(), re.DOTALL)
    assert found
    (tmp_path / "my_stops.py").write_text(found.group(1))
    conditions = load_stop_conditions([f"{tmp_path}/my_stops.py:repeats_itself"])
    says = [call("search", query=query) for query in "abacaddd"]
    t = await ended(bench(says, [search], max_assistant_turns=9), conditions, "tool_agent")
    assert (t.status, [one.arguments["query"] for one in t.tool_calls if one.arguments]) == (
        Status.TURN_LIMIT,
        list("abaca"),
    )
    assert [turn.role for turn in t.turns][-1] == "tool", "the answer is recorded"


@pytest.mark.parametrize(("name", "said"), [("wrong", "it must give a Status or None"), ("broken", "absent")])
async def test_an_error_of_a_condition_ends_the_run_and_names_it(
    bench: MakeBench, mine: Callable[..., tuple[StopCondition, ...]], name: str, said: str
) -> None:
    with pytest.raises(CodeError, match=rf"stop condition .*mine.py:{name}(.|\n)*{said}"):
        await ended(bench(["#### 5"]), mine(name), "single_turn")


def test_an_unknown_name_is_refused() -> None:
    with naming(ConfigError, STOP_CONDITIONS.key, "'nswer_tag'", "unknown"):
        load_stop_conditions(["nswer_tag"])


def test_options_that_no_key_gives_are_refused(mine: Callable[..., object], tmp_path: Path) -> None:
    with naming(ConfigError, f"{STOP_CONDITIONS.key}="):
        load_config([f"{STOP_CONDITIONS.key}={tmp_path}/mine.py:with_options"])


async def test_an_agent_is_refused_after_it(chat: Chat, mine: Callable[..., tuple[StopCondition, ...]]) -> None:
    async with scripted(chat, ["go on", "stop", "never said"]) as (service, _), service.session() as s:
        s.session.episode.context = replace(s.session.episode.context, stop_conditions=mine("said_stop"))
        talk = [{"role": "user", "content": "a"}]
        first = (await s.say(talk)).choices[0].message
        assert s.session.stopped is None
        talk += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "b"}]
        assert (await s.say(talk)).choices[0].message.content == "stop"
        assert s.session.ending is Status.ABORTED
        with naming(openai.BadRequestError, "stop condition"):
            await s.say([*talk, {"role": "assistant", "content": "stop"}, {"role": "user", "content": "c"}])
        assert s.session.ending is Status.ABORTED and len(s.trajectory.turns) == 3
