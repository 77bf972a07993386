"""The retriever in front of Milvus: Milvus Lite's server as a process, by the client that a cluster has too."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")
pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
pytest.importorskip("milvus_lite", reason="Milvus Lite is not installed")

from agentrl.errors import ConfigError, DataError
from tests.naming import assert_names, naming
from tests.tools.retriever_process import RetrieverProcess
from tests.waiting import wait_for
from tools.retriever import __main__ as command
from tools.retriever.build import load
from tools.retriever.milvus import EngineUnavailable, MilvusIndex

FACTS: list[dict[str, Any]] = [
    {"id": "zed", "contents": '"Zed"\nThe code of Zed is 412.'},
    {"id": 7, "title": "Bo", "text": "Bo lives in Rome, the code is 77."},
    {"contents": '"Sourdough"\nBread is made of flour, water and salt.'},
]


class Milvus:
    """`milvus-lite server`, which is killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        run = [sys.executable, "-m", "milvus_lite", "server", "--data-dir", str(self.folder), "--host", "127.0.0.1"]
        self.process = subprocess.Popen([*run, "--port", str(self.port)], stdout=subprocess.DEVNULL)
        wait_for(self.listens, 60)

    def listens(self) -> bool:
        assert self.process.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def milvus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Milvus]:
    milvus = Milvus(tmp_path_factory.mktemp("milvus"))
    yield milvus
    milvus.kill()


def write(path: Path, *documents: Any) -> Path:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    return path


def spec(path: Path, url: str, collection: str, **more: Any) -> Path:
    path.write_text(json.dumps({"uri": url, "collection": collection, **more}))  # JSON is YAML
    return path


def found(index: MilvusIndex, mode: Any, *queries: str, topk: int = 3) -> list[list[str]]:
    answers = index.find([(query, topk) for query in queries], mode)
    return [[json.loads(item.document)["id"] for item in items] for items in answers]


def test_served_while_milvus_is_killed_and_started_again(milvus: Milvus, tmp_path: Path) -> None:
    wiki, corpus = spec(tmp_path / "wiki.yaml", milvus.url, "wiki"), write(tmp_path / "c.jsonl", *FACTS)
    assert command.main(["index", str(corpus), str(wiki)]) == 0
    server = RetrieverProcess(wiki)
    try:
        assert "wiki.yaml: 3 documents, lexical search" in server.line

        def ask(*queries: str, **more: Any) -> httpx.Response:
            return httpx.post(f"{server.url}/retrieve", json={"queries": queries, **more}, timeout=30, trust_env=False)

        scored = ask("code of Bo", "quantum", " ?! ", "", topk=2, return_scores=True).json()["result"]
        assert [[item["document"]["id"] for item in items] for items in scored] == [["7", "zed"], [], [], []]
        assert scored[0][0]["document"] == {"id": "7", "contents": '"Bo"\nBo lives in Rome, the code is 77.'}
        assert scored[0][0]["score"] > scored[0][1]["score"] > 0
        assert ask("flour", topk=1).json() == {"result": [[{"id": "2", **FACTS[2]}]]}

        milvus.kill()
        refused = ask("Zed")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert f"wiki.yaml: Milvus at {milvus.url}: " in refused.json()["detail"]
        wait_for(lambda: not server.answers("/health"))
        milvus.start()
        wait_for(lambda: ask("Zed").status_code == 200)
        assert ask("Zed").json() == {"result": [[FACTS[0]]]}
        assert command.main(["add", str(write(tmp_path / "more.jsonl", {"contents": "Zed again"})), str(wiki)]) == 0
        wait_for(lambda: httpx.get(f"{server.url}/health", trust_env=False).json().get("documents") == 4)
        server.stop()
    finally:
        server.process.kill()


def test_vectors_and_both(milvus: Milvus, tmp_path: Path, embedding_model: Path) -> None:
    embedding = {"model": str(embedding_model)}
    both = spec(tmp_path / "both.yaml", milvus.url, "both", vector="vector", embedding=embedding)
    load([write(tmp_path / "c.jsonl", *FACTS)], both, new=True)
    index = MilvusIndex.open(both)
    index.load_embedder()
    assert index.modes[0] == "hybrid"
    assert found(index, "lexical", "how to bake a loaf", "Zed") == [[], ["zed"]]
    assert [ids[0] for ids in found(index, "dense", "how to bake a loaf", "which city")] == ["2", "7"]
    assert [ids[0] for ids in found(index, "hybrid", "how to bake a loaf", "412")] == ["2", "zed"]
    assert found(index, "dense", "", topk=1) == [[]]


def test_what_is_refused(milvus: Milvus, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write(tmp_path / "c.jsonl", *FACTS)
    facts = spec(tmp_path / "facts.yaml", milvus.url, "facts")
    with naming(ConfigError, "facts.yaml", "has no"):
        load([corpus], facts, new=False)
    with naming(DataError, "no document"):
        load([write(tmp_path / "empty.jsonl")], facts, new=True)
    with naming(DataError, "65,535 bytes"):
        load([write(tmp_path / "long.jsonl", {"contents": "a"}, {"contents": "ü" * 40_000})], facts, new=True)
    load([corpus], facts, new=True)  # what failed has left no collection
    with naming(ConfigError, "facts", "already"):
        load([corpus], facts, new=True)
    with naming(ConfigError, "contents:", "field 'text'", "row, id, contents"):
        MilvusIndex.open(spec(tmp_path / "other.yaml", milvus.url, "facts", contents="text"))
    assert command.main(["serve", str(facts), "--mode", "dense"]) == 2
    assert_names(capsys.readouterr().err, "lexical")
    assert command.main(["add", str(corpus), str(facts), "--threads", "2"]) == 2
    assert_names(capsys.readouterr().err, "--threads", "Milvus", "no effect")


def test_nothing_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(EngineUnavailable, match=rf"none\.yaml: Milvus at {url}: Fail connecting"):
        MilvusIndex.open(spec(tmp_path / "none.yaml", url, "none"))
    assert time.monotonic() - begun < 15


def test_a_server_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.retriever.milvus.TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(EngineUnavailable, match=rf"none\.yaml: Milvus at {url}: "):
            MilvusIndex.open(spec(tmp_path / "none.yaml", url, "none"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("uri: 127.0.0.1:19530\ncollection: c", "uri: String should match pattern"),
        ("uri: http://root:secret@127.0.0.1\ncollection: c", "uri: String should match pattern"),
        ("uri: http://a\ncollection: c\ncolour: red", "colour: Extra inputs are not permitted"),
        ("uri: http://a\ncollection: c\nvector: v", "vector and embedding go together"),
        ("uri: http://a\ncollection: c\nwords: null", "give the field of the words, of the vectors, or both"),
        ("uri: http://a\ncollection: c\ntoken_variable: NOT_SET", "NOT_SET is not set in the environment"),
        ("[", "cannot be read"),
    ],
)
def test_a_file_that_names_no_collection(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "wiki.yaml").write_text(text)
    with pytest.raises(ConfigError, match=rf"wiki\.yaml.*{says}"):
        MilvusIndex.open(tmp_path / "wiki.yaml")
