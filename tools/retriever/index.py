"""An index as opened for searching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.errors import DataError
from tools.retriever.embed import Embedder
from tools.retriever.fusion import fuse
from tools.retriever.lexical import Hit, LexicalIndex
from tools.retriever.manifest import Manifest, read_manifest
from tools.retriever.store import Documents
from tools.retriever.words import Words

if TYPE_CHECKING:
    from tools.retriever.dense import DenseIndex

Mode = Literal["lexical", "dense", "hybrid"]

FUSED = 50
"""Documents of each kind of search that a fused ranking is made of, at least."""
_ATTEMPTS = 5


class Index:
    """One generation of an index, mapped into memory: opening reads next to nothing."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """`embedder` is to be set before queries are compared by vectors: it stays when generations change.

        Raises ConfigError, DataError, FileNotFoundError when the generation was replaced meanwhile."""
        self.generation = manifest.generation
        self.documents = Documents(folder, manifest.parts)
        self.lexical = LexicalIndex(folder / manifest.lexical, Words.of(manifest.words))
        self.embedder: Embedder | None = None
        self.dense: DenseIndex | None = None
        if manifest.dense:
            from tools.retriever.dense import DenseIndex

            self.dense = DenseIndex(folder / manifest.dense.name)
        if len(self.lexical) != len(self.documents):
            raise DataError(
                f"index {folder} is damaged: {len(self.documents):,} documents, of which {len(self.lexical):,} can be "
                "searched. Index the corpus anew"
            )

    @classmethod
    def open(cls, folder: Path) -> Index:
        """The newest generation, also while documents are added. Raises ConfigError, DataError."""
        for attempt in range(_ATTEMPTS):
            manifest = read_manifest(folder)
            try:
                return cls(folder, manifest)
            except (FileNotFoundError, DataError) as error:
                if read_manifest(folder).generation != manifest.generation and attempt < _ATTEMPTS - 1:
                    continue  # replaced between the two reads
                if isinstance(error, DataError):
                    raise
                raise DataError(f"index {folder}: {error.filename} is missing. Index the corpus anew") from error
        raise AssertionError

    def search(self, query: str, topk: int) -> list[Hit]:
        """By words: the best `topk` documents at most, best first."""
        return self.lexical.search(query, topk)

    def search_all(self, queries: Sequence[tuple[str, int]], mode: Mode) -> Iterator[list[Hit]]:
        """For each query and its topk the best documents. The queries of a batch are embedded together.

        Raises RuntimeError when the mode needs vectors and there are none.
        """
        if mode == "lexical":
            for query, topk in queries:
                yield self.search(query, topk)
            return
        if self.dense is None or self.embedder is None:
            raise RuntimeError(f"{mode} search needs an index with vectors, and its embedder")
        vectors = self.embedder.queries([query for query, _ in queries])
        depth = max(topk for _, topk in queries)
        if mode == "hybrid":
            depth = max(FUSED, depth)
        for (query, topk), nearest in zip(queries, self.dense.search(vectors, depth), strict=True):
            yield nearest[:topk] if mode == "dense" else fuse([self.search(query, depth), nearest], topk)
