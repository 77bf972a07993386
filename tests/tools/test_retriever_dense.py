"""Vectors beside words: a real embedding model, faiss, and both rankings fused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")
pytest.importorskip("faiss", reason="the extra `dense` is not installed")

from agentrl.errors import ConfigError
from tests.naming import assert_names, naming
from tools.retriever import __main__ as command
from tools.retriever import dense
from tools.retriever.build import add, create
from tools.retriever.embed import Embedder, EmbeddingSpec
from tools.retriever.fusion import fuse
from tools.retriever.lexical import Hit
from tools.retriever.manifest import NAME, read_manifest
from tools.retriever.server import Worker
from tools.retriever.settings import Settings

TEXTS = [
    '"Canine"\nThe dog barked at the stranger all night.',
    '"Euro"\nThe currency of Germany and France.',
    '"Sourdough"\nBread is made of flour, water and salt.',
    '"BX-77"\nThe part number BX-77 fits older engines.',
]


@pytest.fixture(scope="module")
def embedder(embedding_model: Path) -> Embedder:
    return Embedder(EmbeddingSpec(model=str(embedding_model)))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, embedding_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    corpus = folder / "c.jsonl"
    corpus.write_text("".join(json.dumps({"contents": text}) + "\n" for text in TEXTS[:3]))
    assert command.main(["index", str(corpus), str(folder / "index"), "--embedding", str(embedding_model)]) == 0
    corpus.write_text(json.dumps({"contents": TEXTS[3]}) + "\n")
    add([corpus], folder / "index")
    return folder / "index"


async def ask(index: Path, mode: Any, *queries: str) -> list[list[str]]:
    app = Worker(Settings(index=index, mode=mode)).app()
    transport = httpx.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://r") as http:
        body = {"queries": list(queries), "topk": 2, "return_scores": True}
        result = (await http.post("/retrieve", json=body)).json()["result"]
        return [[item["document"]["contents"] for item in items] for items in result]


async def test_by_meaning_by_words_and_both(index: Path) -> None:
    baking, part = "how do I bake a loaf", "BX 77"
    assert await ask(index, "lexical", baking, part) == [[], [TEXTS[3]]]
    found = await ask(index, "dense", baking, "which animal made noise")
    assert [items[0] for items in found] == [TEXTS[2], TEXTS[0]]
    assert [items[0] for items in await ask(index, "auto", baking, part)] == [TEXTS[2], TEXTS[3]]


def test_vectors_do_not_depend_on_the_batch(embedder: Embedder) -> None:
    together = embedder.passages(TEXTS)
    alone = np.concatenate([embedder.passages([text]) for text in TEXTS])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


def test_vectors_are_the_models_own(embedder: Embedder) -> None:
    """As sentence-transformers 6.2.0, for which the model was published, computes them: each 64th number."""
    theirs = [
        [0.0124, 0.0902, 0.0838, 0.094, -0.0412, -0.0815],
        [0.033, -0.0101, -0.0626, -0.0217, 0.0498, -0.0031],
        [-0.0173, 0.0563, -0.0309, -0.0343, 0.0231, 0.0829],
        [-0.0632, -0.0568, -0.0222, 0.0624, 0.0093, 0.0459],
    ]
    assert embedder.dimensions == 384
    np.testing.assert_allclose(embedder.queries(TEXTS)[:, ::64], theirs, atol=1e-4)


def test_many_vectors_are_searched_by_cell(tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "ALL_COMPARED", 1)
    texts = [f"{noun} number {number}" for noun in ("dog", "bread", "coin", "engine") for number in range(40)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"contents": text}) + "\n" for text in texts))
    create([tmp_path / "c.jsonl"], tmp_path / "index", embedding=embedder.spec)
    spec = read_manifest(tmp_path / "index").dense
    assert spec is not None
    index = dense.DenseIndex(tmp_path / "index" / spec.name)
    vectors = embedder.passages(texts)
    found = [hits[0].row for hits in index.search(vectors[::10], 1)]
    assert found == list(range(0, 160, 10))


def test_ranks_are_fused() -> None:
    one = [Hit(7, 30.0), Hit(3, 20.0), Hit(5, 10.0)]
    other = [Hit(5, 0.9), Hit(7, 0.8), Hit(1, 0.7)]
    fused = fuse([one, other], 3)
    assert [hit.row for hit in fused] == [7, 5, 3]
    assert [hit.score for hit in fused] == pytest.approx([1 / 61 + 1 / 62, 1 / 63 + 1 / 61, 1 / 62])


def test_another_model_is_refused(index: Path, tmp_path: Path) -> None:
    manifest = json.loads((index / NAME).read_text())
    manifest["dense"]["probe"][0] += 0.05
    spec = type(read_manifest(index)).model_validate(manifest).dense
    assert spec is not None
    with naming(ConfigError, "index", "another"):
        spec.embedder()
    with naming(ConfigError, "`python -m data_prep.model minilm --out models/minilm`"):
        Embedder(EmbeddingSpec(model=str(tmp_path / "none")))


def test_vectors_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.jsonl").write_text('{"contents": "Zed"}\n')
    create([tmp_path / "c.jsonl"], tmp_path / "index")
    assert command.main(["serve", str(tmp_path / "index"), "--mode", "hybrid"]) == 2
    assert_names(capsys.readouterr().err, "--embedding", "MODEL")
