"""Search over a local corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pytest

from agentrl.errors import DataError
from tools import search
from tools.documents import Document
from tools.search import Corpus, SearchTool, words

FACTS = [
    {"id": "0", "contents": '"Zed"\nThe code of Zed is 412.'},
    {"id": "1", "contents": '"Bo"\nThe code of Bo is 77.\nBo lives in Rome.'},
    {"id": "2", "title": "Rome", "text": "Rome is a city; its code is 5."},
    {"id": "3", "contents": "No title here, only a code."},
]


def write(path: Path, documents: list[Any]) -> str:
    path.write_text("\n".join(json.dumps(document) for document in documents) + "\n\n")
    return str(path)


async def ask(tool: SearchTool, query: str) -> str:
    return (await tool.execute("i", {"query": query})).text


async def test_documents_as_search_r1_shows_them(tmp_path: Path) -> None:
    tool = SearchTool({"corpus_path": write(tmp_path / "c.jsonl", FACTS), "topk": 2})
    assert await ask(tool, "Where does BO live? Rome?") == (
        "Doc 1(Title: Bo) The code of Bo is 77.\nBo lives in Rome.\nDoc 2(Title: Rome) Rome is a city; its code is 5."
    )
    assert await ask(tool, "only") == "Doc 1(Title: ) No title here, only a code."
    assert await ask(tool, "quantum ?!") == "No documents found."
    assert await ask(tool, "") == "No documents found."


async def test_plain_format(tmp_path: Path) -> None:
    tool = SearchTool({"corpus_path": write(tmp_path / "c.jsonl", FACTS), "topk": 1, "format": "plain"})
    assert await ask(tool, "code of zed") == "The code of Zed is 412."


async def test_equally_good_documents_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    documents = [{"contents": f"same words number{index}"} for index in range(50)]
    tool = SearchTool({"corpus_path": write(tmp_path / "c.jsonl", documents), "topk": 4, "format": "plain"})
    assert await ask(tool, "same words") == "\n".join(f"same words number{index}" for index in range(4))
    assert (await ask(tool, "number49 words")).startswith("same words number49\nsame words number0\n")


def test_ranking_is_bm25s_own() -> None:
    """Against bm25s' own retrieval (its tokenizer apart): the same best scores, whichever of equals comes first."""
    rng = np.random.default_rng(0)
    vocabulary = [f"w{index}" for index in range(300)]
    texts = [" ".join(rng.choice(vocabulary, 30)) for _ in range(400)]
    corpus = Corpus([Document("", text) for text in texts])
    reference = bm25s.BM25()
    reference.index([words(text) for text in texts], show_progress=False)
    for _ in range(50):
        query = " ".join(rng.choice(vocabulary, 5))
        ids, scores = reference.retrieve([words(query)], k=5, show_progress=False)
        every = reference.get_scores(words(query))
        found = [texts.index(document.text) for document in corpus.search(query, 5)]
        assert [every[index] for index in found] == list(scores[0])
        assert [every[index] for index in ids[0]] == list(scores[0])


async def test_a_large_corpus_is_searched_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "IN_LOOP_DOCUMENTS", 1)
    tool = SearchTool({"corpus_path": write(tmp_path / "c.jsonl", FACTS), "topk": 1, "format": "plain"})
    assert await ask(tool, "zed") == "The code of Zed is 412."


def test_one_index_a_file_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", FACTS)
    first, second = SearchTool({"corpus_path": path}), SearchTool({"corpus_path": path, "topk": 1})
    assert first.corpus is second.corpus
    write(tmp_path / "c.jsonl", FACTS[:2])
    assert len(SearchTool({"corpus_path": path}).corpus.documents) == 2


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 3: not JSON"),
        ('"text"', "line 3: expected .* found 'text'"),
        ('{"id": 1, "content": "x"}', r"line 3: expected .* found the keys \['content', 'id'\]"),
        ('{"contents": 3}', "line 3"),
        ('{"title": 3, "text": "x"}', "line 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(f'{{"contents": "a"}}\n\n{line}\n')
    with pytest.raises(DataError, match=f"c.jsonl {says}"):
        SearchTool({"corpus_path": str(path)})


@pytest.mark.parametrize("content", [b"", b'{"contents": "..."}\n', b'{"contents": "\xff"}'])
def test_a_corpus_without_words(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"c\.jsonl: "):
        SearchTool({"corpus_path": str(path)})
