"""An index as opened for searching."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import DataError
from tools.retriever.lexical import Hit, LexicalIndex
from tools.retriever.manifest import Manifest, read_manifest
from tools.retriever.store import Documents
from tools.retriever.words import Words

_ATTEMPTS = 5


class Index:
    """One generation of an index, mapped into memory: opening reads next to nothing."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises ConfigError, DataError, FileNotFoundError when the generation was replaced meanwhile."""
        self.generation = manifest.generation
        self.documents = Documents(folder, manifest.parts)
        self.lexical = LexicalIndex(folder / manifest.lexical, Words.of(manifest.words))
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
        """The best `topk` documents at most, best first."""
        return self.lexical.search(query, topk)
