"""What a request may hold: real clients' shapes are answered, and everything else is a 400 that names the parameter."""

from __future__ import annotations

import asyncio
import copy
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import ValidationError

from agentrl.chat import Chat
from agentrl.openai_api import wire
from agentrl.openai_api.chat_completions import ChatCompletions
from agentrl.openai_api.dialect import Dialect, assistant
from agentrl.openai_api.dialect import call as made_call
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.messages import Messages
from agentrl.openai_api.request import ChatMessage, check_conversation, read_request
from agentrl.openai_api.responses import Responses
from agentrl.openai_api.wire import Reading, parsed
from agentrl.trajectory import Trajectory
from tests.agent_loop.conftest import call
from tests.naming import Names, assert_names, naming
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.programs import QUESTION

CALLED = {
    "role": "assistant",
    "content": None,
    "refusal": None,
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
}
"""A turn as openai-python dumps it."""
ANSWERED = {"role": "tool", "tool_call_id": "call_1", "name": "add", "content": "5"}

OPENAI = {
    "model": "policy",
    "messages": [{"role": "developer", "content": "Be exact."}, QUESTION, CALLED, ANSWERED],
    "tools": [{"type": "function", "function": {**ADD["function"], "strict": False}}],  # type: ignore[dict-item]
    "tool_choice": "auto",
    "max_completion_tokens": 20,
    "temperature": 0.7,
    "top_p": 1,
    "seed": 7,
    "n": 1,
    "stop": ["END"],
    "logprobs": True,
    "stream": False,
    "response_format": {"type": "text"},
    "user": "me",
    "metadata": {"run": "1"},
}
SMOLAGENTS = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "You solve tasks with tools."}]},
        {"role": "user", "content": [{"type": "text", "text": "New task:\nWhat is 2 + 3?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Calling tools:\n[{'id': 'x', 'function': 'add'}]"}],
        },
        {"role": "user", "content": [{"type": "text", "text": "Call id: x\nObservation:\n5"}]},
    ],
    "stop": ["Observation:", "Calling tools:"],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "final_answer",
                "description": "Provides a final answer to the given problem.",
                "parameters": {
                    "type": "object",
                    "properties": {"answer": {"type": "any", "description": "The answer.", "nullable": True}},
                    "required": [],
                },
            },
        },
    ],
    "tool_choice": "required",
}
LANGCHAIN = {
    "model": "policy",
    "messages": [QUESTION, {k: CALLED[k] for k in ("role", "content", "tool_calls")}, ANSWERED],
    "tools": [ADD],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": False,
    "stream": False,
    "temperature": 0.0,
}
OPENAI_AGENTS = {
    "model": "policy",
    "messages": [{"role": "system", "content": "Help."}, QUESTION, CALLED, ANSWERED],
    "tools": [{"type": "function", "function": {**ADD["function"], "strict": True}}],  # type: ignore[dict-item]
    "tool_choice": "required",
    "reasoning_effort": "low",
    "store": True,
    "stream_options": {"include_usage": True},
    "stream": True,
}
CLIENTS: dict[str, dict[str, Any]] = {
    "openai": OPENAI,
    "smolagents": SMOLAGENTS,
    "langchain": LANGCHAIN,
    "openai-agents": OPENAI_AGENTS,
}
SAID = {"smolagents": call("final_answer", answer="5")}


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_clients_default_request_is_answered(chat: Chat, name: str) -> None:
    said = SAID.get(name, call("add", a=2, b=3))
    async with (
        scripted(chat, lambda session, turn: said) as (service, _),
        service.session() as open,
        httpx.AsyncClient(timeout=30) as raw,
    ):
        answer = await raw.post(f"{open.base_url}/chat/completions", json=CLIENTS[name])
        assert answer.status_code == 200
        assert ("final_answer" if name == "smolagents" else "add") in answer.text
        assert len(open.trajectory.transcripts) == 1


