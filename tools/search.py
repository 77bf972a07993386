"""Search over a local corpus by BM25 (arXiv:2407.03618), answered as the Search-R1 retriever's clients show it."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import pydantic

from agentrl.errors import ConfigError, DataError
from agentrl.system.threads import DaemonThreads
from agentrl.tool import Tool, ToolResponse, ToolSchema
from tools.documents import Document, Format, read_line, shown

IN_LOOP_DOCUMENTS = 5000
"""Number of documents up to which a query takes less than starting a thread for it."""

_WORD = re.compile(r"\w+")


class SearchConfig(pydantic.BaseModel):
    """Config of the search tool."""

    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)

    corpus_path: str
    """JSONL, one document a line: {"contents": "Title\\ntext"} or {"title": ..., "text": ...}; other keys are ignored.
    Relative to the working directory; `${yaml_dir}` is the directory of the YAML file."""
    topk: int = pydantic.Field(3, gt=0)
    """Documents an answer, at most: those that share no word with the query are left out."""
    format: Format = "docs"
    """Layout. docs: `Doc 1(Title: ...) text`, one a line; plain: only the texts."""


class SearchTool(Tool):
    """Tool `search(query)`. The index is made once a process and file, and shared."""

    config_model = SearchConfig
    options: SearchConfig
    default_schema = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the documents.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "description": "What to look for, in a few words."}},
                "required": ["query"],
            },
        },
    }

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        """Load the corpus. Raises ConfigError when there is no such file, DataError naming the line of a bad
        document."""
        super().__init__(config, schema)
        options = self.options
        self.corpus = load_corpus(Path(options.corpus_path))
        self._topk = options.topk
        self._format = options.format
        self._threads = DaemonThreads(f"tool {self.name}")

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        query = str(arguments["query"])
        if len(self.corpus.documents) <= IN_LOOP_DOCUMENTS:
            found = self.corpus.search(query, self._topk)
        else:
            found = await self._threads.run(self.corpus.search, query, self._topk)
        if not found:
            return ToolResponse("No documents found.")
        return ToolResponse(shown(found, self._format))


class Corpus:
    """Documents and their BM25 index."""

    def __init__(self, documents: list[Document]) -> None:
        self.documents = documents
        self._index = bm25s.BM25()
        self._index.index([words(f"{doc.title} {doc.text}") for doc in documents], show_progress=False)

    def search(self, query: str, topk: int) -> list[Document]:
        """Find the best `topk` documents that share a word with the query; of equally good ones the earlier comes
        first."""
        known = [word for word in words(query) if word in self._index.vocab_dict]
        if not known:
            return []
        scores = self._index.get_scores(known)  # [number of documents] float32
        least = np.partition(scores, -topk)[-topk] if topk < scores.size else 0.0
        candidates = np.flatnonzero((scores >= least) & (scores > 0))
        best = candidates[np.argsort(-scores[candidates], kind="stable")][:topk]
        return [self.documents[index] for index in best]


def words(text: str) -> list[str]:
    """Split into lower-case runs of letters and digits, the same for documents and queries."""
    return _WORD.findall(text.lower())


_corpora: dict[tuple[str, int, int], Corpus] = {}
_loading = threading.Lock()


def load_corpus(path: Path) -> Corpus:
    """Return the index of a file, made once as long as the file does not change. Raises ConfigError, DataError."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"corpus_path: cannot read {path.absolute()}: {error.strerror}") from error
    with _loading:
        key = (str(path.resolve()), stat.st_mtime_ns, stat.st_size)
        if key not in _corpora:
            _corpora[key] = Corpus(read_documents(path))
        return _corpora[key]


def read_documents(path: Path) -> list[Document]:
    """Read a corpus file. Raises DataError naming file and line; empty lines are skipped."""
    documents = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    _, contents = read_line(line, f"{path} line {number}")
                    documents.append(Document.from_contents(contents))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"corpus {path}: cannot be read as UTF-8 text: {error}") from error
    if not any(words(f"{document.title} {document.text}") for document in documents):
        raise DataError(f"corpus {path}: there is no document with a word in it")
    return documents
