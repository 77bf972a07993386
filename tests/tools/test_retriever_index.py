"""The index on disk: what is found, what is refused, and what an interrupted command leaves."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest

pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")

from agentrl.errors import ConfigError, DataError
from tests.naming import assert_names, naming
from tools.retriever import __main__ as command
from tools.retriever import lexical
from tools.retriever.build import add, create
from tools.retriever.index import Index
from tools.retriever.manifest import NAME, Manifest, read_manifest
from tools.retriever.words import Words

FACTS = [
    {"id": "zed", "contents": '"Zed"\nThe code of Zed is 412.'},
    {"id": 7, "title": "Bo", "text": "Bo lives in Rome.\nThe code is 77.", "url": "ignored"},
    {"contents": "Cities: Rome, Zürich, 東京"},
]


def write(path: Path, documents: Iterable[Any]) -> Path:
    path.write_text("\n".join(json.dumps(document) for document in documents) + "\n\n")
    return path


def ids(index: Index, query: str, topk: int = 10) -> list[str]:
    return [json.loads(index.documents[hit.row])["id"] for hit in index.search(query, topk)]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "lock")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    create([write(folder / "facts.jsonl", FACTS)], folder / "index")
    return folder / "index"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    write(tmp_path / "facts.jsonl", FACTS)
    shutil.copytree(made, tmp_path / "index")
    return tmp_path / "index"


def test_documents_are_stored_as_search_r1_has_them(made: Path) -> None:
    index = Index.open(made)
    assert [json.loads(line) for line in index.documents] == [
        {"id": "zed", "contents": '"Zed"\nThe code of Zed is 412.'},
        {"id": "7", "contents": '"Bo"\nBo lives in Rome.\nThe code is 77.'},
        {"id": "2", "contents": "Cities: Rome, Zürich, 東京"},
    ]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("ZED", ["zed"]),
        ("living rome?", ["7", "2"]),  # living, lives: one word
        ("zurich", ["2"]),
        ("Zu\u0308rich", ["2"]),  # the accent as a character of its own
        ("city", ["2"]),
        ("東京", ["2"]),
        ("412 77", ["zed", "7"]),
        ("quantum", []),
        (" ?! ", []),
        ("", []),
        ("x" * 100_000, []),
        ('" AND (title:zed) *', ["zed"]),  # no query language
    ],
)
def test_what_a_query_finds(made: Path, query: str, found: list[str]) -> None:
    assert ids(Index.open(made), query) == found


def test_words_kept_whole(tmp_path: Path) -> None:
    create([write(tmp_path / "facts.jsonl", FACTS)], tmp_path / "index", language="none")
    index = Index.open(tmp_path / "index")
    assert ids(index, "living lives") == ["7"]
    assert ids(index, "living") == []


def test_ranking_is_that_of_bm25(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The best documents and their order are bm25s'. Its scores differ: tantivy keeps lengths in one byte."""
    monkeypatch.setattr(lexical, "FREQUENT", 1.0)
    rng = np.random.default_rng(0)
    vocabulary = [f"w{index}" for index in range(300)]
    texts = [" ".join(rng.choice(vocabulary, 32)) for _ in range(500)]
    create([write(tmp_path / "c.jsonl", ({"contents": text} for text in texts))], tmp_path / "index", language="none")
    index = Index.open(tmp_path / "index")
    reference = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    reference.index([text.split() for text in texts], show_progress=False)
    for _ in range(30):
        words = [str(word) for word in rng.choice(vocabulary, 5, replace=False)]
        scores = reference.get_scores(words)
        hits = index.search(" ".join(words), 5)
        assert [scores[hit.row] for hit in hits] == pytest.approx(sorted(scores, reverse=True)[:5], rel=1e-5)


def test_frequent_words_are_searched_only_when_there_is_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lexical, "ALWAYS_SEARCHED", 5)
    texts = [f"the of and number{index}" for index in range(20)] + ["the of"]
    create([write(tmp_path / "c.jsonl", ({"contents": text} for text in texts))], tmp_path / "index")
    index = Index.open(tmp_path / "index")
    assert ids(index, "the number7 of and") == ["7"]
    assert len(index.search("and the of", 100)) == 21  # "and", and one of the others
    assert index.search("and", 2) == sorted(index.search("and", 2), key=lambda hit: (-hit.score, hit.row))


