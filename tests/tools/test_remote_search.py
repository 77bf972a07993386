"""The search tool that speaks to a server, through the tool set, with a real server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl.tool import ToolSchema

pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")

from agentrl.errors import ConfigError
from agentrl.tool import ErrorKind
from agentrl.tool.session import ToolInfrastructureError
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import ToolAnswer
from tests.naming import naming
from tests.remote.conftest import Faulty, says
from tests.tools.retriever_process import RetrieverProcess
from tools.remote_search import RemoteSearchTool
from tools.retriever.build import create

Bind = Callable[[ToolSet], ToolSet]

FACTS = [
    {"contents": '"Zed"\nThe code of Zed is 412.'},
    {"contents": '"Bo"\nThe code of Bo is 77. ' + "Bo talks a lot. " * 30},
]


@asynccontextmanager
async def searching(tools: ToolSet) -> AsyncIterator[Callable[[str], Any]]:
    session = await tools.open("trajectory", {})

    async def search(query: str) -> ToolAnswer:
        return await session.call("search", {"query": query})

    try:
        yield search
    finally:
        await session.close()
        await tools.close()


def answer(*contents: str) -> web.Response:
    return web.json_response({"result": [[{"document": {"contents": text}, "score": 1.0} for text in contents]]})


async def test_a_server_that_is_restarted_is_not_noticed(tmp_path: Path, bound: Bind) -> None:
    """300 searches from the YAML's tool, the real server stopped and started meanwhile: all get their answer."""
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    create([tmp_path / "facts.jsonl"], tmp_path / "index")
    options = ("--max-query-chars", "100", "--workers", "1")
    server = RetrieverProcess(tmp_path / "index", *options)
    (tmp_path / "tools.yaml").write_text(
        "tools:\n"
        "  - class_name: tools.remote_search.RemoteSearchTool\n"
        f"    config: {{url: '{server.url}', topk: 1, max_document_chars: 60, on_error: fail, attempts: 60}}\n"
    )
    tools = bound(ToolSet.from_yaml(tmp_path / "tools.yaml"))
    try:
        async with searching(tools) as search:
            await tools.start("run")
            assert (await search("quantum")).text == "No documents found."
            assert tools.take_metrics()["tool/search/retries"] == 0
            refused = await search("x" * 101)
            assert (refused.error, refused.text) == (
                ErrorKind.REFUSED,
                "Error (execution): the search service refused the query: "
                "queries.0: String should have at most 100 characters",
            )
            ended = 0

            async def keep_searching(query: str) -> list[ToolAnswer]:
                nonlocal ended
                results = []
                for _ in range(10):
                    results.append(await search(query))
                    ended += 1
                    await asyncio.sleep(0.02)
                return results

            names = ["Zed", "Bo"] * 15
            work = asyncio.gather(*(keep_searching(f"code of {name}") for name in names))
            while ended < 60:
                await asyncio.sleep(0.001)
            await asyncio.to_thread(server.stop, signal.SIGKILL)
            server = await asyncio.to_thread(RetrieverProcess, tmp_path / "index", *options, port=server.port)
            every = await work
        told = {
            "Zed": "Doc 1(Title: Zed) The code of Zed is 412.",
            "Bo": "Doc 1(Title: Bo) The code of Bo is 77. Bo talks a lot. Bo talks a lot. Bo ...",
        }
        for name, results in zip(names, every, strict=True):
            assert {(result.text, result.error) for result in results} == {(told[name], None)}
        assert tools.take_metrics()["tool/search/retries"] >= 10
    finally:
        server.process.kill()


async def test_retries_are_for_what_may_pass(bound: Bind, faulty: Faulty) -> None:
    times: list[float] = []

    async def busy_then_broken_then_well(request: web.Request) -> web.Response:
        times.append(time.monotonic())
        assert await request.json() == {"queries": ["Zed"], "topk": 3, "return_scores": True}
        if len(times) == 1:
            return web.json_response({"detail": "full"}, status=429, headers={"Retry-After": "0.3"})
        if len(times) == 2:
            assert request.transport is not None
            request.transport.abort()
        if len(times) == 3:
            await asyncio.sleep(60)
        return answer("of no title", '"T"\nof one')

    url = (await faulty(busy_then_broken_then_well)).url
    tools = bound(ToolSet.from_tools([RemoteSearchTool({"url": f"{url}retrieve/", "attempt_timeout": 0.2})]))
    async with searching(tools) as search:
        found = await search("Zed")
        metrics = tools.take_metrics()
    assert found.text == "Doc 1(Title: ) of no title\nDoc 2(Title: T) of one"
    counted = {"retries": 3, "fault/overloaded": 1, "fault/broken": 1, "fault/timeout": 1}
    assert {name: metrics[f"tool/search/{name}"] for name in counted} == counted
    assert times[1] - times[0] >= 0.3


