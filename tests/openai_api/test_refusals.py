"""Requests that go to the wrong place: what they are answered, and where the run counts them."""

from __future__ import annotations

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api import endpoint as endpoint_module
from tests.naming import Names, assert_names
from tests.openai_api.conftest import scripted
from tests.openai_api.programs import USER

BODY = {"messages": [USER], "max_tokens": 9}


async def test_requests_to_no_session_are_counted_at_the_session_that_ends_next(chat: Chat) -> None:
    """A wrong token, none at all, a session that has ended, feedback for it: each in the words of its API."""
    async with scripted(chat, ["ok"]) as (service, engine), httpx.AsyncClient() as client:
        async with service.session() as ended:
            pass
        host = service.endpoint.url
        async with service.session() as open:
            for url, kind in (
                (f"{host}/wrong-token/v1/messages", "not_found_error"),
                (f"{host}/v1/messages", "not_found_error"),
                (f"{host}/v1/chat/completions", "invalid_request_error"),
                (f"{host}/wrong-token/v1/responses", "invalid_request_error"),
                (f"{ended.base_url}/messages/count_tokens", "not_found_error"),
                (f"{ended.base_url}/feedback", "invalid_request_error"),
                (f"{host}/", "invalid_request_error"),
            ):
                answer = await client.post(url, json={"score": 1.0} if url.endswith("feedback") else BODY)
                error = answer.json()["error"]
                assert (answer.status_code, error["type"]) == (404, kind), url
                assert_names(error["message"], "ended", "OPENAI_BASE_URL")
                assert answer.headers["x-should-retry"] == "false"
            assert "openai_unknown_sessions" not in open.trajectory.metrics
        assert open.trajectory.metrics["openai_unknown_sessions"] == 6  # `/` names no session
        assert "openai_unknown_sessions" not in ended.trajectory.metrics
        assert not engine.prompts and not open.session.feedback and not ended.session.feedback


async def test_programs_without_the_token_are_counted_at_the_session_that_ends_next(
    chat: Chat, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted(chat, []) as (service, _), service.session() as open, httpx.AsyncClient() as client:
        for headers, found in (({}, "no such header"), ({"Authorization": "Bearer wrong"}, "another token")):
            answer = await client.get(f"{service.endpoint.url}/v1/sessions", headers=headers)
            message = answer.json()["error"]["message"]
            assert answer.status_code == 401
            assert "AGENTRL_TOKEN" in message and "token_env" in message and found in message
    assert open.trajectory.metrics["openai_wrong_tokens"] == 2
    assert caplog.text.count("a program that asked for sessions was refused") == 1


async def test_a_wrong_path_and_wrong_feedback_are_counted_in_their_session(chat: Chat) -> None:
    async with scripted(chat, ["ok"]) as (service, _), service.session() as open, httpx.AsyncClient() as client:
        root, report = open.base_url.removesuffix("/v1"), service.endpoint.report_url(open.session)
        answer = await client.post(f"{root}/chat/completions", json=BODY)
        assert answer.status_code == 404
        message = answer.json()["error"]["message"]
        assert_names(message, "POST", "v1/chat/completions", "v1/responses", "URL")
        for body in ('{"score": NaN}', '{"score": "1"}', "[]"):
            assert (await client.post(f"{report}/feedback", content=body)).status_code == 400
        causes = {"openai_bad_requests_unknown_url": 1, "openai_bad_requests_invalid_value": 3}
        assert open.trajectory.metrics == {"openai_bad_requests": 4, **causes}
        assert (await client.post(f"{report}/feedback", json={"score": 1.0})).status_code == 200
        twice = await client.post(f"{report}/feedback", json={"score": 0.0, "reward": 2.0})
        assert (twice.status_code, open.session.feedback) == (409, {"score": 1.0})
        assert open.trajectory.metrics == {"openai_bad_requests": 4, "openai_feedback_twice": 1, **causes}


@pytest.mark.parametrize(
    ("numbers", "status", "problem"),
    [
        ({f"n{index}": 1 for index in range(65)}, 400, "65 numbers"),
        ({"n" * 101: 1}, 400, "100 printable"),
        ({"a\nb": 1}, 400, "100 printable"),
        ({"score": 1e30}, 400, "1e+12"),
        ({"score": {"a": "x" * 70_000}}, 413, "65,536 bytes"),
    ],
)
async def test_the_numbers_of_a_post_have_bounds(
    chat: Chat, numbers: dict[str, object], status: int, problem: Names
) -> None:
    async with scripted(chat, []) as (service, _), service.session() as open, httpx.AsyncClient() as client:
        answer = await client.post(f"{service.endpoint.report_url(open.session)}/feedback", json=numbers)
        assert_names(answer.json()["error"]["message"], problem)
        assert answer.status_code == status
        assert not open.session.feedback


async def test_all_posts_together_have_a_bound(chat: Chat) -> None:
    async with scripted(chat, []) as (service, _), service.session() as open, httpx.AsyncClient() as client:
        url = f"{service.endpoint.report_url(open.session)}/feedback"
        statuses = [
            (await client.post(url, json={f"{post}/{one}": 1 for one in range(40)})).status_code for post in range(2)
        ]
        assert (statuses, len(open.session.feedback)) == ([200, 400], 40)


async def test_a_body_that_is_too_large_is_refused_in_the_form_of_its_path(
    chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_BODY", 5000)
    async with scripted(chat, []) as (service, _), service.session() as open, httpx.AsyncClient() as client:
        for path, kind in (("messages", "request_too_large"), ("responses", "invalid_request_error")):
            answer = await client.post(f"{open.base_url}/{path}", content=b"x" * 6000)
            assert (answer.status_code, answer.json()["error"]["type"]) == (413, kind)
