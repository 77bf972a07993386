"""Documents as corpora hold them, one JSON object a line, and as the model sees them (Search-R1, arXiv:2503.09516)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import orjson

from agentrl.errors import DataError

Format = Literal["docs", "plain"]
"""Layout of found documents. docs: `Doc 1(Title: ...) text`, one a line; plain: only the texts."""


@dataclass(frozen=True, slots=True)
class Document:
    """One document. `title` is empty when it has none."""

    title: str
    text: str

    @classmethod
    def from_contents(cls, contents: str) -> Document:
        """Split `"Title"\\ntext`; contents of one line are all text."""
        title, _, text = contents.partition("\n")
        return cls(title.strip().strip('"'), text.strip()) if text.strip() else cls("", title.strip())


def shown(documents: Iterable[Document], style: Format) -> str:
    """Write documents as the model reads them."""
    if style == "plain":
        return "\n".join(document.text for document in documents)
    lines = (f"Doc {rank}(Title: {document.title}) {document.text}" for rank, document in enumerate(documents, 1))
    return "\n".join(lines)


def read_line(line: bytes | str, where: str) -> tuple[str | None, str]:
    """Read a corpus line: its id, if it has one, and its contents (`"Title"\\ntext`).

    {"contents": text} is taken as it is, {"title": text, "text": text} becomes it; other keys are ignored. Raises
    DataError, in which `where` names the line.
    """
    try:
        item = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}; each line must be one JSON object") from error
    try:
        name, contents = _parts(item)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    return name, contents


def read_document(item: object) -> Document:
    """Read a document that a server answered with. Raises ValueError."""
    return Document.from_contents(_parts(item)[1])


def _parts(item: object) -> tuple[str | None, str]:
    """Read id and contents of a JSON object. Raises ValueError."""
    if isinstance(item, dict):
        name = item.get("id")
        if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
            raise ValueError(f"expected a text or a whole number as id, found {name!r:.80}")
        identity = None if name is None else str(name)
        if isinstance(item.get("contents"), str):
            return identity, item["contents"]
        title = item.get("title") or ""
        if isinstance(item.get("text"), str) and isinstance(title, str):
            return identity, f'"{title}"\n{item["text"]}'
    found = f"the keys {sorted(item)}" if isinstance(item, dict) else repr(item)[:80]
    raise ValueError(f'expected {{"contents": text}} or {{"title": text, "text": text}}, found {found}')
