"""Tools that give a row's recorded answers, and the score of an answer by those that people liked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agentrl.reward.logs import compute_score
from agentrl.tool.arguments import canonical_call
from agentrl.trajectory import Status, ToolAnswer, ToolCallRecord, Trajectory, Turn
from tests.agent_loop.conftest import Bench, call, sample
from tools.recorded import RecordedTool

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "number"}},
    "required": ["city"],
}
SCHEMA: Any = {"type": "function", "function": {"name": "weather", "description": "It.", "parameters": PARAMETERS}}
ROME = {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}
TRUTH: dict[str, Any] = {
    "liked": [{"text": "18 degrees.", "calls": [ROME]}],
    "disliked": [{"text": "No idea.", "calls": []}],
}


def logged_row(*answers: tuple[str, str]) -> Any:
    recorded = [{"arguments": arguments, "text": text} for arguments, text in answers]
    kwargs = {"weather": {"create_kwargs": {"answers": recorded}}}
    return sample(data_source="logs", ground_truth=TRUTH, tools_kwargs=kwargs)


async def test_an_episode_with_recorded_answers(bench: Callable[..., Bench]) -> None:
    """Calls mean the same in another order and as decimals; the second of two answers comes at the second call."""
    tool = RecordedTool({}, SCHEMA)
    asked = call("weather", days=2.0, city=" Rome")
    row = logged_row(('{"city": "Rome", "days": 2}', "pending"), ('{"city": "Rome", "days": 2}', "18"))
    (one,) = await bench([asked, asked, asked, "18 degrees."], [tool]).run(row)
    assert [each.response for each in one.tool_calls] == ["pending", "18", "18"]
    assert one.score == pytest.approx((2 * 1 / 4 + 1) / 2), "two calls more than the liked answer has"
    (one,) = await bench([asked, "18 DEGREES"], [tool]).run(row)
    assert (one.status, one.score, one.score_extra["liked"]) == (Status.COMPLETED, 1.0, 1.0)
    assert dict(tool.take_metrics()) == {"not_recorded": 0.0} and dict(tool.take_metrics()) == {}


async def test_a_call_that_was_not_recorded(bench: Callable[..., Bench]) -> None:
    """The policy reads an error and goes on; another row's answers are not given."""
    tool = RecordedTool({}, SCHEMA)
    scripts = [call("weather", city="Oslo"), "No idea."]
    (one,) = await bench(scripts, [tool]).run(logged_row(('{"city": "Rome"}', "18")))
    (each,) = one.tool_calls
    assert "No answer to this call was recorded" in each.response and each.error == "refused"
    assert one.status is Status.COMPLETED and one.score == 0.0
    assert dict(tool.take_metrics()) == {"not_recorded": 1.0}
    (one,) = await bench(scripts, [RecordedTool({"missing": "Ask less."}, SCHEMA)]).run(
        sample(data_source="logs", ground_truth=TRUTH)
    )
    assert "Ask less." in one.tool_calls[0].response, "a row without answers"


async def test_answers_of_another_form_fail_by_name(bench: Callable[..., Bench]) -> None:
    row = sample(tools_kwargs={"weather": {"create_kwargs": {"answers": [{"text": "18"}]}}})
    (one,) = await bench(["x"], [RecordedTool({}, SCHEMA)], max_retries=0).run(row)
    assert one.score is None and "tools_kwargs of weather: expected create_kwargs" in str(one.failure)


def answered(text: str, *made: tuple[str, Any]) -> Trajectory:
    records = [ToolCallRecord(name, arguments, ToolAnswer("18")) for name, arguments in made]
    turn = Turn("assistant", text, 0, 0, 0, records)
    return Trajectory("t", 0, turns=[turn], messages=[{"role": "assistant", "content": text}])


RIGHT = ("weather", {"days": 2, "city": "Rome"})
DISLIKED = {"text": "17 degrees.", "calls": [ROME]}


@pytest.mark.parametrize(
    ("trajectory", "more", "score"),
    [
        (answered("18 degrees", RIGHT), [], 1.0),
        (answered("No idea"), [], 0.0),
        (answered("19 degrees", RIGHT), [], 0.75),  # its call, and one of two words
        (answered("18 degrees"), [], 0.5),  # its words without its call
        (answered("", RIGHT), [], 0.5),
        (answered("17 degrees.", RIGHT), [DISLIKED], 0.0),
        (answered("19 degrees", RIGHT), [DISLIKED], 0.0),  # as near to the disliked one
        (answered("18 degrees now", RIGHT), [DISLIKED], 0.9 - 0.7),
        (answered("18 degrees", RIGHT, RIGHT), [DISLIKED], (2 / 3 + 1) / 2 - (2 / 3 + 0.5) / 2),
        (answered("18 degrees", ("weather", None)), [], 0.5),  # a call that could not be read
    ],
)
def test_scores(trajectory: Trajectory, more: list[Any], score: float) -> None:
    found = compute_score({**TRUTH, "disliked": [*TRUTH["disliked"], *more]}, trajectory)
    assert found["score"] == pytest.approx(score)


def test_the_log_ends_with_a_call() -> None:
    """Words behind the calls are not compared where the log has none."""
    truth: Any = {"liked": [{"text": "", "calls": [ROME]}]}
    assert compute_score(truth, answered("It is 18.", RIGHT))["score"] == 1.0
    assert compute_score(truth, answered("It is 18."))["score"] == 0.0


@pytest.mark.parametrize("truth", [None, "18", {"liked": []}, {"disliked": TRUTH["disliked"]}])
def test_without_a_liked_answer_there_is_no_score(truth: Any) -> None:
    with pytest.raises(ValueError, match="--judge"):
        compute_score(truth, answered("18"))


def test_calls_that_mean_the_same() -> None:
    same: list[Any] = [
        '{"a": 1, "b": [2.0, "x  y"]}',
        '{"b": [2, " x y "], "a": 1.0, "c": null}',
        {"a": 1, "b": [2, "x y"]},
    ]
    assert len({canonical_call("f", arguments) for arguments in same}) == 1
    other: list[Any] = ['{"a": true}', '{"a": 1}', '{"a": "1"}', '{"a": [1]}', "no JSON", None, {}]
    assert len({canonical_call("f", arguments) for arguments in other}) == len(other)
    assert canonical_call("f", {}) != canonical_call("g", {})
