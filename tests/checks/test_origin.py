"""Faults between row, engine, tools, scorer and record: the real scheduler, loop, tools and scorer, a scripted engine.

Each case changes one part of agentrl. The checks know none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

import agentrl.agent_loop.base
import agentrl.agent_loop.tool_calls
import agentrl.reward.manager
from agentrl.agent_loop import Scheduler
from agentrl.agent_loop.base import Episode
from agentrl.chat import Chat
from agentrl.checks.origin import Origins
from agentrl.checks.transcripts import check_record
from agentrl.engines.contract import Generation
from agentrl.observe.report import Report
from agentrl.reward import NaiveRewardManager, Verdict
from agentrl.reward.manager import turns_text
from agentrl.tool.session import ToolSession
from agentrl.trajectory import Status, Trajectory, Transcript
from agentrl.trajectory.sample import Sample
from interactions.gsm8k import Gsm8kInteraction
from tests.agent_loop.conftest import Bench, bench, call, chat, sample, tiny_dir  # noqa: F401 - fixtures
from tests.agent_loop.scripted_engine import ScriptedEngine

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
MakeBench = Callable[..., Bench]
Inject = Callable[[pytest.MonkeyPatch, Bench], None]


def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return f"the sum of {a} and {b} is {a + b}"


def script(session: str, turn: int) -> str:
    number = int(session.rpartition("/")[2].partition(".")[0])
    if turn == 0:
        return call("add", a=number, b=1) + "\n" + call("add", a=number, b=2)
    return "I see. " + call("add", a=7, b=number) if turn == 1 else f"#### {5 if number == 1 else number}"


async def checked(b: Bench, row: Sample | None = None, n: int = 3) -> tuple[list[Trajectory], Report]:
    """Run a prompt and check it, as a rollout process does."""
    origins, row = Origins(b.scheduler), row or sample()
    requests = [replace(one, count_drift=one.seed == 0) for one in b.requests(row, n)]
    trajectories = await b.scheduler.run(requests)
    report = origins.check([(one, row) for one in requests], trajectories)
    for one in trajectories:
        report.add_check("record", check_record(one, b.chat))
    return trajectories, report


async def test_sound_trajectories_are_compared_and_nothing_is_said(bench: MakeBench) -> None:  # noqa: F811
    found, report = await checked(bench(script, [add]))
    assert [len(one.tool_calls) for one in found] == [3, 3, 3] and [one.score for one in found] == [0.0, 1.0, 0.0]
    assert report.findings == []
    assert report.evaluated == {"requests": 3, "scores": 3, "answers": 3, "prompt": 1, "record": 3}


async def test_a_trajectory_without_room_for_a_turn_is_sound(bench: MakeBench) -> None:  # noqa: F811
    """As where an environment's first observation fills the window."""
    found, report = await checked(bench(script, [add], max_response_tokens=0))
    assert [(one.status, one.turns) for one in found] == [(Status.LENGTH, [])] * 3
    assert report.findings == [] and report.evaluated["prompt"] == 1


@pytest.mark.parametrize(("name", "told"), [("lookup", 0), ("add", 3)])
async def test_a_loop_of_a_users_may_answer_calls_of_its_own_tools(
    name: str,
    told: int,
    bench: MakeBench,  # noqa: F811
) -> None:
    b, row = bench(script, [add]), sample()
    origins = Origins(b.scheduler)
    origins._ours = dict.fromkeys(origins._ours, False)
    requests = b.requests(row, 1)
    (found,) = await b.scheduler.run(requests)
    for one in found.tool_calls:
        one.name, one.answer = name, replace(one.answer, text="by the agent")
    report = origins.check([(one, row) for one in requests], [found])
    assert len(report.findings) == told


@pytest.mark.parametrize("truth", [numpy.array([1.0, 5.0]), float("nan")], ids=["array", "nan"])
async def test_a_ground_truth_of_any_type_is_compared(bench: MakeBench, truth: object) -> None:  # noqa: F811
    row = replace(sample(), ground_truth=truth)

    b = bench(script, [add])
    origins = Origins(b.scheduler)
    requests = b.requests(row, 2)
    trajectories = await b.scheduler.run(requests)
    for one in trajectories:
        origins._verdicts[one.uid] = [(turns_text(one), truth, one.score or 0.0)]
    found = origins.check([(one, row) for one in requests], trajectories).findings
    assert [one for one in found if "ground truth" in one.what] == []


