"""Search by a server that answers Search-R1's `POST /retrieve`: `python -m tools.retriever` or Search-R1's own."""

from __future__ import annotations

from typing import Any

import orjson
import pydantic

from agentrl.errors import ConfigError
from agentrl.remote import (
    FaultKind,
    RemoteOptions,
    RemoteRefused,
    RemoteTool,
    RemoteUnavailable,
    checked_url,
    how_to_start,
)
from agentrl.system.deadline import within
from agentrl.system.graphemes import beginning
from agentrl.tool import ToolArgumentsError, ToolError, ToolResponse, ToolSchema, parameters_of
from tools.documents import Document, Format, read_document, shown
from tools.search import SearchTool

REACHED_WITHIN = 15.0
"""Seconds that a server has to answer when a run starts."""
_BETWEEN = "\n---\n"
"""Separator between the answers to several queries of one call, as in verl's search tool."""
_NOTHING = "No documents found."


class RemoteSearchConfig(RemoteOptions):
    """Config of the remote search tool."""

    url: str
    """Server, e.g. http://127.0.0.1:8000, with or without /retrieve at its end."""
    topk: int = pydantic.Field(3, gt=0)
    """Documents a query, at most."""
    format: Format = "docs"
    """Layout. docs: `Doc 1(Title: ...) text`, one a line; plain: only the texts."""
    max_document_chars: int = pydantic.Field(2000, gt=0)
    """Characters of a text; a longer one is cut at a word, and ends in ` ...`."""
    max_queries: int = pydantic.Field(8, gt=0)
    """Queries of one call, where the schema has a `query_list`."""

    @pydantic.field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        checked_url(url)
        return url.rstrip("/").removesuffix("/retrieve")


class RemoteSearchTool(RemoteTool):
    """Tool `search(query)`, or where the schema has a `query_list` of texts instead, several queries in one call."""

    config_model = RemoteSearchConfig
    options: RemoteSearchConfig
    default_schema = SearchTool.default_schema

    def __init__(self, config: dict[str, Any] | None = None, schema: ToolSchema | None = None) -> None:
        """Find the schema's argument. Raises ConfigError when it has neither `query` nor `query_list`."""
        super().__init__(config, schema)
        properties = parameters_of(self.schema)
        self._argument = next((name for name in ("query", "query_list") if name in properties), "")
        if not self._argument:
            raise ConfigError(
                f"tool_schema of {self.name}: expected the parameter `query` (a text) or `query_list` (a list of "
                f"texts), found {', '.join(properties) or 'none'}"
            )

    async def start(self, run: str) -> None:
        """Search once. Raises ConfigError when no search server answers at `url`."""
        await super().start(run)
        options = self.options
        try:
            async with within(REACHED_WITHIN):
                await self._search(["test"])
        except (RemoteUnavailable, ToolError) as error:
            raise ConfigError(
                f"tool {self.name}: no search server answers at {options.url}: {error}; "
                + how_to_start("python -m tools.retriever serve INDEX", options.url)
            ) from error

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        options = self.options
        given = arguments[self._argument]
        wanted = given if isinstance(given, list) else [given]
        if not 0 < len(wanted) <= options.max_queries:
            raise ToolArgumentsError(f"expected 1 to {options.max_queries} queries, found {len(wanted)}")
        queries = [str(query).encode(errors="replace").decode() for query in wanted]  # half a surrogate is no text
        texts = []
        for documents in await self._search(queries):
            found = [_cut(document, options.max_document_chars) for document in documents]
            texts.append(shown(found, options.format) if found else _NOTHING)
        return ToolResponse(_BETWEEN.join(texts))

    async def _search(self, queries: list[str]) -> list[list[Document]]:
        """Find the documents by query. Raises ToolError when a query is at fault, RemoteUnavailable when the server
        is."""
        options = self.options
        # Scores are asked for because Search-R1's own server cannot answer without them.
        body = orjson.dumps({"queries": queries, "topk": options.topk, "return_scores": True})
        try:
            answer = await self.client.request("POST", f"{options.url}/retrieve", body=body, safe=True)
        except RemoteRefused as error:
            if error.status in (400, 413, 422):
                raise ToolError(f"the search service refused the query: {error.detail}") from error
            problem = f"{options.url}/retrieve: status {error.status}: {error.detail}"
            raise RemoteUnavailable(FaultKind.ANSWER, problem) from error
        return _documents(answer.body, len(queries))


def _documents(answer: bytes, queries: int) -> list[list[Document]]:
    """Parse an answer. Raises RemoteUnavailable when it is no answer to so many queries."""
    try:
        lists = orjson.loads(answer)["result"]
        if len(lists) != queries:
            raise ValueError(f"{len(lists)} lists for {queries} queries")
        return [[read_document(item.get("document", item)) for item in items] for items in lists]
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise RemoteUnavailable(
            FaultKind.ANSWER,
            f'the search service answered {answer[:80]!r}, expected {{"result": [[documents]]}} ({error})',
        ) from error


def _cut(document: Document, characters: int) -> Document:
    if len(document.text) <= characters:
        return document
    return Document(document.title, beginning(document.text, characters).rsplit(maxsplit=1)[0] + " ...")