def refused(body: object, strict: bool = False) -> ApiError:
    with pytest.raises(ApiError) as told:
        read_request(parsed(body if isinstance(body, bytes) else json.dumps(body).encode()), Reading("chat", strict))
    assert told.value.status == 400
    return told.value


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"n": True}, "n", "unsupported_value"),
    ({"n": 2}, "n", "unsupported_value"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_value"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_value"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": "2"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 2.0}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": -1}, "max_completion_tokens", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": -0.5}, "temperature", "invalid_value"),
    ({"top_p": 1.5}, "top_p", "invalid_value"),
    ({"top_logprobs": False}, "top_logprobs", "unsupported_value"),
    ({"top_logprobs": 3}, "top_logprobs", "unsupported_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"stop": [1]}, "stop[0]", "invalid_type"),
    ({"stop": ["x"] * 17}, "stop", "invalid_value"),
    ({"stop": "x" * 257}, "stop", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"tools": {}}, "tools", "invalid_type"),
    ({"tools": [tool("x" * 129)]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [tool("add"), tool("a b")]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [tool("a"), tool("b"), tool("a")]}, "tools[2].function.name", "invalid_value"),
    ({"tools": [tool(f"f{k}") for k in range(2049)]}, "tools", "invalid_value"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "missing_required_parameter"),
    ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": tool("mul"), "tools": [tool("add")]}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "missing_required_parameter"),
    ({"response_format": {"type": "grammar"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
    ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format", "invalid_value"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "numbre"}}}},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"$ref": "http://x/y"}},
            }
        },
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    ({"messages": [QUESTION] * 2049}, "messages", "invalid_value"),
    ({"messages": QUESTION}, "messages", "invalid_type"),
    ({"messages": []}, "messages", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        {"messages": [QUESTION, {"role": "assistant", "tool_calls": [1]}]},
        "messages[1].tool_calls[0]",
        "invalid_type",
    ),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "invalid_type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]", "invalid_value"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{**QUESTION, "prefix": True}]}, "messages[0].prefix", "unsupported_value"),
    ({"messages": [{**QUESTION, "tool_call_id": "x"}]}, "messages[0].tool_call_id", "invalid_value"),
]


@pytest.mark.parametrize(("changes", "param", "code"), WRONG)
@pytest.mark.parametrize("strict", [False, True])
def test_a_value_of_a_wrong_kind_is_named(changes: dict[str, Any], param: str, code: str, strict: bool) -> None:
    error = refused({"messages": [QUESTION], **changes}, strict)
    assert (error.param, error.code) == (param, code)
    assert param in error.message and len(error.message) < 400


def without(message: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in names}


NAMELESS = {**CALLED, "tool_calls": [without(CALLED["tool_calls"][0], "id")]}  # type: ignore[index,arg-type]


@pytest.mark.parametrize(
    ("talk", "param", "words"),
    [
        ([NAMELESS, without(ANSWERED, "tool_call_id")], "messages[0].tool_calls[0].id", "required"),
        ([CALLED, without(ANSWERED, "tool_call_id")], "messages[1].tool_call_id", "id"),
        ([CALLED, {**ANSWERED, "tool_call_id": "call_2"}], "messages[1].tool_call_id", "'call_1'"),
        ([ANSWERED], "messages[0].tool_call_id", "calls: none"),
        ([CALLED, QUESTION, ANSWERED], "messages[2].tool_call_id", "calls: none"),
        ([CALLED, ANSWERED, ANSWERED], "messages[2].tool_call_id", "answered already"),
        ([{**CALLED, "tool_calls": CALLED["tool_calls"] * 2}], "messages[0].tool_calls", "two calls"),  # type: ignore[operator]
        ([{**QUESTION, "tool_calls": CALLED["tool_calls"]}], "messages[0].tool_calls", "no calls"),
    ],
)
def test_calls_and_answers_that_do_not_match_are_told_in_words(talk: list[Any], param: str, words: Names) -> None:
    error = refused({"messages": talk})
    assert_names(error.message, words)
    assert error.param == param


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("place", ["temperature", "max_tokens", "n", "tools", "brand_new"])
def test_numbers_that_are_none(number: str, place: str) -> None:
    body = {"messages": [QUESTION], place: [{**ADD, "function": {**ADD["function"], "parameters": {"x": 123454321}}}]}  # type: ignore[dict-item]
    text = json.dumps(body if place == "tools" else {"messages": [QUESTION], place: 123454321})
    refused(text.replace("123454321", number).encode())