async def test_notes_of_cancelled_trajectories_are_dropped(bench: MakeBench) -> None:  # noqa: F811
    b = bench(script, [add])
    origins, row = Origins(b.scheduler), sample()
    await b.scheduler.run(b.requests(row, 2))
    origins.forget()
    requests = b.requests(row, 2)
    report = origins.check([(one, row) for one in requests], await b.scheduler.run(requests))
    assert report.findings == [] and report.evaluated["scores"] == 2


async def test_errors_cut_answers_and_interactions_are_sound(bench: MakeBench) -> None:  # noqa: F811
    def long(words: int) -> str:
        """Write.

        Args:
            words: How many.
        """
        return " ".join(f"word{number}" for number in range(words))

    def fails(x: int) -> str:
        """Fail.

        Args:
            x: Ignored.
        """
        raise OSError("no luck")

    texts = [call("long", words=400), call("fails", x=1) + call("long", words="?") + call("none"), "#### 4", "#### 5"]
    asks = {"gsm8k": Gsm8kInteraction({}, "gsm8k")}
    row = sample(interaction_kwargs={"name": "gsm8k", "query": "What is 2 + 3?", "ground_truth": "5"})
    found, report = await checked(bench(texts, [long, fails], interactions=asks), row, n=2)
    assert [one.truncated for one in found[0].tool_calls] == [True, False, False, False]
    assert [turn.role for turn in found[0].turns].count("user") == 1
    assert report.findings == [] and report.evaluated["answers"] == 2 and report.evaluated["prompt"] == 1


def patched(owner: object, name: str, change: Callable[..., Any]) -> Inject:
    """Have `change(result, *arguments)` replace what a function, or a coroutine function, returns."""
    healthy = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = healthy(*args, **kwargs)
        if not hasattr(result, "__await__"):
            return change(result, *args)

        async def after() -> Any:
            return change(await result, *args)

        return after()

    return lambda patch, _: patch.setattr(owner, name, wrapped)


def neighbour_scored(patch: pytest.MonkeyPatch, _: Bench) -> None:
    """Each trajectory is paid what the one before it has earned."""
    healthy, last = NaiveRewardManager.score, list[Trajectory]()

    async def score(manager: NaiveRewardManager, trajectory: Trajectory, row: Sample) -> Verdict:
        last.append(trajectory)
        return await healthy(manager, last[max(len(last) - 2, 0)], row)

    patch.setattr(NaiveRewardManager, "score", score)


def scores_permuted(patch: pytest.MonkeyPatch, _: Bench) -> None:
    healthy = Scheduler.run

    async def run(*args: Any) -> list[Trajectory]:
        found = await healthy(*args)
        found[0].score, found[1].score = found[1].score, found[0].score
        return found

    patch.setattr(Scheduler, "run", run)


def neighbours_truth(patch: pytest.MonkeyPatch, _: Bench) -> None:
    healthy = NaiveRewardManager.judge

    async def judge(manager: NaiveRewardManager, arguments: Any) -> Verdict:
        return await healthy(manager, {**arguments, "ground_truth": "6"})

    patch.setattr(NaiveRewardManager, "judge", judge)


def answer_of_another_request(patch: pytest.MonkeyPatch, _: Bench) -> None:
    """The engine, which knows its requests, resolves each with the answer to the one before."""
    healthy, last = ScriptedEngine.generate, list[Generation]()

    async def generate(engine: ScriptedEngine, ids: Any, params: Any, *args: Any, **kwargs: Any) -> Generation:
        last.append(replace(await healthy(engine, ids, params, *args, **kwargs), seed=params.seed))
        return last[max(len(last) - 2, 0)]

    patch.setattr(ScriptedEngine, "generate", generate)


def the_same_numbers_for_two_requests(patch: pytest.MonkeyPatch, _: Bench) -> None:
    """Tokens and log-probs of one answer are delivered again, in an answer that says nothing of its request."""
    healthy, first = ScriptedEngine.generate, list[Generation]()

    async def generate(engine: ScriptedEngine, ids: Any, *args: Any, **kwargs: Any) -> Generation:
        found = await healthy(engine, ids, *args, **kwargs)
        numbers = [-((hash((tuple(ids), place)) % 997) / 100 + 0.1) for place in range(len(found.ids))]
        first.append(replace(found, logprobs=numbers))
        return first[0] if len(first) == 6 else first[-1]

    patch.setattr(ScriptedEngine, "generate", generate)


def schemas_lost(patch: pytest.MonkeyPatch, _: Bench) -> None:
    healthy = Chat.render
    patch.setattr(Chat, "render", lambda self, messages, tools=None, **more: healthy(self, messages, **more))


