"""The retriever's server: its wire format, its limits, its processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")

from tests import framing
from tests.naming import assert_names, naming
from tests.tools.retriever_process import RetrieverProcess
from tests.virtual_time import virtual_time
from tests.waiting import wait_for
from tools.retriever import __main__ as command
from tools.retriever.batcher import Batcher, QueueFull
from tools.retriever.build import add, create
from tools.retriever.index import Index
from tools.retriever.server import CLIENT_HEADER, TIMEOUT_HEADER, Worker
from tools.retriever.settings import Settings

FACTS = [
    {"id": "0", "contents": '"Zed"\nThe code of Zed is 412.'},
    {"id": "1", "contents": '"Bo"\nThe code of "Bo" is 77.\nBo lives in Zürich.'},
    {"id": "2", "contents": "Nothing of note."},
]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("server")
    (folder / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in FACTS))
    create([folder / "facts.jsonl"], folder / "index")
    return folder / "index"


@pytest.fixture(scope="module")
def server(index: Path) -> Iterator[RetrieverProcess]:
    limits = ("--max-queries", "4", "--max-query-chars", "30", "--max-topk", "5", "--topk", "2")
    server = RetrieverProcess(index, *limits, "--workers", "2")
    yield server
    server.process.kill()


def post(server: RetrieverProcess, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}/retrieve", content=content, timeout=10, trust_env=False)


def test_answers_have_search_r1s_form(server: RetrieverProcess) -> None:
    """As its client sends (search_r1/llm_agent/generation.py) and its server answers."""
    answer = post(server, {"queries": ["code of Bo?", "quantum"], "topk": 3, "return_scores": True})
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()["result"]
    assert [[item["document"] for item in items] for items in found] == [[FACTS[1], FACTS[0], FACTS[2]], []]
    assert all(set(item) == {"document", "score"} for item in found[0])
    scores = [item["score"] for item in found[0]]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[1] > scores[2] > 0  # the third one has the word "of"


@pytest.mark.parametrize("more", [{}, {"topk": None}, {"topk": 2.0, "return_scores": False, "model": "e5"}])
def test_bare_documents_without_scores(server: RetrieverProcess, more: dict[str, Any]) -> None:
    assert post(server, {"queries": ["code of Bo?"], **more}).json() == {"result": [[FACTS[1], FACTS[0]]]}


def test_no_queries_and_empty_ones(server: RetrieverProcess) -> None:
    assert post(server, {"queries": []}).json() == {"result": []}
    assert post(server, {"queries": ["", "\x00", "🦓"]}).json() == {"result": [[], [], []]}


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"{", 422, "body: Invalid JSON"),
        (b'{"queries": ["\\ud800"]}', 422, "body: Invalid JSON"),
        ({}, 422, "queries: Field required"),
        ({"queries": "Bo"}, 422, "queries: Input should be a valid array"),
        ({"queries": ["Bo", 3]}, 422, "queries.1: Input should be a valid string"),
        ({"queries": ["Bo"], "topk": 0}, 422, "topk: Input should be greater than 0"),
        ({"queries": ["Bo"], "topk": 2**70}, 422, "topk: Input should be less than or equal to 5"),
        ({"queries": ["Bo"], "topk": "3"}, 422, "topk: Input should be a valid integer"),
        ({"queries": ["Bo"], "topk": True}, 422, "topk: Input should be a valid integer"),
        ({"queries": ["Bo"] * 5}, 422, "queries: List should have at most 4 items after validation, not 5"),
        ({"queries": ["Bo", "x" * 31]}, 422, "queries.1: String should have at most 30 characters"),
        (b"[" * 2000, 413, "expected a request of at most 1,760 bytes"),
    ],
)
def test_what_is_refused(server: RetrieverProcess, body: Any, status: int, says: str) -> None:
    answer = post(server, body)
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(says)


def test_no_framing_of_a_body_passes_the_limit(server: RetrieverProcess) -> None:
    framing.check(server.port, 1760, b"/retrieve")
    in_chunks = httpx.post(server.url + "/retrieve", content=iter([b'{"queries":', b'["x"]}']), trust_env=False)
    assert in_chunks.status_code == post(server, {"queries": ["x"]}).status_code == 200


def test_the_description_says_the_limits(server: RetrieverProcess) -> None:
    described = httpx.get(f"{server.url}/openapi.json", trust_env=False).json()["paths"]["/retrieve"]["post"]
    body = described["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert (body["queries"]["maxItems"], body["queries"]["items"]["maxLength"]) == (4, 30)
    assert {"type": "integer", "exclusiveMinimum": 0, "maximum": 5} in body["topk"]["anyOf"]
    assert {"200", "413", "422", "429"} <= set(described["responses"])


def test_a_worker_that_dies_is_replaced(server: RetrieverProcess) -> None:
    before = set(server.workers())
    assert len(before) == 2
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: len(set(server.workers()) - {killed}) == 2)
    for _ in range(20):
        assert post(server, {"queries": ["Bo"]}).status_code == 200


async def test_documents_that_are_added_are_found(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(index, tmp_path / "index")
    monkeypatch.setattr("tools.retriever.server.LOOK_EVERY", 0.05)
    app = Worker(Settings(index=tmp_path / "index")).app()
    async with app.router.lifespan_context(app), client_of(app) as client:
        (tmp_path / "more.jsonl").write_text('{"id": "3", "contents": "A quantum of solace"}\n')
        await asyncio.to_thread(add, [tmp_path / "more.jsonl"], tmp_path / "index")
        async with asyncio.timeout(10):
            while (await client.get("/health")).json()["generation"] == 0:
                await asyncio.sleep(0.02)
        assert (await client.get("/health")).json() == {
            "status": "ok",
            "mode": "lexical",
            "documents": 4,
            "generation": 1,
            "pending": 0,
        }
        answer = await client.post("/retrieve", json={"queries": ["quantum"]})
        assert answer.json() == {"result": [[{"id": "3", "contents": "A quantum of solace"}]]}


def client_of(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://retriever")


def held(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[str]]:
    """Searches wait for the event; the list has what was searched, in its order."""
    assert isinstance(worker.index, Index)
    gate, searched, search = threading.Event(), list[str](), worker.index.search

    def slow_search(query: str, topk: int) -> Any:
        searched.append(query)
        gate.wait()
        return search(query, topk)

    monkeypatch.setattr(worker.index, "search", slow_search)
    return gate, searched


async def test_a_full_queue_says_when_to_come_again(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(Settings(index=index, threads=1, max_queries=2, max_pending=3))
    gate, _ = held(worker, monkeypatch)
    app = worker.app()
    async with app.router.lifespan_context(app), client_of(app) as client:
        two = {"queries": ["Bo", "Zed"], "topk": 1}
        first = asyncio.create_task(client.post("/retrieve", json=two))
        while (await client.get("/health")).json()["pending"] < 2:
            await asyncio.sleep(0.01)
        refused = await client.post("/retrieve", json=two)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["detail"] == "2 queries are waiting; try again in 1 s"
        gate.set()
        assert (await first).json() == {"result": [[FACTS[1]], [FACTS[0]]]}
        assert (await client.post("/retrieve", json=two)).status_code == 200


async def test_what_a_client_that_has_gone_asked_is_not_searched(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.retriever.server.GONE_EVERY", 0.02)
    worker = Worker(Settings(index=index, threads=1))
    gate, searched = held(worker, monkeypatch)
    app = worker.app()
    messages = [{"type": "http.request", "body": b'{"queries": ["gone"]}'}, {"type": "http.disconnect"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None: ...

    async with app.router.lifespan_context(app), client_of(app) as client:
        first = asyncio.create_task(client.post("/retrieve", json={"queries": ["Bo"]}))
        while not searched:
            await asyncio.sleep(0.01)
        scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        gate.set()
        assert (await first).status_code == 200
        assert (await client.post("/retrieve", json={"queries": ["Zed"]})).status_code == 200
    assert searched == ["Bo", "Zed"]


async def test_clients_share_the_queue(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One with many queries waiting does not keep the others from theirs, and gives way in a full queue."""
    worker = Worker(Settings(index=index, threads=1, max_queries=8, max_pending=10))
    gate, searched = held(worker, monkeypatch)
    monkeypatch.setattr(worker._queue, "_most", 2)
    app = worker.app()
    async with app.router.lifespan_context(app), client_of(app) as http:

        async def ask(run: str, *queries: str) -> httpx.Response:
            return await http.post("/retrieve", json={"queries": queries}, headers={CLIENT_HEADER: run})

        async def waiting(queries: int) -> None:
            while (await http.get("/health")).json()["pending"] != queries:
                await asyncio.sleep(0.01)

        first = asyncio.create_task(ask("many", "m0", "m1"))
        await waiting(2)  # these two are being searched
        many = [asyncio.create_task(ask("many", f"m{2 * number}", f"m{2 * number + 1}")) for number in (1, 2, 3, 4)]
        await waiting(10)
        few = asyncio.create_task(ask("few", "f0", "f1"))
        refused = await many[-1]
        assert (refused.status_code, refused.json()["detail"]) == (429, "10 queries are waiting; try again in 1 s")
        assert (await ask("many", "m9")).status_code == 429
        other = asyncio.create_task(ask("other", "o0"))
        assert (await many[-2]).status_code == 429
        gate.set()
        answers = await asyncio.gather(first, *many[:-2], few, other)
        assert {answer.status_code for answer in answers} == {200}
    assert searched == ["m0", "m1", "m2", "f0", "o0", "m3", "f1", "m4", "m5"]