def test_a_long_query_costs_its_rarest_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexical, "MOST_WORDS", 2)
    texts = ["red", "red green", "red green blue"]
    create([write(tmp_path / "c.jsonl", ({"contents": text} for text in texts))], tmp_path / "index")
    assert ids(Index.open(tmp_path / "index"), "red green blue") == ["2", "1"]


def test_documents_are_added_while_the_index_is_open(folder: Path, tmp_path: Path) -> None:
    before = Index.open(folder)
    for number in range(3):
        zed = {"id": f"new {number}", "contents": f"Zed again {number}"}
        add([write(tmp_path / "more.jsonl", [zed])], folder)
    after = Index.open(folder)
    assert set(ids(after, "zed")) == {"zed", "new 0", "new 1", "new 2"}
    assert ids(before, "zed") == ["zed"]
    assert json.loads(before.documents[2])["id"] == "2"
    assert (before.generation, after.generation) == (0, 3)
    assert {path.split("/")[0] for path in files(folder)} == {
        *(f"documents-{part}.{kind}" for part in range(4) for kind in ("jsonl", "starts")),
        "lexical-3",
        NAME,
    }


def test_an_index_that_takes_the_place_of_another(folder: Path, tmp_path: Path) -> None:
    """What is served follows it, unless its queries would need another model."""
    index = Index.open(folder)
    assert index.newest() is index
    shutil.rmtree(folder)
    create([write(tmp_path / "other.jsonl", [{"contents": "Zed alone"}])], folder)
    other = index.newest()
    assert (ids(other, "zed"), other.generation) == (["0"], index.generation)
    assert ids(index, "zed") == ["zed"]
    manifest = json.loads((folder / NAME).read_text())
    index._manifest = Manifest.model_validate(
        {**manifest, "dense": {"name": "vectors-0", "embedding": {"model": "m"}, "probe": [1.0]}}
    )
    with naming(ConfigError, "vectors"):
        index.newest()


def test_compressed_corpora(tmp_path: Path) -> None:
    corpus = tmp_path / "c.jsonl.gz"
    corpus.write_bytes(gzip.compress(b'{"contents": "Zed"}\n'))
    create([corpus, write(tmp_path / "facts.jsonl", FACTS)], tmp_path / "index")
    assert ids(Index.open(tmp_path / "index"), "zed") == ["0", "zed"]
    corpus.write_bytes(corpus.read_bytes()[:-12])
    with naming(DataError, "c.jsonl.gz"):
        create([corpus], tmp_path / "other")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 3: not JSON"),
        ('{"id": 1, "content": "x"}', r"line 3: expected .* found the keys \['content', 'id'\]"),
        ('{"id": [1], "contents": "x"}', r"line 3: expected a text or a whole number as id, found \[1\]"),
        ('{"contents": "\\ud800"}', "line 3: not JSON"),
    ],
)
def test_a_bad_line_is_named_and_leaves_everything_as_it_was(
    folder: Path, tmp_path: Path, line: str, says: str
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(f'{{"contents": "Zed"}}\n\n{line}\n')
    before = files(folder)
    with pytest.raises(DataError, match=rf"bad\.jsonl {says}"):
        add([bad], folder)
    assert files(folder) == before
    with pytest.raises(DataError, match=rf"bad\.jsonl {says}"):
        create([bad], tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "facts.jsonl", "index"]


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    facts, empty = tmp_path / "facts.jsonl", write(tmp_path / "empty.jsonl", [])
    with naming(DataError, "empty.jsonl"):
        create([empty], tmp_path / "other")
    with pytest.raises(ConfigError, match="exists already"):
        create([facts], folder)
    with naming(ConfigError, "retriever.json"):
        add([facts], tmp_path)
    with naming(DataError, "none.jsonl"):
        create([tmp_path / "none.jsonl"], tmp_path / "other")
    with naming(ConfigError, "'klingon'"):
        create([facts], tmp_path / "other", language="klingon")


def test_words_of_another_version_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Words, "plain", staticmethod(str.upper))
    Index.open(folder)  # the same words: upper case makes no difference to them
    monkeypatch.setattr(Words, "plain", staticmethod(lambda text: text.replace("r", "l")))
    for use in (lambda: Index.open(folder), lambda: add([tmp_path / "facts.jsonl"], folder)):
        with naming(ConfigError, "tokenizer"):
            use()


