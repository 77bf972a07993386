"""Vectors of an index by faiss, compared by inner product, in a file that is mapped into memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from agentrl.errors import ConfigError, DataError, install_extra
from tools.retriever.embed import BATCH, Embedder, Vectors
from tools.retriever.lexical import Hit
from tools.retriever.store import Documents

try:
    import faiss
except ModuleNotFoundError as error:
    raise ConfigError(f"vectors need faiss: {install_extra('dense')}") from error

ALL_COMPARED = 20_000
"""Number of vectors up to which a query is compared with each, exactly; beyond, with its nearest cells', of one byte a
number."""
PROBED_CELLS = 32
_TRAINED_BY_CELL = 64
_TOGETHER = 16 * BATCH


def write_vectors(
    old: Path | None, new: Path, embedder: Embedder, documents: Documents, first: int, report: Callable[[int], None]
) -> None:
    """Write the vectors of `old` and those of the documents from row `first` on.

    `report` is called with the number of documents done.
    """
    count = len(documents) - first
    scratch = new.with_suffix(".scratch")
    dimensions = embedder.passages(["a"]).shape[1]
    vectors = np.memmap(scratch, dtype=np.float32, mode="w+", shape=(count, dimensions))
    for begin in range(0, count, _TOGETHER):
        rows = range(first + begin, min(first + begin + _TOGETHER, len(documents)))
        vectors[begin : begin + len(rows)] = embedder.passages([documents.contents(row) for row in rows])
        report(begin + len(rows))
    index = faiss.read_index(str(old)) if old else _empty(vectors)
    for begin in range(0, count, _TOGETHER):
        index.add(np.ascontiguousarray(vectors[begin : begin + _TOGETHER]))
    faiss.write_index(index, str(new))
    del vectors
    scratch.unlink()


def _empty(vectors: Vectors) -> faiss.Index:
    """Make an index of the kind that suits the number of vectors [texts, dimensions] float32."""
    count, dimensions = vectors.shape
    if count <= ALL_COMPARED:
        return faiss.IndexFlatIP(dimensions)
    cells = int(4 * count**0.5)
    index = faiss.index_factory(dimensions, f"IVF{cells},SQ8", faiss.METRIC_INNER_PRODUCT)
    chosen = np.random.default_rng(0).choice(count, min(count, _TRAINED_BY_CELL * cells), replace=False)
    index.train(np.ascontiguousarray(vectors[np.sort(chosen)]))
    return index


class DenseIndex:
    """Search over the vectors that `write_vectors` wrote."""

    def __init__(self, path: Path) -> None:
        """Map the file. Raises DataError, FileNotFoundError."""
        path.stat()
        try:
            self._index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise DataError(f"{path} cannot be read: {error}. Index the corpus anew") from error
        if hasattr(self._index, "nprobe"):
            self._index.nprobe = PROBED_CELLS

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, vectors: Vectors, topk: int) -> list[list[Hit]]:
        """Find the nearest documents of each query, nearest first; `vectors` [queries, dimensions] float32."""
        scores, rows = self._index.search(vectors, min(topk, len(self)))
        return [
            [Hit(int(row), float(score)) for score, row in zip(*line, strict=True) if row >= 0]
            for line in zip(scores, rows, strict=True)
        ]
