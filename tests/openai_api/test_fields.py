"""The table of fields: each row does what it says, in both manners, at each of the three APIs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.endpoint import DIALECTS, MAX_DROPPED
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.fields import ANYWHERE, APIS, OTHERS, TABLE, USED, Fate, row_of
from agentrl.openai_api.request import ChatRequest
from agentrl.openai_api.wire import MOST_DROPPED, Reading
from benchmarks.fields_page import page
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.programs import FUNCTION, USER

PAGE = Path(__file__).parents[2] / "docs" / "openai_fields.md"
BY_API = {dialect.api: dialect for dialect in DIALECTS.values()}
LEAST: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "tools": [ADD]},
    "responses": {"input": [USER], "tools": [{"type": "function", **FUNCTION}]},
    "messages": {"messages": [USER], "tools": [{"name": "add", "input_schema": {"type": "object"}}]},
}
HINTS = {"reasoning_effort": "low", "verbosity": "low"}
"""Values of hints that are no numbers."""


def read(api: str, body: dict[str, Any], *, strict: bool = False) -> tuple[ChatRequest, Reading]:
    reading = Reading(api, strict)  # type: ignore[arg-type]
    return BY_API[reading.api].read(body, reading, {}), reading


def refused(api: str, body: dict[str, Any], *, strict: bool = False) -> ApiError:
    with pytest.raises(ApiError) as told:
        read(api, body, strict=strict)
    assert told.value.status == 400
    return told.value


def fields(*fates: Fate) -> Iterator[Any]:
    """(API, name) of each field of a request with one of the fates."""
    for row in TABLE:
        for api in row.apis.split() if row.place == "request" and row.fate in fates else ():
            yield from (pytest.param(api, name, row, id=f"{api}-{name}") for name in row.names.split())


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m benchmarks.fields_page > docs/openai_fields.md"


def test_each_member_has_one_fate_and_each_row_a_place() -> None:
    seen = set()
    for row in TABLE:
        for api in row.apis.split():
            assert row.place == ANYWHERE or (api, row.place) in USED or row.place in ("include", "part.type"), row
            for name in row.names.split():
                assert name not in USED.get((api, row.place), ()), f"{api} {row.place}.{name} is used, and has a row"
                assert (api, row.place, name) not in seen, f"{api} {row.place}.{name} has two rows"
                seen.add((api, row.place, name))
    assert {api for api, _ in USED} == set(APIS)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("api", "name", "row"), list(fields(Fate.HINT, Fate.LABEL)))
def test_a_hint_is_noted_and_a_label_is_not(api: str, name: str, row: Any, strict: bool) -> None:
    _, reading = read(api, {**LEAST[api], name: HINTS.get(name, 1)}, strict=strict)
    assert reading.dropped == ({name: row.why} if row.fate is Fate.HINT else {})
    _, reading = read(api, {**LEAST[api], name: None}, strict=strict)
    assert reading.dropped == {}


@pytest.mark.parametrize(("api", "name", "row"), list(fields(Fate.REFUSED, Fate.ELSEWHERE)))
def test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing(api: str, name: str, row: Any) -> None:
    for value in (7, [{"a": 1}]):
        error = refused(api, {**LEAST[api], name: value})
        assert (error.param, error.code) == (name, "unsupported_value")
    for value in (None, *row.harmless):
        _, reading = read(api, {**LEAST[api], name: value})
        assert reading.dropped == {}


@pytest.mark.parametrize("api", APIS)
def test_what_is_unknown_is_dropped_or_with_strict_refused(api: str) -> None:
    """In the request, its messages and tools; what holds nothing asks for nothing."""
    for place in ("request", "message", "tool"):
        body = json.loads(json.dumps(LEAST[api]))
        at = {"request": body, "message": (body.get("messages") or body["input"])[0], "tool": body["tools"][0]}[place]
        if "function" in at:
            at = at["function"]
        at["brand_new"] = {"mode": "x"}
        asked, reading = read(api, body)
        assert list(reading.dropped) == ["brand_new"]
        assert "brand_new" not in json.dumps(asked.declared_tools), "no template sees it"
        error = refused(api, body, strict=True)
        assert str(error.param).endswith("brand_new") and error.code == "unknown_parameter"
        at["brand_new"] = {"mode": None}
        assert read(api, body, strict=True)[1].dropped == {}


KINDS: dict[str, dict[str, Any]] = {
    "chat": {"tools": [ADD, {"type": "brand_new"}]},
    "responses": {"tools": [{"type": "function", **FUNCTION}, {"type": "web_search", "filters": {"a": 1}}]},
    "messages": {"tools": [*LEAST["messages"]["tools"], {"type": "web_search_20250305", "name": "web_search"}]},
}


@pytest.mark.parametrize("api", APIS)
def test_a_tool_of_a_providers_is_left_out_or_with_strict_refused(api: str) -> None:
    asked, reading = read(api, {**LEAST[api], **KINDS[api]})
    assert [tool["function"]["name"] for tool in asked.declared_tools] == ["add"]
    assert list(reading.dropped) == [{"chat": "brand_new"}.get(api, "web_search")]
    assert str(refused(api, {**LEAST[api], **KINDS[api]}, strict=True).param).startswith("tools[1]")


def test_content_that_the_policy_would_not_see_is_refused() -> None:
    for api, body in (
        ("messages", {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}),
    ):
        assert "content[0]" in str(refused(api, body).param)


def test_the_table_of_kinds_ends_with_every_other_one() -> None:
    for api in APIS:
        row = row_of(api, "tool.type", "of_next_month")
        assert row is not None and OTHERS in row.names.split() and row.fate is Fate.HINT


async def test_what_was_dropped_is_counted_and_told_once_and_names_are_few(
    chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    """A policy's shell may send any names: the metrics do not grow with them."""
    async with scripted(chat, lambda session, turn: "ok", max_assistant_turns=99) as (service, _):
        async with service.session() as open, httpx.AsyncClient() as client:
            for body in ({"brand_new": 1}, {"brand_new": 2, "temperature": 0.5}, {f"n{k}": 1 for k in range(200)}):
                answer = await client.post(f"{open.base_url}/chat/completions", json={"messages": [USER], **body})
                assert answer.status_code == 200
        counted = {name: n for name, n in open.trajectory.metrics.items() if name.startswith("openai_dropped_")}
        assert counted["openai_dropped_brand_new"] == 2 and counted["openai_dropped_temperature"] == 1
        assert counted["openai_dropped_others"] == 200 - (MAX_DROPPED - 2) and len(counted) == MAX_DROPPED + 1
    assert caplog.text.count("have 'brand_new', which is dropped") == 1


def test_the_names_that_are_noted_of_one_request_have_a_bound() -> None:
    _, reading = read("chat", {"temperature": 0.5, **LEAST["chat"], **{f"n{k}": 1 for k in range(2 * MOST_DROPPED)}})
    assert len(reading.dropped) == MOST_DROPPED and "temperature" in reading.dropped


async def test_the_strict_manner_is_the_runs_choice(chat: Chat) -> None:
    async with (
        scripted(chat, ["ok"], strict=True) as (service, _),
        service.session() as open,
        httpx.AsyncClient() as client,
    ):
        answer = await client.post(f"{open.base_url}/chat/completions", json={"messages": [USER], "brand_new": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "brand_new")