def test_a_damaged_index_is_refused(folder: Path) -> None:
    text = (folder / NAME).read_text()
    (folder / NAME).write_text(text.replace('"format": 1', '"format": 2'))
    with naming(ConfigError, "retriever.json"):
        Index.open(folder)
    (folder / NAME).write_text(text)
    lines = folder / "documents-0.jsonl"
    os.truncate(lines, lines.stat().st_size - 1)
    with pytest.raises(DataError, match="documents-0 is damaged: expected 3 documents, found 3 in"):
        Index.open(folder)
    lines.unlink()
    with pytest.raises(DataError, match=r"documents-0\.jsonl is missing"):
        Index.open(folder)


@pytest.mark.parametrize("size", [0, 5, 100])
@pytest.mark.parametrize("name", ["documents-0.jsonl", "documents-0.starts", "lexical-0/meta.json", "lexical-0/*.idx"])
def test_a_file_that_ends_too_early(folder: Path, name: str, size: int) -> None:
    (path,) = folder.glob(name)
    os.truncate(path, min(size, path.stat().st_size - 1))
    with naming(DataError, "Index"):
        Index.open(folder)


def test_killed_while_adding(folder: Path, tmp_path: Path) -> None:
    """At any moment: the index is whole, and the next addition works."""
    corpus = write(tmp_path / "more.jsonl", ({"contents": f"Zed number{index}"} for index in range(30_000)))
    run = [sys.executable, "-m", "tools.retriever", "add", str(corpus), str(folder)]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = folder / "documents-1.jsonl"
    while process.poll() is None and not (lines.exists() and lines.stat().st_size):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert ids(Index.open(folder), "zed") == ["zed"]
    assert lines.exists()
    assert add([tmp_path / "facts.jsonl"], folder).documents == 6
    assert ids(Index.open(folder), "zed") == ["zed", "zed"]


def test_files_that_are_not_the_indexs_stay(folder: Path) -> None:
    """Also when it is one of them that is added."""
    more = write(folder / "more.jsonl", [{"contents": "Zed again"}])
    (folder / "documents.md").write_text("what this is")
    (folder / "documents-9.jsonl").write_text("of an addition that was killed")
    add([more], folder)
    assert set(ids(Index.open(folder), "zed")) == {"zed", "3"}
    assert more.exists()
    assert (folder / "documents.md").exists()
    assert not (folder / "documents-9.jsonl").exists()


def test_an_index_is_made_by_one_process_at_a_time(tmp_path: Path) -> None:
    corpus = write(tmp_path / "c.jsonl", ({"contents": f"Zed number{index}"} for index in range(20_000)))
    run = [sys.executable, "-m", "tools.retriever", "index", str(corpus), str(tmp_path / "index")]
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = tmp_path / ".index.partial" / "documents-0.jsonl"
    while not lines.exists():
        assert process.poll() is None
        time.sleep(0.001)
    with naming(ConfigError, "another process"):
        create([corpus], tmp_path / "index")
    assert process.wait() == 0
    assert len(Index.open(tmp_path / "index")) == 20_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.jsonl", "index"]


def test_places_where_no_index_can_be(folder: Path, tmp_path: Path) -> None:
    facts = tmp_path / "facts.jsonl"
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="exists already"):
        create([facts], tmp_path / "dangling")
    with naming(ConfigError, "facts.jsonl/index"):
        create([facts], facts / "index")
    (tmp_path / "link").symlink_to(folder)
    assert add([facts], tmp_path / "link").documents == 6
    assert ids(Index.open(folder), "zed") == ["zed", "zed"]


def test_two_additions_at_once(folder: Path, tmp_path: Path) -> None:
    from tools.retriever.manifest import LOCK, sole_writer

    with sole_writer(folder, folder / LOCK), naming(ConfigError, "another process"):
        add([tmp_path / "facts.jsonl"], folder)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts, out = str(write(tmp_path / "facts.jsonl", FACTS)), str(tmp_path / "index")
    assert command.main(["index", facts, facts, out, "--threads", "2"]) == 0
    assert command.main(["add", facts, out]) == 0
    captured = capsys.readouterr()
    assert_names(captured.out, out, "6 documents", "9 documents")
    assert "facts.jsonl" in captured.err
    assert "100 %" in captured.err
    assert command.main(["index", facts, out]) == 2
    assert capsys.readouterr().err.startswith(f"error: {out} exists already")
    assert read_manifest(Path(out)).documents == 9