def test_what_holds_nothing_asks_for_nothing() -> None:
    empty: dict[str, Any] = {"unknown": None, "prefix": False, "extra": {"a": [None, {}]}, "function_call": None}
    asked: dict[str, Any] = {**QUESTION, **empty}
    request = read_request({"messages": [asked], **empty}, Reading("chat"))
    assert request.messages[0].to_message() == QUESTION


def test_a_schema_with_a_number_that_is_no_json_is_refused() -> None:
    assert refused(b'{"messages": [{"role": "user", "content": "x"}], "tools": "1"}').param == "tools"
    assert refused(b'{"a":' * 5000).param is None


# Mutations: one change of a valid request, anywhere in it

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 2, -1, 0.5, 10**30, float("nan"), float("inf")),
    *("", "2", "hot", "<|im_end|>", "\u0000", [], {}, [1], [None], {"a": 1}, [[["x"]]]),
)
PARTS = 97  # a prime: a member has as many other values each time


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all members of a JSON value."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        yield (*path, key)
        yield from places(member, (*path, key))


def lengthened(value: Any) -> Any:
    match value:
        case str():
            return (value or "x") * 3000
        case list():
            return value * 2100
        case dict():
            return {**value, **{f"k{n}": n for n in range(300)}}
        case _:
            return int("9" * 60)


def mutants() -> Iterator[dict[str, Any]]:
    for base in CLIENTS.values():
        for path in places(base):
            whole = copy.deepcopy(base)
            parent = whole
            for key in path[:-1]:
                parent = parent[key]
            old = parent[path[-1]]
            for new in (*VALUES, [old], {"x": old}, lengthened(old)):
                parent[path[-1]] = new
                yield whole
            del parent[path[-1]]
            yield whole


def state(trajectory: Trajectory) -> tuple[int, ...]:
    sizes = [len(transcript) for transcript in trajectory.transcripts]
    return len(sizes), sum(sizes), len(trajectory.turns), len(trajectory.messages), trajectory.num_sampled


@pytest.mark.slice(1, "hostile")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
async def test_any_change_of_a_request_is_answered_or_refused_by_name(chat: Chat, part: int) -> None:
    def says(session: str, turn: int) -> str:
        return call("add", a=1, b=1)

    limits = {"max_assistant_turns": 10**6, "max_response_tokens": 100}
    statuses = set()
    async with (
        scripted(chat, says, **limits) as (service, _),
        service.session() as open,
        httpx.AsyncClient(timeout=30) as raw,
    ):
        for body in [json.dumps(body) for number, body in enumerate(mutants()) if number % PARTS == part]:
            before = state(open.trajectory)
            answer = await raw.post(f"{open.base_url}/chat/completions", content=body)
            statuses.add(answer.status_code)
            assert answer.status_code in (200, 400), (body[:2000], answer.text)
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["code"], error
                assert error["param"] or error["code"] == "invalid_json", error
                sampled = error["code"] in ("tool_use_failed", "json_validate_failed")
                assert sampled or state(open.trajectory) == before, body[:2000]
            assert open.session.fault is None
    assert statuses == {200, 400}


async def test_a_refused_request_leaves_the_record_as_it_is(chat: Chat) -> None:
    async with scripted(chat, ["five", "so 5"]) as (service, _), service.session() as open:
        first = (await open.say([QUESTION])).choices[0].message
        before = state(open.trajectory)
        talk: list[Any] = [QUESTION, first, {"role": "user", "content": "Sure?"}]
        wrong: list[dict[str, Any]] = [{"max_tokens": 0}, {"extra_body": {"best_of": 2}}, {"stop": ["x"] * 50}]
        for more in wrong:
            with pytest.raises(openai.BadRequestError):
                await open.say(talk, **more)
            assert state(open.trajectory) == before and open.session.turns == 1
        await open.say(talk)
        assert len(open.trajectory.transcripts) == 1


