"""Whatever a row, the policy, a tool or a server does wrong ends its own trajectory, and never the run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from agentrl.agent_loop import AgentLoop, Episode, Request
from agentrl.agent_loop.react import parse_action
from agentrl.engines.contract import Generation, RequestError, SamplingParams
from agentrl.errors import DataError
from agentrl.interaction import Interaction, InteractionResponse
from agentrl.tool import Schema, Tool, ToolResponse
from agentrl.trajectory import Message, Status, VersionSpan
from tests.agent_loop.conftest import Bench, call, sample
from tests.agent_loop.test_tool_agent import add

MakeBench = Callable[..., Bench]
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}}


@pytest.mark.parametrize("fault", [DataError("row 7 is odd"), RequestError("too long")])
async def test_a_fault_that_would_come_again_fails_its_trajectory_only(bench: MakeBench, fault: Exception) -> None:
    class Odd(AgentLoop):
        async def run(self, episode: Episode) -> None:
            if episode.trajectory.uid == "t/1":
                raise fault
            await episode.start(episode.sample.prompt)
            await episode.generate()
            episode.finish(Status.COMPLETED)

    b = bench(["#### 5"])
    b.scheduler.loops = {"odd": Odd()}
    first, second, third = await b.run(sample("odd"), n=3)
    assert (first.score, third.score) == (1.0, 1.0)
    assert second.status is Status.FAILED
    assert second.score is None
    assert second.failure == f"{type(fault).__name__}: {fault}"
    assert second.metrics["retries"] == 0


@pytest.mark.parametrize("agent_name", ["tool_agent", "react", "single_turn"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"logprobs": [float("nan"), -0.25]}, "the engine gave the log-prob nan for its token 0"),
        ({"logprobs": [-0.25, float("-inf")]}, "the engine gave the log-prob -inf for its token 1"),
        ({"logprobs": [-0.25]}, "the engine answered 2 ids with 1 log-probs"),
        (
            {"logprobs": [-0.25, -0.25], "versions": [VersionSpan(3, 0, 1)]},
            f"the engine gave the versions {[VersionSpan(3, 0, 1)]} for 2 ids, not for each id once",
        ),
    ],
)
async def test_an_answer_of_the_engine_that_cannot_be_recorded_is_asked_for_again(
    bench: MakeBench, agent_name: str, change: dict[str, Any], told: str
) -> None:
    b = bench(lambda session, turn: "#### 5", max_retries=1)
    healthy, asked = b.engine.generate, 0

    async def generate(*args: Any) -> Generation:
        nonlocal asked
        asked += 1
        found = await healthy(*args)
        if asked in (1, 3, 4):
            return replace(found, ids=found.ids[:2], **{"versions": [VersionSpan(3, 0, 2)], **change})
        return found

    b.engine.generate = generate  # type: ignore[method-assign,assignment]
    (t,) = await b.run(sample(agent_name))
    assert (t.status, t.score, t.metrics["retries/EngineError"]) == (Status.COMPLETED, 1.0, 1.0)
    (t,) = await b.run(sample(agent_name))
    assert (t.status, t.score, t.failure) == (Status.FAILED, None, f"EngineError: {told}")
    assert t.num_sampled == 0


class BadEnd(Tool):
    """Has no reward to give when it is asked for one."""

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        return ToolResponse("ok")

    async def calc_reward(self, instance_id: str) -> float:
        raise RuntimeError("no reward")


async def test_a_cancelled_trajectory_whose_tool_fails_at_the_end_is_not_begun_again(bench: MakeBench) -> None:
    tool = BadEnd({}, {"type": "function", "function": {"name": "end", "parameters": NO_ARGUMENTS}})

    def script(session: str, turn: int) -> str:
        if turn == 1:
            b.engine.delay = 60
        return call("end")

    b = bench(script, [tool])
    task = asyncio.create_task(b.run(sample()))
    await asyncio.sleep(0.2)
    b.engine.delay = 60
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=5)
    assert done and task.cancelled()
    assert b.engine.released == ["t/0.0"]


class Partner(Interaction):
    """Answers with a score, and does at the end what it is told to."""

    def __init__(self, score: float = 0.25, at_end: float | Exception | None = None) -> None:
        super().__init__({}, "partner")
        self.score = score
        self.at_end = at_end
        self.ended: list[str] = []

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        return None

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        return InteractionResponse(should_end=True, text="", score=self.score)

    async def finalize_interaction(self, instance_id: str) -> None:
        self.ended.append(instance_id)
        if isinstance(self.at_end, float):
            await asyncio.sleep(self.at_end)
        elif self.at_end is not None:
            raise self.at_end


ROW = sample(interaction_kwargs={"name": "partner"})


@pytest.mark.parametrize("reward", [float("nan"), float("-inf"), 1e39])
async def test_a_turn_reward_that_cannot_be_trained_on_fails_the_trajectory(bench: MakeBench, reward: float) -> None:
    """Whoever gave it, here a loop of the user's own; 1e39 is an infinity in float32."""

    class Generous(AgentLoop):
        async def run(self, episode: Episode) -> None:
            await episode.start(episode.sample.prompt)
            await episode.generate()
            episode.trajectory.turns[-1].reward = reward if episode.trajectory.uid == "t/1" else 1e38
            episode.finish(Status.COMPLETED)

    b = bench(["#### 5"], max_retries=0)
    b.scheduler.loops, b.scheduler.on_code_error = {"generous": Generous()}, "count"
    first, second = await b.run(sample("generous"), n=2)
    assert first.score == 1.0
    assert (second.status, second.score) == (Status.FAILED, None)
    assert second.failure is not None and second.failure.startswith("CodeError: ")
    assert f"a turn's reward must be a finite number (in float32), found {reward}" in second.failure


