"""Search interface of a server, and an index on this machine's disk as opened for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from agentrl.errors import ConfigError, DataError
from tools.retriever.embed import Embedder, EmbeddingSpec
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

Query = tuple[str, int]
"""Text of a query, and how many documents are wanted at most."""


@dataclass(frozen=True, slots=True)
class Found:
    """Document found. `document`: `{"id": ..., "contents": ...}` as JSON.

    `score`: higher is better; its scale is the method's own.
    """

    document: bytes
    score: float


class Searchable(Protocol):
    """Documents that a server searches: `Index`, or a collection of an engine."""

    modes: Sequence[Mode]
    """Ways in which it can be searched, the best one first."""
    generation: int
    """Number of additions, where they are counted."""

    def __len__(self) -> int:
        """Number of documents."""

    def load_embedder(self) -> None:
        """Load the model that `dense` and `hybrid` search need. Raises ConfigError."""

    def newest(self) -> Searchable:
        """Return itself, or what has taken its place. Raises UserError."""

    def find(self, queries: Sequence[Query], mode: Mode) -> Iterator[list[Found]]:
        """Find for each query the best documents, best first. Called in several threads where `mode` is lexical."""


class Index:
    """One generation of an index, mapped into memory: opening reads next to nothing."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Map the files. Raises ConfigError, DataError, FileNotFoundError when the generation was replaced
        meanwhile."""
        self._folder, self._manifest = folder, manifest
        self.generation = manifest.generation
        self.modes: Sequence[Mode] = ("hybrid", "lexical", "dense") if manifest.dense else ("lexical",)
        self.documents = Documents(folder, manifest.parts)
        self.lexical = LexicalIndex(folder / manifest.lexical, Words.from_spec(manifest.words))
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
        """Open the newest generation, also while documents are added. Raises ConfigError, DataError."""
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

    def __len__(self) -> int:
        return len(self.documents)

    def load_embedder(self) -> None:
        assert self._manifest.dense is not None
        self.embedder = self._manifest.dense.embedder()

    def newest(self) -> Index:
        if read_manifest(self._folder) == self._manifest:
            return self
        index = Index.open(self._folder)
        if index._vectors != self._vectors:
            raise ConfigError(f"{self._folder} is another index now, with other vectors: start the server again")
        index.embedder = self.embedder
        return index

    @property
    def _vectors(self) -> tuple[EmbeddingSpec, list[float]] | None:
        """Model and probe of the vectors; None without any."""
        dense = self._manifest.dense
        return (dense.embedding, dense.probe) if dense else None

    def find(self, queries: Sequence[Query], mode: Mode) -> Iterator[list[Found]]:
        for hits in self.search_all(queries, mode):
            yield [Found(self.documents[hit.row], hit.score) for hit in hits]

    def search(self, query: str, topk: int) -> list[Hit]:
        """Search by words: the best `topk` documents at most, best first."""
        return self.lexical.search(query, topk)

    def search_all(self, queries: Sequence[Query], mode: Mode) -> Iterator[list[Hit]]:
        """Find for each query and its topk the best documents. The queries of a batch are embedded together.

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