async def test_an_error_of_our_own_is_a_500_in_openais_shape_and_loses_the_try(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(chat, ["x"]) as (service, _), service.session() as open:
        monkeypatch.setattr(open.session.branches, "place", lambda asked: asyncio.sleep(0, dict[int, int]()[1]))
        with naming(openai.InternalServerError, "KeyError"):
            await open.say([QUESTION])
        assert isinstance(open.session.fault, KeyError) and open.session.turns == 0


def many_results(count: int) -> Any:
    calls = [{"type": "tool_use", "id": f"c{index}", "name": "add", "input": {}} for index in range(count)]
    results = [{"type": "tool_result", "tool_use_id": f"c{index}", "content": "x"} for index in range(count)]
    turns = [("user", "hi"), ("assistant", calls), ("user", results)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_results_of_one_turn_are_bounded_as_messages_are(chat: Chat) -> None:
    dialect = Messages()
    with naming(ApiError, "messages[2].content[2046]", "2,048 messages"):
        dialect.read(many_results(3000), Reading("messages"), {})
    messages = [message.to_message() for message in dialect.read(many_results(200), Reading("messages"), {}).messages]
    assert len(messages) == 202 and chat.decode(chat.render(messages)).count("x") >= 200


def test_answers_to_calls_are_checked_in_linear_time() -> None:
    """Twice as many take about twice as long: the work is counted, not timed."""
    compared = 0

    class Id(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    ids = [Id(f"c{index}") for index in range(1000)]
    made = assistant("", "", [made_call(id, "add", "{}") for id in ids])
    answers = [ChatMessage.model_construct(role="tool", content="x", tool_call_id=Id(str(id))) for id in reversed(ids)]
    check_conversation([made, *answers])
    assert compared < 20 * len(ids)


MANY: list[tuple[Dialect, dict[str, Any], str]] = [
    (ChatCompletions(), {"messages": [QUESTION], "tools": [0] * 99}, "tools[0]"),
    (ChatCompletions(), {"messages": [{"role": "user", "content": [0] * 99}]}, "messages[0].content[0]"),
    (ChatCompletions(), {"messages": [{"role": "assistant", "tool_calls": [0] * 99}]}, "messages[0].tool_calls[0]"),
    (ChatCompletions(), {"messages": [QUESTION], **{f"n{k}": 1 for k in range(99)}}, "n0"),
    (Messages(), {"messages": [QUESTION], "tools": [0] * 99}, "tools[0]"),
    (Messages(), {"messages": [QUESTION], "system": [{}] * 99}, "system[0].type"),
    (Messages(), {"messages": [{"role": "user", "content": [{"type": []}] * 99}]}, "messages[0].content[0]"),
    (Responses(), {"input": [0] * 99}, "input[0]"),
    (Responses(), {"input": "Hi", "include": [0] * 99}, "include[0]"),
    (Responses(), {"input": [{"type": "reasoning", "summary": [0] * 99}]}, "input[0].summary[0]"),
    (
        Messages(),
        {"messages": [QUESTION], "tools": [{"name": "f", "input_schema": {"properties": dict.fromkeys("abcdef", 5)}}]},
        "tools[0].input_schema.properties.a",
    ),
]


@pytest.mark.parametrize(("dialect", "body", "param"), MANY)
def test_the_first_of_many_wrong_members_is_the_last_that_is_read(
    monkeypatch: pytest.MonkeyPatch, dialect: Dialect, body: dict[str, Any], param: str
) -> None:
    """A body of 8 MiB has millions of them, whose errors took minutes of a processor and gigabytes."""
    faults: list[int] = []
    made = wire.as_api_error

    def counted(error: ValidationError, *args: Any, **more: Any) -> ApiError:
        faults.append(error.error_count())
        return made(error, *args, **more)

    monkeypatch.setattr(wire, "as_api_error", counted)
    with pytest.raises(ApiError) as told:
        dialect.read(body, Reading(dialect.api, strict=True), {})
    assert told.value.param == param and faults and max(faults) <= 2


def test_reasoning_of_many_items_is_joined_in_linear_time() -> None:
    """The steps are counted, not timed."""

    def steps(number: int) -> int:
        body, count = {"input": [{"type": "reasoning", "id": "rs_x"}] * number}, 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            Responses().read(body, Reading("responses"), {})
        finally:
            sys.setprofile(None)
        return count

    steps(1)  # What is made once is made.
    assert steps(400) < 3 * steps(200)