@pytest.mark.parametrize("on_error", ["tell", "fail"])
async def test_a_server_that_stays_away(bound: Bind, on_error: str, unused_port: int) -> None:
    config = {"url": f"http://127.0.0.1:{unused_port}", "timeout": 0.5, "on_error": on_error}
    tools = bound(ToolSet.from_tools([RemoteSearchTool(config)]))
    says = r"RemoteUnavailable: tool search: no connection .*Connect call failed"
    begun = time.monotonic()
    async with searching(tools) as search:
        if on_error == "fail":
            with pytest.raises(ToolInfrastructureError, match=says):
                await search("Zed")
        else:
            result = await search("Zed")
            assert result.error == ErrorKind.EXECUTION
            assert re.match(rf"Error \(execution\): {says}", result.text)
    assert time.monotonic() - begun < 3


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"<html>", 200, "expected {"),
        (b'{"result": []}', 200, "0 lists for 1 queries"),
        (b'{"result": [[{"document": {"text": 3}}]]}', 200, "expected {"),
        (b'{"result": [[3]]}', 200, "expected {"),
        (b"[" * 100_000, 200, "expected {"),
        (b"no such page", 404, "status 404: no such page"),
        (b" " * (17 << 20), 200, "the answer is longer than 16777216 bytes"),
    ],
)
async def test_an_answer_that_is_none(bound: Bind, faulty: Faulty, body: bytes, status: int, reason: str) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    server = await faulty(nonsense)
    async with searching(bound(ToolSet.from_tools([RemoteSearchTool({"url": server.url})]))) as search:
        with pytest.raises(ToolInfrastructureError, match=re.escape(reason)):
            await search("Zed")
    assert len(server.asked) == 1


QUERY_LIST: ToolSchema = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"query_list": {"type": "array", "items": {"type": "string"}}},
            "required": ["query_list"],
        },
    },
}


async def fake_search_r1_server(request: web.Request) -> web.Response:
    """As Search-R1's own server answers (search_r1/search/retrieval_server.py): documents as the corpus has them, under
    `document`; without scores it fails, because it unpacks two values. It has no other path, no /health either."""
    asked = await request.json()
    if not asked["return_scores"]:
        return web.Response(text="Internal Server Error", status=500)
    documents = [
        {"id": str(rank), "contents": f'"Title {rank}"\nabout {{}}.', "url": "x"} for rank in range(asked["topk"])
    ]
    lists = [
        [
            {"document": {**document, "contents": document["contents"].format(query)}, "score": 0.8}
            for document in documents
        ]
        for query in asked["queries"]
    ]
    return web.json_response({"result": lists})


async def test_search_r1s_own_server_and_several_queries_a_call(bound: Bind, faulty: Faulty) -> None:
    config = {"url": (await faulty(fake_search_r1_server)).url, "topk": 2, "max_queries": 3}
    tools = bound(ToolSet.from_tools([RemoteSearchTool(config, QUERY_LIST)]))
    await tools.start("run")
    async with searching(tools):
        session = await tools.open("another", {})

        async def call(*queries: Any) -> ToolAnswer:
            return await session.call("search", {"query_list": list(queries)})

        assert (await call("Bo", "Zed")).text == (
            "Doc 1(Title: Title 0) about Bo.\nDoc 2(Title: Title 1) about Bo.\n---\n"
            "Doc 1(Title: Title 0) about Zed.\nDoc 2(Title: Title 1) about Zed."
        )
        assert "about half ? a pair" in (await call("half \ud800 a pair")).text
        for queries in ([], ["a"] * 4):
            refused = await call(*queries)
            assert refused.error == ErrorKind.ARGUMENTS
            assert "expected 1 to 3 queries" in refused.text


async def test_nothing_to_search_with_ends_the_run_at_its_start(
    unused_port: int, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.remote_search.REACHED_WITHIN", 0.5)
    other = (await faulty(says(404, '{"detail": "Not Found"}'))).url
    for url, said in ((f"http://127.0.0.1:{unused_port}", "no connection"), (other, "status 404")):
        tools = ToolSet.from_tools([RemoteSearchTool({"url": url})])
        with naming(ConfigError, said, "tools.retriever"):
            await tools.start("run")
        await tools.close()


async def test_bare_documents_and_passages_of_other_servers(bound: Bind, faulty: Faulty) -> None:
    async def bare(request: web.Request) -> web.Response:
        return web.json_response({"result": [[{"id": 1, "title": "T", "text": "one"}, {"contents": '"U"\ntwo'}]]})

    tools = bound(ToolSet.from_tools([RemoteSearchTool({"url": (await faulty(bare)).url, "format": "plain"})]))
    async with searching(tools) as search:
        assert (await search("Zed")).text == "one\ntwo"


def test_our_own_yaml() -> None:
    assert ToolSet.from_yaml("tools/remote_search.yaml").names == ["search"]