def other_arguments(patch: pytest.MonkeyPatch, _: Bench) -> None:
    """The tool is called with other arguments than the policy wrote."""
    healthy = ToolSession.call

    async def call_it(session: ToolSession, name: str, arguments: Any, parse_error: Any = None) -> Any:
        return await healthy(session, name, {**arguments, "b": 9}, parse_error)

    patch.setattr(ToolSession, "call", call_it)


def another_rows_prompt(patch: pytest.MonkeyPatch, _: Bench) -> None:
    healthy = Episode.start

    async def start(episode: Episode, messages: Any, tools: Any = None) -> None:
        await healthy(episode, [{"role": "user", "content": "What is 4 + 4?"}], tools)

    patch.setattr(Episode, "start", start)


def observed_token_lost(patch: pytest.MonkeyPatch, _: Bench) -> None:
    healthy = Transcript.append_observed
    patch.setattr(Transcript, "append_observed", lambda self, ids, *more: healthy(self, [ids[1], *ids[1:]], *more))


def of_the_formats_bridge(patch: pytest.MonkeyPatch, b: Bench) -> None:
    """The chat format itself ends turns twice."""
    healthy, stop = b.chat.format.bridge, b.chat.stop_token_ids[0]
    patch.setattr(b.chat.format, "bridge", lambda ids, *more: [stop, *healthy(ids, *more)])


def other_text(patch: pytest.MonkeyPatch, _: Bench) -> None:
    healthy = Episode.record

    async def record(episode: Episode, *args: Any) -> Any:
        reply = await healthy(episode, *args)
        assert episode.last_turn is not None
        episode.last_turn.text = "#### 5"
        return reply

    patch.setattr(Episode, "record", record)


def shifted(ids: list[int], *_: Any) -> list[int]:
    return [*ids[:4], ids[4] + 1, *ids[5:]]


FAULTS: dict[str, tuple[Inject, str]] = {
    "answers of tools are swapped": (
        patched(agentrl.agent_loop.tool_calls, "run_concurrently", lambda found, *_: found[::-1]),
        "answers",
    ),
    "an answer is emptied": (patched(ToolSession, "call", lambda found, *_: replace(found, text="")), "answers"),
    "an answer is replaced": (
        patched(ToolSession, "_execute", lambda found, *_: replace(found, text="the sum is 0")),
        "answers",
    ),
    "a success becomes an error": (
        patched(ToolSession, "_execute", lambda found, *_: replace(found, error="execution")),
        "answers",
    ),
    "an answer is not shown": (
        patched(agentrl.agent_loop.base, "answer_to", lambda found, *_: {**found, "content": ""}),
        "answers",
    ),
    "a tool is called with other arguments": (other_arguments, "answers"),
    "schemas are lost from the prompt": (schemas_lost, "prompt"),
    "the tools' schemas are gone": (lambda patch, b: b.scheduler.context.tools.schemas.clear(), "prompt"),
    "a prompt's token is shifted": (patched(Chat, "render", shifted), "prompt"),
    "another row's prompt": (another_rows_prompt, "prompt"),
    "the bridge repeats the stop token": (
        patched(Chat, "bridge", lambda ids, its, *_: [its.stop_token_ids[0], *ids]),
        "prompt",
    ),
    "the format's bridge repeats the stop token": (of_the_formats_bridge, "mask"),
    "an observed token is another": (observed_token_lost, "prompt"),
    "the recorded text is another's": (other_text, "prompt"),
    "the neighbour's answer is scored": (neighbour_scored, "scores"),
    "the neighbour's ground truth is scored": (neighbours_truth, "scores"),
    "another text is scored": (
        patched(agentrl.reward.manager, "policy_text", lambda text, *_: f"{text} #### 5"),
        "scores",
    ),
    "scores are permuted": (scores_permuted, "scores"),
    "a score is halved": (
        patched(NaiveRewardManager, "score", lambda found, *_: Verdict(found.score / 2, {})),
        "scores",
    ),
    "an answer of another request": (answer_of_another_request, "requests"),
    "the same numbers for two requests": (the_same_numbers_for_two_requests, "requests"),
    "trajectories are exchanged": (patched(Scheduler, "run", lambda found, *_: found[::-1]), "requests"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_is_named(fault: str, bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    inject, check = FAULTS[fault]
    b = bench(script, [add])
    inject(monkeypatch, b)
    _, report = await checked(b)
    assert check in {one.check for one in report.findings}, report.findings


def test_the_page_lists_these_faults() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("test_origin.py")[2].partition("`tests/checks/")[0]
    listed = [f"- {fault[0].upper()}{fault[1:]} (`{check}`)" for fault, (_, check) in FAULTS.items()]
    assert [line for line in page.splitlines() if line.startswith("- ")] == listed
