"""The part of a server's client that is the same for each software: requests, streamed answers, updates, adapters.

Errors say whose fault they are.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import aiohttp
import orjson
import pydantic
from pydantic import BaseModel, JsonValue

from agentrl.engines.contract import EngineError, FinishReason, Generation, RequestError, covers
from agentrl.engines.servers.client import PartialAnswer, ServerFailed, describe
from agentrl.engines.servers.images import check_expanded
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
    if count and not covers(spans, count):
        raise ValueError(f"version spans {spans} for {count} ids")
    return spans


class AnswerStream:
    """A streamed answer, whose tokens are put into a PartialAnswer as they come."""

    def __init__(self, partial: PartialAnswer | None) -> None:
        self._partial = PartialAnswer() if partial is None else partial
        self.finish: FinishReason | None = None
        self.versions: Sequence[VersionInfo] | None = None
        """Versions of the weights that sampled the tokens."""
        self.prompt_tokens: int | None = None
        """Length of the prompt as the server counts it."""
        self.cached_tokens = 0

    def __len__(self) -> int:
        return len(self._partial.ids)

    def add(self, ids: Sequence[int], logprobs: Sequence[float], version: str) -> None:
        """Add tokens of the weights of a version. Raises ValueError where they make no sense."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} ids but {len(logprobs)} log-probs")
        if not all(map(math.isfinite, logprobs)):
            raise ValueError("log-probs that are no numbers")
        self._partial.weight_version = version
        self._partial.ids += ids
        self._partial.logprobs += logprobs
        if self._partial.listener is not None and ids:
            self._partial.listener(ids)

    @property
    def is_heard(self) -> bool:
        """True where somebody hears the tokens as they come."""
        return self._partial.listener is not None

    def discard(self) -> None:
        """Drop the tokens, which cannot be trusted."""
        self._partial.ids, self._partial.logprobs = [], []

    def generation(self) -> Generation:
        """Return the whole answer. Raises OSError when the server broke off, ValueError when it makes no sense."""
        if self.finish is None:
            raise ConnectionError("the server broke off in the middle of an answer")
        ids = self._partial.ids
        spans = version_spans(self.versions, len(ids))
        return Generation(ids, self._partial.logprobs, self.finish, spans, self.cached_tokens)


class Routes(NamedTuple):
    """Paths of a software where a client does the same with each."""

    begin_update: str
    end_update: str
    already_begun: str
    """Part of the refusal to begin an update while another one is open."""
    load_adapter: str
    unload_adapter: str
    further: Mapping[str, JSON] = {}
    """Further fields of the request that gives the weights another version."""


class ServerHTTP:
    """The requests of a client: each raises ServerFailed when the server is at fault, RequestError when it refuses."""

    routes: ClassVar[Routes]
    _adapter: str | None = None
    """Name of the adapter that requests are answered with."""

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
        models = self.read(ModelsAnswer, await self.get("v1/models"), "v1/models").data
        return {one.id: one.root or "" for one in models if one.parent is not None}

    def read(self, kind: type[Answer], content: bytes, path: str) -> Answer:
        """Read the answer of a path. Raises ServerFailed where it makes no sense."""
        try:
            return read(kind, content)
        except ValueError as error:
            raise ServerFailed(self.url, f"{path}: unexpected answer: {error}") from error

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

    async def answer(
        self,
        path: str,
        body: Mapping[str, JSON],
        stream: AnswerStream,
        take: Callable[[bytes], None],
        *,
        expanded: int | None,
    ) -> Generation:
        """Ask for tokens; `take` reads each event of the answer into `stream`.

        expanded: length of the prompt with all tokens of its images, of which the server was sent one each.
        """
        with self.blamed(stream.discard):
            async with aclosing(self.events(path, body)) as events:
                async for event in events:
                    take(event)
            if expanded is not None:
                check_expanded(stream.prompt_tokens, expanded, self.url)
            return stream.generation()

    async def begin_weight_update(self, timeout: float) -> None:
        """See `WeightReceiver.begin_weight_update`."""
        begin, end = self.routes.begin_update, self.routes.end_update
        try:
            await self.update(begin, {}, timeout)
        except (EngineError, RequestError) as error:
            if self.routes.already_begun not in str(error):
                raise
            await self.update(end, {}, timeout)
            await self.update(begin, {}, timeout)

    async def use_adapter(self, name: str | None, folder: Path | None, version: int, timeout: float) -> None:
        """See `WeightReceiver.use_adapter`. A server drops an adapter when no request uses it any more."""
        if name is not None:
            loaded: dict[str, JSON] = {"lora_name": name, "lora_path": str(folder)}
            await self.update(self.routes.load_adapter, loaded, timeout)
        before, self._adapter = self._adapter, name
        if before is not None:
            try:
                await self.update(self.routes.unload_adapter, {"lora_name": before}, timeout)
            except (RequestError, ServerFailed) as error:
                # A server that has been started again does not have it, and refuses; newer vLLM servers say 404.
                if isinstance(error, ServerFailed) and error.status != 404:
                    raise
        if name is not None:
            await self.update("update_weight_version", {"new_version": str(version), **self.routes.further}, timeout)

    async def update(self, path: str, body: Mapping[str, JSON], timeout: float) -> bytes:
        """POST a step of a weight update. Some failures are answered with status 200: raises EngineError."""
        content = await self.post(path, body, timeout=timeout)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:
            return content
        if isinstance(answer, dict) and answer.get("success") is False:
            raise EngineError(f"{self.url}: {path}: {answer.get('message', answer)}")
        return content

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
        # A server that answers 500 closes the connection without a word, which the next call would be sent on.
        headers = {**self._headers, "connection": "close"}
        try:
            async with asyncio.timeout(timeout):
                url = f"{self.url}/{path.lstrip('/')}"
                async with self._http.request(method, url, data=content, headers=headers) as response:
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
        return ServerFailed(self.url, f"{path}: status {status}: {text[:2000]}", status)