async def test_a_fault_at_the_end_does_not_hide_the_first(bench: MakeBench) -> None:
    partner = Partner(at_end=RuntimeError("second"))
    b = bench(lambda session, turn: RuntimeError("first"), interactions={"partner": partner}, max_retries=0)
    (t,) = await b.run(ROW)
    assert t.failure == "EngineError: RuntimeError: first"
    assert partner.ended == ["t/0.0"]


async def test_an_interaction_that_hangs_at_the_end_is_cut_off(bench: MakeBench) -> None:
    partner = Partner(at_end=60.0)
    b = bench(["#### 5"], interactions={"partner": partner}, max_retries=0, call_timeout=0.1)
    (t,) = await b.run(ROW)
    assert t.status is Status.FAILED
    assert partner.ended == ["t/0.0"]


async def test_a_forced_final_answer_is_judged_by_the_interaction(bench: MakeBench) -> None:
    script = [call("add", a=1, b=1), "#### 5"]
    b = bench(script, [add], interactions={"partner": Partner()}, max_assistant_turns=1)
    (t,) = await b.run(ROW)
    assert t.status is Status.COMPLETED
    assert t.turn_rewards == [0.25]


def action(text: str) -> dict[str, Any] | None:
    return parse_action(text).arguments


def test_react_reads_the_action_whatever_stands_behind_the_stop() -> None:
    text = 'Thought: x\nAction: search\nAction Input: {"query": "Legal Action: none"}\nObservation:'
    for behind in ("", "\n", " 5", "\n\n"):
        assert action(text + behind) == {"query": "Legal Action: none"}


async def test_react_counts_no_drift_since_no_template_could_write_it(bench: MakeBench) -> None:
    b = bench(['Action: add\nAction Input: {"a": 2, "b": 3}\nObservation:', "Final Answer:\n#### 5"], [add])
    request = Request("t/0", 0, sample("react"), SamplingParams(1), seed=0, count_drift=True)
    (t,) = await b.scheduler.run([request])
    assert t.status is Status.COMPLETED
    assert not [name for name in t.metrics if name.startswith("drift/")]


PIECES = [
    *("<tool_call>", "</tool_call>", "<tool_response>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n"),
    *('{"name": "add", "arguments": {"a": 2, "b": 3}}', '{"name": "add", "arguments": "a"}', '{"name": 3}', "{", "}"),
    *("[]", "null", '"', "\\", "NaN", "1e999", "[" * 300, "\ud800".encode("utf-8", "replace").decode(), "\x00", "é"),
    *("Action: add", "Action Input: {}", "Observation:", "Final Answer:", "#### 5", "{{ x }}", "{% raw %}", ""),
]


@pytest.mark.parametrize("agent_name", ["tool_agent", "react", "single_turn"])
async def test_nothing_that_the_policy_says_is_an_infrastructure_fault(bench: MakeBench, agent_name: str) -> None:
    rng = random.Random(agent_name)
    says = {f"t/{k}.0": ["".join(rng.choices(PIECES, k=rng.randrange(9))) for _ in range(12)] for k in range(300)}
    b = bench(lambda session, turn: says[session][turn], [add], max_retries=0)
    row, params = sample(agent_name), SamplingParams(1)
    requests = [Request(f"t/{k}", k, row, params, seed=k, count_drift=True) for k in range(300)]
    for t in await b.scheduler.run(requests):
        assert t.score is not None, (t.failure, says[f"{t.uid}.0"])
