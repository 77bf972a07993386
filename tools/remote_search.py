"""Search by a server that answers Search-R1's `POST /retrieve`: ours (`python -m tools.retriever`) or its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pydantic

from agentrl.http import http_client
from agentrl.tool import Tool, ToolError, ToolResponse
from tools.documents import Document, Format, read_document, shown
from tools.search import SearchTool

_AGAIN = frozenset({429, 500, 502, 503, 504})
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds before another attempt; each pause is twice the one before, and up to a half longer by chance, so that the
searches that failed together do not come again together."""
_MOST_DETAIL = 300


class SearchUnavailable(RuntimeError):
    """No fault of the query. With `on_error: fail` it fails the trajectory, which is then tried again."""


class RemoteSearchConfig(pydantic.BaseModel):
    """The remote search tool's own keys."""

    model_config = pydantic.ConfigDict(extra="forbid", use_attribute_docstrings=True)

    url: str
    """The server, e.g. http://127.0.0.1:8000, with or without /retrieve at its end."""
    topk: int = pydantic.Field(3, gt=0)
    """Documents an answer, at most."""
    format: Format = "docs"
    """docs: `Doc 1(Title: ...) text`, one a line; plain: only the texts."""
    max_document_chars: int = pydantic.Field(2000, gt=0)
    """A longer text is cut at a word, and ends in ` ...`."""
    deadline: float = pydantic.Field(25.0, gt=0)
    """Seconds for everything, with retries and the pauses between them. Should be below `timeout`."""
    attempt_timeout: float = pydantic.Field(10.0, gt=0)
    """Seconds after which one request is given up and another made."""
    attempts: int = pydantic.Field(8, gt=0)
    """Requests a search, at most."""

    @pydantic.field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://HOST:PORT, found {url!r}")
        return url.rstrip("/").removesuffix("/retrieve") + "/retrieve"


class RemoteSearchTool(Tool):
    """`search(query)`. One pool of connections for all trajectories."""

    config_model = RemoteSearchConfig
    default_schema = SearchTool.default_schema

    def __init__(self, config: dict[str, Any] | None = None, schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, schema)
        self._connections: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def execute(self, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        options: RemoteSearchConfig = self.options
        # Scores are asked for because Search-R1's own server cannot answer without them.
        asked = {"queries": [str(arguments["query"])], "topk": options.topk, "return_scores": True}
        answer, retries = await self._ask(orjson.dumps(asked))
        found = [_cut(document, options.max_document_chars) for document in _documents(answer)]
        text = shown(found, options.format) if found else "No documents found."
        return ToolResponse(text, metrics={"tool/retries": float(retries)})

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()

    async def _ask(self, body: bytes) -> tuple[bytes, int]:
        """The answer, and how often it was asked for again. Searching changes nothing, so that it may be repeated.

        Raises ToolError when the query is at fault, SearchUnavailable when the server is.
        """
        options: RemoteSearchConfig = self.options
        problem, made = "no answer", 0
        try:
            async with asyncio.timeout(options.deadline):
                while True:
                    made += 1
                    try:
                        return await self._post(body), made - 1
                    except _Again as error:
                        problem = str(error)
                        if made == options.attempts:
                            raise
                        await asyncio.sleep(_pause(made, error.seconds))
        except (TimeoutError, _Again) as error:
            times = f"{made} attempt{'s' * (made > 1)}"
            raise SearchUnavailable(f"the search service gave no answer ({times}; {problem})") from error

    async def _post(self, body: bytes) -> bytes:
        options: RemoteSearchConfig = self.options
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        try:
            async with (
                asyncio.timeout(options.attempt_timeout),
                self._session().post(options.url, data=body, headers=headers) as response,
            ):
                content = await response.read()
        except TimeoutError as error:
            raise _Again(f"it took longer than {options.attempt_timeout:g} s") from error
        except aiohttp.ClientError as error:
            raise _Again(f"{options.url}: {error or type(error).__name__}") from error
        if response.status == 200:
            return content
        said = f"status {response.status}: {_detail(content)}"
        if response.status in _AGAIN:
            raise _Again(said, _seconds(response.headers.get("Retry-After")))
        if response.status in (400, 413, 422):
            raise ToolError(f"the search service refused the query: {_detail(content)}")
        raise SearchUnavailable(f"{options.url}: {said}")

    def _session(self) -> aiohttp.ClientSession:
        """Connections belong to an event loop."""
        loop = asyncio.get_running_loop()
        if self._connections is None or self._loop is not loop:
            self._connections, self._loop = http_client(), loop
        return self._connections


class _Again(SearchUnavailable):
    """Worth another attempt. `seconds`: not before."""

    def __init__(self, problem: str, seconds: float | None = None) -> None:
        super().__init__(problem)
        self.seconds = seconds


def _pause(made: int, least: float | None) -> float:
    """Seconds to wait after so many attempts; `least`: as the server says."""
    if least is None:
        least = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (made - 1))
    return least * random.uniform(1.0, 1.5)


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header else None
    except ValueError:
        return None  # a date


def _detail(content: bytes) -> str:
    """What the server says about a refusal."""
    text = content[: 4 * _MOST_DETAIL].decode(errors="replace")
    try:
        detail = orjson.loads(content)["detail"]
        text = detail if isinstance(detail, str) else orjson.dumps(detail).decode()
    except (orjson.JSONDecodeError, KeyError, TypeError):
        pass
    return text[:_MOST_DETAIL]


def _documents(answer: bytes) -> Iterator[Document]:
    """Raises SearchUnavailable when it is no answer to one query."""
    try:
        (items,) = orjson.loads(answer)["result"]
        for item in items:
            yield read_document(item.get("document", item))
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SearchUnavailable(
            f'the search service answered {answer[:80]!r}, expected {{"result": [[documents]]}} ({error})'
        ) from error


def _cut(document: Document, characters: int) -> Document:
    if len(document.text) <= characters:
        return document
    return Document(document.title, document.text[:characters].rsplit(maxsplit=1)[0] + " ...")
