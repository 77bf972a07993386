"""HTTP tools from YAML against a real uvicorn, with what a hostile model writes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
import uvicorn
import yaml

from agentrl.errors import ConfigError
from agentrl.tool import ErrorKind
from agentrl.tool.session import ToolInfrastructureError
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import ToolAnswer
from tests.naming import naming

SECRET = "s3cr3t-t0ken/+x"
Call = Callable[..., Any]


class EchoServer:
    """Answers with what it was asked; `then` are statuses to answer before, one a request."""

    def __init__(self) -> None:
        self.then: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self.answer: tuple[bytes, str] | None = None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self._app, interface="asgi3", log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        said = {
            "method": scope["method"],
            "path": scope["path"],
            "query": parse_qsl(scope["query_string"].decode()),
            "headers": {key.decode(): value.decode("latin-1") for key, value in scope["headers"]},
            "body": body.decode(),
        }
        self.asked.append(said)
        status = self.then.pop(0) if self.then else 200
        text, kind = self.answer or (json.dumps(said).encode(), "application/json")
        headers = [(b"content-type", kind.encode()), (b"location", b"http://127.0.0.1:1/")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})


@pytest.fixture(scope="module")
def running() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.stop()


@pytest.fixture
def server(running: EchoServer) -> EchoServer:
    running.then, running.answer, running.asked = [], None, []
    return running


def load(
    folder: Path,
    config: dict[str, Any],
    properties: str = "city",
    required: list[str] | None = None,
    **keywords: object,
) -> ToolSet:
    """From a YAML file. `properties`: names of arguments, which may have any value; `keywords`: of the schema."""
    names = properties.split()
    parameters = {"type": "object", "properties": {name: {} for name in names}, "required": required or [], **keywords}
    schema = {"type": "function", "function": {"name": "ask", "description": "Ask.", "parameters": parameters}}
    entry = {"class_name": "tools.http_endpoint.HttpTool", "config": config, "tool_schema": schema}
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}, sort_keys=False))
    tools = ToolSet.from_yaml(folder / "tools.yaml", timeout=5.0, max_response_tokens=100_000)
    tools.bind(lambda text: [ord(character) for character in text], lambda ids: "".join(map(chr, ids)))
    return tools


@asynccontextmanager
async def asking(tools: ToolSet, **create_kwargs: Any) -> AsyncIterator[Call]:
    await tools.start("a-run")
    session = await tools.open("one", {"ask": {"create_kwargs": create_kwargs}} if create_kwargs else {})

    async def ask(**arguments: Any) -> ToolAnswer:
        return await session.call("ask", arguments)

    try:
        yield ask
    finally:
        await session.close()
        await tools.close()


async def test_every_part_of_a_request(tmp_path: Path, server: EchoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO_TOKEN", SECRET + "\n")
    config = {
        "method": "POST",
        "url": server.url + "/v1/{{ city }}/days?units=metric&lang={{lang}}",
        "query": {"q": "in {{ city }}, {{ n }}", "tenant": "{{ tenant }}"},
        "headers": {"X-City": "{{ city }}"},
        "body": {
            "city": "{{ city }}",
            "n": "{{ n }}",
            "list": ["{{ n }}", "{{ lang }}"],
            "fixed": 1.5,
            "of": "x{{ n }}",
        },
        "variables": {"tenant": None},
        "auth_env": "ECHO_TOKEN",
    }
    tools = load(tmp_path, config, "city n lang")
    async with asking(tools, tenant="acme & co") as ask:
        result = await ask(city="Köln ß", n=12345678901234567890)
    said = server.asked[-1]
    assert (said["method"], said["path"]) == ("POST", "/v1/Köln ß/days")
    assert said["query"] == [
        ("units", "metric"),
        ("q", "in Köln ß, 12345678901234567890"),
        ("tenant", "acme & co"),
    ]
    assert json.loads(said["body"]) == {
        "city": "Köln ß",
        "n": 12345678901234567890,
        "list": [12345678901234567890],
        "fixed": 1.5,
        "of": "x12345678901234567890",
    }
    assert said["headers"]["authorization"] == f"Bearer {SECRET}"
    assert said["headers"]["content-type"] == "application/json"
    assert said["headers"]["x-client-id"] == "a-run"
    assert 0 < int(said["headers"]["x-request-timeout-ms"]) <= 5000
    assert result.error is None
    assert SECRET not in result.text and "Bearer [secret]" in result.text


async def test_a_null_inside_a_text_leaves_out_its_key(tmp_path: Path, server: EchoServer) -> None:
    body = {"of": "x{{ n }}", "n": "{{ n }}", "both": ["{{ city }} {{ n }}", "{{ city }}"]}
    config = {"method": "POST", "url": server.url, "body": body, "query": {"q": "{{ n }}"}}
    async with asking(load(tmp_path, config, "city n")) as ask:
        await ask(city="Bo", n=None)
    assert json.loads(server.asked[-1]["body"]) == {"n": None, "both": ["Bo"]}
    assert server.asked[-1]["query"] == []


@pytest.mark.parametrize(
    ("method", "query", "body"),
    [("GET", [("city", "Bo & n"), ("n", '{"a": [true]}')], ""), ("PUT", [], '{"city": "Bo & n", "n": {"a": [true]}}')],
)
async def test_arguments_without_a_template(
    tmp_path: Path, server: EchoServer, method: str, query: list[tuple[str, str]], body: str
) -> None:
    async with asking(load(tmp_path, {"url": server.url, "method": method}, "city n other")) as ask:
        await ask(city="Bo & n", n={"a": [True]})
    assert (server.asked[-1]["query"], server.asked[-1]["body"]) == (query, body)


HOSTILE = {
    "../../admin": "path",
    "..": "path",
    ".": "path",
    "": "path",
    "a/../b": "path",
    "a\\..\\b": "path",
    "%2e%2e%2fadmin": "",
    "?admin=1": "",
    "a&admin=1": "",
    "a=b;c": "",
    "#x": "",
    "@evil.example": "",
    "//evil.example": "path",
    "http://evil.example/": "path",
    ":81": "",
    "a\r\nX-Admin: 1": "path header",
    "a\r\n\r\nGET /admin HTTP/1.1": "path header",
    "a\x00b": "path header",
    "a\u2028b": "header",
    "{{ tenant }}": "",
    "{{ self.__init__.__globals__ }}": "",
    "{% for x in y %}": "",
    "${HOME}": "",
    '","admin":true,"x":"': "",
    "\ud800": "path query header body form",
}
"""What a model may write, and the places where it is told that this cannot stand there."""


@pytest.mark.parametrize(("value", "refused"), HOSTILE.items())
async def test_hostile_arguments_stay_values(tmp_path: Path, server: EchoServer, value: str, refused: str) -> None:
    """Everywhere else the value arrives as it is, and the rest of the request as the YAML has it."""
    places: dict[str, dict[str, Any]] = {
        "path": {"url": server.url + "/of/{{ city }}/end?a=1"},
        "query": {"url": server.url + "/of?a=1", "query": {"q": "<{{ city }}>"}},
        "header": {"url": server.url + "/of?a=1", "headers": {"X-City": "<{{ city }}>"}},
        "body": {"url": server.url + "/of?a=1", "method": "POST", "body": {"city": "<{{ city }}>", "b": 1}},
        "form": {"url": server.url + "/of?a=1", "method": "POST", "form": {"city": "<{{ city }}>", "b": 1}},
    }
    for place, config in places.items():
        server.asked.clear()
        config = {**config, "variables": {"tenant": "acme"}}
        async with asking(load(tmp_path, config)) as ask:
            result = await ask(city=value)
        if place in refused.split():
            assert (result.error, server.asked) == (ErrorKind.ARGUMENTS, [])
            continue
        (said,) = server.asked
        assert said["path"] == (f"/of/{value}/end" if place == "path" else "/of")
        assert said["query"] == [("a", "1")] + ([("q", f"<{value}>")] if place == "query" else [])
        assert "x-admin" not in said["headers"]
        assert said["headers"]["host"] == server.url.removeprefix("http://")
        if place == "header":
            assert said["headers"]["x-city"].encode("latin-1").decode() == f"<{value}>"
        elif place == "body":
            assert json.loads(said["body"]) == {"city": f"<{value}>", "b": 1}
        elif place == "form":
            assert parse_qsl(said["body"]) == [("city", f"<{value}>"), ("b", "1")]


@pytest.mark.parametrize(
    ("path", "shown", "error"),
    [
        ("results.*.text", "one\ntwo", None),
        ("results.1", '{"text":"two"}', None),
        ("empty.*.text", "No results.", None),
        ("n", "3", None),
        ("results.7.text", "the answer has no results.7.text", ErrorKind.EXECUTION),
        ("n.text", "the answer has no n.text", ErrorKind.EXECUTION),
    ],
)
async def test_the_part_of_an_answer(
    tmp_path: Path, server: EchoServer, path: str, shown: str, error: ErrorKind | None
) -> None:
    document = {"results": [{"text": "one"}, {"text": "two"}], "empty": [], "n": 3}
    server.answer = json.dumps(document).encode(), "application/json"
    async with asking(load(tmp_path, {"url": server.url, "response_path": path})) as ask:
        result = await ask(city="x")
    assert result.error is error
    assert shown in result.text
    assert error is not None or result.text == shown


@pytest.mark.parametrize(
    ("body", "kind", "shown"),
    [
        ("plain ß".encode(), "text/plain", "plain ß"),
        ("plain ß".encode("latin-1"), "text/plain; charset=ISO-8859-1", "plain ß"),
        (b"\x89PNG\xff", "image/png", "(5 bytes that are no text: image/png)"),
        (b"", "text/plain", "(status 200, no content)"),
    ],
)
async def test_answers_that_are_no_json(tmp_path: Path, server: EchoServer, body: bytes, kind: str, shown: str) -> None:
    server.answer = body, kind
    async with asking(load(tmp_path, {"url": server.url})) as ask:
        assert (await ask(city="x")).text == shown


async def test_what_the_model_is_told_and_what_fails_the_trajectory(
    tmp_path: Path, server: EchoServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ECHO_TOKEN", SECRET)
    server.answer = json.dumps({"detail": f"no such city for {SECRET}"}).encode(), "application/json"
    tools = load(tmp_path, {"url": server.url, "auth_env": "ECHO_TOKEN"})
    async with asking(tools) as ask:
        server.then = [503, 500, 429]
        assert (await ask(city="x")).error is None  # a GET is asked again
        assert len(server.asked) == 4
        server.then = [404]
        told = await ask(city="x")
        assert (told.error, told.text) == (
            ErrorKind.EXECUTION,
            "Error (execution): status 404: no such city for [secret]",
        )
        for status in (302, 401, 403):
            server.then = [status]
            with pytest.raises(ToolInfrastructureError, match=rf"status {status}.*\[secret\]") as caught:
                await ask(city="x")
            error: BaseException | None = caught.value
            while error is not None:
                assert SECRET not in str(error)
                error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    assert SECRET not in caplog.text


async def test_no_part_of_a_credential_is_left_where_an_answer_is_cut(
    tmp_path: Path, server: EchoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model chooses the place of the cut by the length of an argument that the server echoes."""
    monkeypatch.setenv("ECHO_TOKEN", SECRET)
    refused = load(tmp_path, {"url": server.url, "auth_env": "ECHO_TOKEN"})
    no_json = load(tmp_path, {"url": server.url, "auth_env": "ECHO_TOKEN", "response_path": "a"})
    for tools, status, cut in ((refused, 404, 300), (no_json, 200, 200)):
        async with asking(tools) as ask:
            for shown in range(1, len(SECRET) + 1):
                server.then, server.answer = [status], (f"{'x' * (cut - shown)}{SECRET}".encode(), "text/plain")
                told = (await ask(city="x")).text
                assert SECRET[:4] not in told and "xxx" in told, told