async def test_what_comes_too_late_is_not_searched(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(Settings(index=index, threads=1))
    gate, searched = held(worker, monkeypatch)
    app = worker.app()
    async with app.router.lifespan_context(app), client_of(app) as http:
        first = asyncio.create_task(http.post("/retrieve", json={"queries": ["Bo"]}, headers={TIMEOUT_HEADER: "60000"}))
        while not searched:
            await asyncio.sleep(0.01)
        late = await http.post("/retrieve", json={"queries": ["late"]}, headers={TIMEOUT_HEADER: "50"})
        assert (late.status_code, late.json()["detail"]) == (
            504,
            "not searched within the 0.05 s that x-request-timeout-ms gives",
        )
        gate.set()
        assert (await first).status_code == 200
        for wrong in ("soon", "-1", "1.5", "9" * 20):
            refused = await http.post("/retrieve", json={"queries": ["Bo"]}, headers={TIMEOUT_HEADER: wrong})
            assert refused.status_code == 422
            assert "x-request-timeout-ms: expected whole milliseconds, found" in refused.json()["detail"]
        assert (await http.post("/retrieve", json={"queries": ["Zed"]})).status_code == 200
    assert searched == ["Bo", "Zed"]


async def test_queries_are_searched_in_batches_and_answers_go_to_those_who_asked() -> None:
    sizes, gate = [], threading.Event()

    def double(numbers: Sequence[int]) -> list[int]:
        sizes.append(len(numbers))
        gate.wait()
        if 13 in numbers:
            raise ValueError("thirteen")
        return [2 * number for number in numbers]

    batcher = Batcher(double, threads=1, most=4, max_pending=100)
    batcher.start()
    asked = [asyncio.create_task(batcher.ask([number])) for number in (1, 2)]
    asked.append(asyncio.create_task(batcher.ask([3, 4, 5, 6, 7])))
    while not sizes:
        await asyncio.sleep(0.001)
    asked.append(asyncio.create_task(batcher.ask([8, 13])))
    given_up = asyncio.create_task(batcher.ask([9] * 10))
    await asyncio.sleep(0)
    given_up.cancel()
    gate.set()
    assert await asyncio.gather(*asked[:3]) == [[2], [4], [6, 8, 10, 12, 14]]
    with pytest.raises(ValueError, match="thirteen"):
        await asked[3]
    assert await batcher.ask([10]) == [20]
    assert sizes == [4, 4, 1, 1]  # what was given up costs nothing
    assert batcher.pending == 0
    await batcher.close()


async def test_native_code_that_panics_ends_only_what_asked() -> None:
    class FakePanic(BaseException):
        """As pyo3's, which is no Exception; tantivy raises it at a damaged file."""

    def panics(numbers: Sequence[int]) -> list[int]:
        if 13 in numbers:
            raise FakePanic("index out of bounds")
        return list(numbers)

    batcher = Batcher(panics, threads=1, most=4, max_pending=100)
    batcher.start()
    with naming(RuntimeError, "FakePanic"):
        await batcher.ask([13])
    assert await batcher.ask([1]) == [1]
    await batcher.close()


@virtual_time
async def test_a_window_gathers_queries_of_several_requests() -> None:
    sizes = []

    def same(numbers: Sequence[int]) -> list[int]:
        sizes.append(len(numbers))
        return list(numbers)

    batcher = Batcher(same, threads=1, most=4, max_pending=100, window=1.0)
    batcher.start()

    async def later(seconds: float, number: int) -> list[int]:
        await asyncio.sleep(seconds)
        return await batcher.ask([number])

    assert [*await asyncio.gather(later(0, 1), later(0.5, 2), later(0.9, 3))] == [[1], [2], [3]]
    assert (sizes, asyncio.get_running_loop().time()) == ([3], 1.0)
    await batcher.ask([1, 2, 3, 4])
    assert asyncio.get_running_loop().time() == 1.0  # a full batch waits for nobody
    await batcher.close()


async def test_the_queue_says_how_long_it_takes() -> None:
    def slowly(numbers: Sequence[int]) -> list[int]:
        time.sleep(0.1 * len(numbers))
        return list(numbers)

    batcher = Batcher(slowly, threads=1, most=1, max_pending=50)
    batcher.start()
    await batcher.ask([1, 2])
    full = asyncio.create_task(batcher.ask(list(range(50))))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as refused:
        await batcher.ask([1])
    assert 4 <= refused.value.retry_after <= 15, "5 s of work, on a machine that may be slow"
    full.cancel()
    await batcher.close()


def test_what_a_server_is_not_started_with(index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        assert command.main(["serve", *arguments]) == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = error(str(index), "--port", port, "--workers", "2")
    assert_names(said, "127.0.0.1 port", f"port {port}")
    assert_names(error(str(tmp_path)), "no index")
    assert_names(error(str(index), "--topk", "0"), "--topk")
    assert "more than max_topk" in error(str(index), "--topk", "101")


def test_no_worker_outlives_a_server_that_is_killed(server: RetrieverProcess) -> None:
    """The last test: the others' server is gone after it."""
    workers = server.workers()
    server.stop(signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{worker}/fd").exists() for worker in workers))
