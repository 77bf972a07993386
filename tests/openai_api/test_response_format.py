"""`response_format`: which texts keep it, what is asked again, and where it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import openai
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.request import json_check
from agentrl.trajectory import Status
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.programs import QUESTION
from tests.openai_api.test_record import recorded, said

CALL = call("add", a=2, b=3)
OBJECT = {"type": "json_object"}
SCHEMA = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


def fits(schema: dict[str, Any] = SCHEMA, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("format", "first", "then"),
    [
        (OBJECT, "The sum is 5.", '{"any": [1]}'),
        (OBJECT, "[5]", '\n {"sum": null}'),
        (OBJECT, '```json\n{"sum": 5}\n```', "{}"),
        (fits(), '{"sum": "5"}', '{"sum": 5}'),
        (fits(strict=True), '{"sum": 5, "more": 1}', '{"sum": 5}'),
        (fits({"additionalProperties": False}), '{"more": 1}', "{}"),
        (fits({"type": "array"}), "{}", "[]"),
        (OBJECT, '{"sum": 5', '{"sum": 5}'),
        (OBJECT, r'["\ud800"]', "{}"),
        (fits(), r'{"\ud800": 5}', '{"sum": 5}'),
    ],
)
async def test_a_text_that_does_not_fit_is_recorded_and_asked_again(
    chat: Chat, format: dict[str, Any], first: str, then: str
) -> None:
    async with scripted(chat, [first, then]) as (service, engine), service.session() as open:
        answer = await open.say([QUESTION], response_format=format)
        assert (answer.choices[0].message.content, answer.tries) == (then, 2)
        left, kept = open.trajectory.transcripts
        assert left.ids[: left.prompt_length] == kept.ids[: kept.prompt_length]
        assert recorded(open.trajectory) == said(engine), "what was sampled is trained on, sent or not"
        assert open.trajectory.metrics["openai_asked_again"] == 1 and open.session.turns == 2


async def test_what_fits_is_sampled_once_and_calls_need_no_text(chat: Chat) -> None:
    async with scripted(chat, ['{"sum": 5}', CALL, "free"]) as (service, _), service.session() as open:
        assert (await open.say([QUESTION], response_format=fits())).tries == 1
        called = await open.say([QUESTION], response_format=fits(), tools=[ADD])
        assert called.tries == 1 and called.choices[0].finish_reason == "tool_calls"
        free = await open.say([QUESTION], response_format={"type": "text"})
        assert not hasattr(free, "tries") and "openai_asked_again" not in open.trajectory.metrics


async def test_calls_that_may_not_be_made_are_text_and_do_not_fit(chat: Chat) -> None:
    async with scripted(chat, [CALL, "{}"]) as (service, _), service.session() as open:
        answer = await open.say([QUESTION], response_format=OBJECT, tools=[ADD], tool_choice="none")
        assert (answer.choices[0].message.content, answer.tries) == ("{}", 2)


async def test_the_text_before_a_stop_text_is_what_fits(chat: Chat) -> None:
    async with scripted(chat, ['{"sum": 5}END and more']) as (service, _), service.session() as open:
        answer = await open.say([QUESTION], response_format=fits(), stop="END")
        assert (answer.choices[0].message.content, answer.tries) == ('{"sum": 5}', 1)


async def test_where_no_text_fits_the_error_says_what_each_was(chat: Chat) -> None:
    bad = ["five", '{"sum": "5"}', "{}", '{"sum": 5, "x": 1}']
    async with scripted(chat, bad) as (service, engine), service.session() as open:
        with pytest.raises(openai.BadRequestError) as told:
            await open.say([QUESTION], response_format=fits())
        assert (told.value.code, told.value.param) == ("json_validate_failed", "response_format")
        for words in (
            "kept response_format: answer 1 is no JSON",
            "answer 2 does not fit the schema (sum:",
            "answer 4",
        ):
            assert words in str(told.value)
        assert (open.session.ending, open.session.turns) == (Status.MALFORMED, 4)
        assert open.trajectory.metrics["openai_promise_broken"] == 1
        assert recorded(open.trajectory) == said(engine)


def test_a_text_that_the_validator_cannot_read_does_not_fit() -> None:
    check = json_check(json.dumps(SCHEMA))
    deep = '{"sum": ' + "[" * 300 + "]" * 300 + "}"
    assert all(problem and problem.startswith("is no JSON") for problem in map(check, (deep, r'{"\ud800": 1}')))


def doubled(times: int) -> dict[str, Any]:
    """A schema that judges one value by 2 ** times schemas."""
    names = [f"s{number}" for number in range(times)]
    twice = {one: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2} for one, after in pairwise([*names, "end"])}
    return {"$defs": {**twice, "end": {"type": "integer"}}, "$ref": f"#/$defs/{names[0]}"}


@pytest.mark.parametrize(
    ("schema", "says"), [(doubled(40), "would judge one value"), ({"description": "x" * (1 << 18)}, "characters")]
)
async def test_a_schema_that_would_hold_up_the_run_is_refused(chat: Chat, schema: dict[str, Any], says: str) -> None:
    """A program in a container reaches the endpoint, whose event loop is that of all trajectories."""
    async with scripted(chat, []) as (service, _), service.session() as open:
        with pytest.raises(openai.BadRequestError, match=says) as told:
            await open.say([QUESTION], response_format=fits(schema))
        assert told.value.param == "response_format.json_schema.schema"


async def test_a_fault_that_takes_long_to_find_is_not_named(chat: Chat) -> None:
    nested = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}] * 2}}}
    bad = '{"a": ' * 40 + "1" + "}" * 40
    async with scripted(chat, [bad, "{}"]) as (service, _), service.session() as open:
        assert (await open.say([QUESTION], response_format=fits(nested))).tries == 2


async def test_greedy_answers_are_sampled_once(chat: Chat) -> None:
    async with scripted(chat, ["no"]) as (service, _), service.session() as open:
        open.session.episode.params = replace(open.session.episode.params, temperature=0.0)
        with pytest.raises(openai.BadRequestError, match="answer 1 is no JSON"):
            await open.say([QUESTION], response_format=OBJECT)
        assert open.session.turns == 1