async def test_a_post_is_not_repeated_unless_the_yaml_says_so(tmp_path: Path, server: EchoServer) -> None:
    for safe, requests in ((None, 1), (True, 2)):
        server.asked.clear()
        server.then = [500]
        config = {"url": server.url, "method": "POST", "safe": safe}
        async with asking(load(tmp_path, config)) as ask:
            if safe:
                assert (await ask(city="x")).error is None
            else:
                with pytest.raises(ToolInfrastructureError, match="status 500"):
                    await ask(city="x")
        assert len(server.asked) == requests


async def test_an_answer_that_is_too_long(tmp_path: Path, server: EchoServer) -> None:
    server.answer = b"x" * 100_001, "text/plain"
    async with asking(load(tmp_path, {"url": server.url, "max_answer_bytes": 100_000})) as ask:
        with pytest.raises(ToolInfrastructureError, match="longer than 100000 bytes"):
            await ask(city="x")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"url": "http://{{ city }}/"}, r"url: the host is fixed"),
        ({"url": "http://h{{ city }}:80/"}, r"url: the host is fixed"),
        ({"url": "http://h:port/"}, r"url: expected http://HOST/PATH.*found 'http://h:port/'"),
        ({"url": "{{ city }}"}, r"url: expected http://HOST"),
        ({"url": "http://me:pw@h/"}, r"url: credentials do not belong in a URL"),
        ({"url": "http://h/{{ town }}"}, r"\{\{ town \}\} is neither an argument"),
        ({"url": "http://h/{{ city"}, r"url: expected \{\{ name \}\}"),
        ({"url": "http://h/", "body": {"a": 1}}, r"body: .*GET none"),
        ({"url": "http://h/", "method": "POST", "body": {"a": 1}}, r"'city' is never sent"),
        ({"url": "http://h/", "variables": {"city": 1}}, r"variables: 'city' is an argument"),
        ({"url": "http://h/", "headers": {"Host": "x"}}, r"headers: 'Host' is set by the tool itself"),
        ({"url": "http://h/", "metod": "POST"}, r"unknown key 'metod'; did you mean 'method'"),
    ],
)
def test_a_yaml_that_cannot_be(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"tools.yaml: tools\[0\] .*{says}"):
        load(tmp_path, config)


async def test_credentials_that_are_not_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHO_TOKEN", raising=False)
    tools = load(tmp_path, {"url": "http://127.0.0.1:1/", "auth_env": "ECHO_TOKEN"})
    with naming(ConfigError, "ECHO_TOKEN"):
        await tools.start("a-run")


async def test_the_model_sets_no_variable_of_a_row(tmp_path: Path, server: EchoServer) -> None:
    """Also where the schema of the tool lets it give further arguments."""
    config = {"url": server.url + "/{{ tenant }}", "variables": {"tenant": "acme"}}
    async with asking(load(tmp_path, config, additionalProperties=True)) as ask:
        await ask(city="a", tenant="another")
    assert server.asked[-1]["path"] == "/acme"


async def test_a_row_that_names_no_variable(tmp_path: Path, server: EchoServer) -> None:
    tools = load(tmp_path, {"url": server.url + "/{{ tenant }}", "variables": {"tenant": "acme"}})
    with naming(Exception, "'tennant'", "`variables`"):
        async with asking(tools, tennant="x"):
            pass
    await tools.close()
