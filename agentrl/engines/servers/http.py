"""HTTP requests to one server, and errors by whose fault they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import aiohttp
import orjson
import pydantic
from pydantic import BaseModel, JsonValue

from agentrl.engines.contract import EngineError, RequestError
from agentrl.engines.servers.client import ServerFailed, describe
from agentrl.system.json_value import JSON
from agentrl.system.plugin import describe as faults_of
from agentrl.trajectory import VersionSpan

CONTROL_TIMEOUT = 60.0
"""Seconds for a call that generates and loads nothing."""
HEADERS = {"content-type": "application/json"}
FAULTS = (aiohttp.ClientError, OSError, TimeoutError)
Answer = TypeVar("Answer", bound=BaseModel)


def key_header(key: str | None) -> dict[str, str]:
    """Make the header by which a server knows that it may answer."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


def read(kind: type[Answer], content: bytes) -> Answer:
    """Read an answer. Raises ValueError naming the fields that are not as expected."""
    try:
        return kind.model_validate_json(content)
    except pydantic.ValidationError as error:
        raise ValueError(faults_of(error)) from error


class VersionInfo(BaseModel):
    """Tokens [start, end) of an answer, and the version of the weights that sampled them."""

    version: int  # which servers write as text
    start: int
    end: int


class ModelCard(BaseModel):
    """A model of a server; an adapter where it has a parent."""

    id: str
    root: str | None = None
    parent: str | None = None


class ModelsAnswer(BaseModel):
    """Answer of OpenAI's list of models."""

    data: list[ModelCard]


def version_spans(found: Sequence[VersionInfo] | None, count: int) -> list[VersionSpan]:
    """Read the versions of an answer of `count` tokens. Raises ValueError where they are not those of all tokens."""
    spans = [VersionSpan(span.version, span.start, span.end) for span in found or [] if span.end > span.start]
    if count and (not spans or spans[0].start != 0 or spans[-1].end != count):
        raise ValueError(f"version spans {spans} for {count} ids")
    return spans


class ServerHTTP:
    """The requests of a client: each raises ServerFailed when the server is at fault, RequestError when it refuses."""

    def __init__(self, url: str, http: aiohttp.ClientSession, key: str | None = None) -> None:
        """`key`: key of the server; None: it answers everyone."""
        self.url = url.rstrip("/")
        self._http = http
        self._headers = {**HEADERS, **key_header(key)}

    async def post(self, path: str, body: Mapping[str, JSON], *, timeout: float | None = CONTROL_TIMEOUT) -> bytes:
        """POST `body` as JSON; return the answer. Raises RequestError with the server's own message."""
        return await self._call("POST", path, body, timeout)

    async def get(self, path: str, timeout: float | None = CONTROL_TIMEOUT) -> bytes:
        """GET a path; return the answer."""
        return await self._call("GET", path, None, timeout)

    async def held_adapters(self) -> dict[str, str]:
        """Ask for the adapters as `ServerClient.held_adapters` says."""
        try:
            models = read(ModelsAnswer, await self.get("v1/models")).data
        except ValueError as error:
            raise ServerFailed(self.url, f"v1/models: {error}") from error
        return {one.id: one.root or "" for one in models if one.parent is not None}

    async def events(self, path: str, body: Mapping[str, JSON]) -> AsyncGenerator[bytes]:
        """POST `body` and yield the JSON objects of the streamed answer. Raises `FAULTS` as they are."""
        url = f"{self.url}/{path}"
        async with self._http.post(url, data=orjson.dumps(body), headers=self._headers) as response:
            if response.status != 200:
                raise self.error(response.status, await response.read(), path)
            buffer = b""
            async for piece in response.content.iter_any():
                *events, buffer = (buffer + piece).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        yield event[6:]

    @contextmanager
    def blamed(self, discard: Callable[[], None]) -> Iterator[None]:
        """Raise ServerFailed for a fault while an answer is read, and `discard` tokens that make no sense."""
        try:
            yield
        except RequestError:
            raise
        except FAULTS as error:
            raise ServerFailed(self.url, describe(error)) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            discard()
            raise ServerFailed(self.url, f"its answer makes no sense: {describe(error)}") from error

    def check_event(self, error: JsonValue, event: bytes) -> None:
        """Raise the server's refusal in mid-stream, whose `error` is not None."""
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            raise self.error(code if isinstance(code, int) else 400, event, "generate")

    async def _call(self, method: str, path: str, body: Mapping[str, JSON] | None, timeout: float | None) -> bytes:
        content = None if body is None else orjson.dumps(body)
        try:
            async with asyncio.timeout(timeout):
                url = f"{self.url}/{path.lstrip('/')}"
                async with self._http.request(method, url, data=content, headers=self._headers) as response:
                    answer = await response.read()
        except FAULTS as error:
            raise ServerFailed(self.url, f"{path}: {describe(error)}") from error
        if response.status != 200:
            raise self.error(response.status, answer, path)
        return answer

    def error(self, status: int, content: bytes, path: str) -> EngineError | RequestError:
        """Make the error of an answer that is no success, with the server's own words."""
        text = content.decode(errors="replace")
        try:
            error = orjson.loads(content)
            error = error.get("error", error.get("message", error))
            text = error["message"] if isinstance(error, dict) else str(error)
        except (orjson.JSONDecodeError, AttributeError, KeyError):
            pass
        if status in (400, 422):
            return RequestError(f"{self.url}: {path}: {text[:2000]}")
        return ServerFailed(self.url, f"{path}: status {status}: {text[:2000]}")
