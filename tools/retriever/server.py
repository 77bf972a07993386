"""One worker: Search-R1's `POST /retrieve` over an index or an engine, and `GET /health`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pydantic
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from agentrl.errors import ConfigError
from agentrl.system.body_limit import BodyLimit
from agentrl.system.front import Paced
from agentrl.system.json_value import JSON
from tools.retriever.batcher import Batcher, QueueFull
from tools.retriever.index import Index, Mode, Searchable
from tools.retriever.milvus import EngineUnavailable, MilvusIndex, is_collection
from tools.retriever.settings import Settings

logger = logging.getLogger(__name__)

LOOK_EVERY = 2.0
"""Seconds between two looks for documents that were added."""
GONE_EVERY = 0.5
"""Seconds between two checks that the client of a waiting request is still there."""
WINDOW = 0.003
"""Seconds that a batch of queries waits for more where they are embedded: 64 together cost little more than a few."""
_BATCH = 64
CLIENT_HEADER = "x-client-id"
"""Header that names a client sharing the queue: a run. Without it, the client's address does."""
TIMEOUT_HEADER = "x-request-timeout-ms"
"""Header with the milliseconds that the client goes on waiting."""
_LONGEST_NAME = 200
_ENGINE_AGAIN = 1
"""Seconds after which a search that the engine did not answer may be tried again."""


class Retrieve(pydantic.BaseModel):
    """Body of `POST /retrieve`; unknown keys are ignored, as Search-R1's own server does."""

    queries: list[str]
    topk: int | None = None
    """Documents a query, at most; the server's own number when it is null."""
    return_scores: bool = False


def within_limits(settings: Settings) -> type[Retrieve]:
    """Make the model of `Retrieve` as a server with these limits takes it."""
    query = Annotated[str, pydantic.Field(max_length=settings.max_query_chars)]
    queries = Annotated[list[query], pydantic.Field(max_length=settings.max_queries)]
    topk = Annotated[int, pydantic.Field(gt=0, le=settings.max_topk), pydantic.BeforeValidator(_whole)]
    return pydantic.create_model("Retrieve", __base__=Retrieve, queries=(queries, ...), topk=(topk | None, None))


def _whole(number: object) -> object:
    """Convert 3.0 to 3, which is an integer to JSON schema."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


class Found(pydantic.BaseModel):
    """Document of an answer."""

    id: str
    contents: str
    """Title and text: `"Title"\\ntext`."""


class Scored(pydantic.BaseModel):
    """Document of an answer with its score."""

    document: Found
    score: float


class Retrieved(pydantic.BaseModel):
    """Answer by query, best first: documents, or with `return_scores` documents with scores."""

    result: list[list[Scored] | list[Found]]


class Health(pydantic.BaseModel):
    """Answer of `GET /health`."""

    status: str
    mode: str
    documents: int
    generation: int
    """Number of additions to the index."""
    pending: int
    """Queries of this worker that are not answered yet."""


class Problem(pydantic.BaseModel):
    """Answer to a refused request."""

    detail: str


@dataclass(frozen=True, slots=True)
class _Query:
    text: str
    topk: int
    scores: bool


class _Refused(Exception):
    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.detail, self.headers = status, detail, headers


class Worker:
    """Index and queue of one process."""

    def __init__(self, settings: Settings) -> None:
        """Open the index. Raises ConfigError, DataError when it cannot be served."""
        self.settings = settings
        self._accepted = within_limits(settings)
        self.index = open_index(settings)
        self.mode = mode_of(settings, self.index)
        self._unavailable = ""
        threads, window = settings.threads, 0.0
        if self.mode != "lexical":
            self._embed_with(settings.threads)
            threads, window = 1, WINDOW
        self._queue = Batcher(
            self._answer, threads=threads, most=_BATCH, max_pending=settings.max_pending, window=window
        )

    def _embed_with(self, threads: int) -> None:
        """Load the embedder. One batch at a time goes through the model, which has the threads to itself."""
        import torch

        torch.set_num_threads(threads)
        self.index.load_embedder()

    def app(self) -> FastAPI:
        """Make the application. Bodies are bounded, whatever server it runs in."""
        app = FastAPI(title="agentrl retriever", lifespan=self._lifespan, docs_url=None, redoc_url=None)
        app.add_middleware(Paced, refusal=_refusal)
        app.add_middleware(BodyLimit, most=self.settings.max_body, refusal=_refusal)
        unavailable: dict[int | str, dict[str, Any]] = {
            503: {"model": Problem, "description": "The engine does not answer; see Retry-After."}
        }
        refusals: dict[int | str, dict[str, Any]] = {
            400: {
                "model": Problem,
                "description": "The request was not sent to its end, or does not say where that is.",
            },
            408: {"model": Problem, "description": "The request came too slowly."},
            413: {"model": Problem, "description": "The request is too large."},
            422: {"model": Problem, "description": "The request is not as described, or beyond a limit."},
            429: {
                "model": Problem,
                "description": "Too many queries wait, or half-sent requests of this address; see Retry-After.",
            },
            431: {"model": Problem, "description": "The headers are too large."},
            504: {"model": Problem, "description": f"The time that {TIMEOUT_HEADER} gives is over."},
            **unavailable,
        }
        schema = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _schema(self._accepted)}}},
            "parameters": [
                _header(CLIENT_HEADER, {"type": "string"}, "Clients share the queue fairly; else by address."),
                _header(TIMEOUT_HEADER, {"type": "integer", "minimum": 0}, "How long the client waits."),
            ],
        }
        app.post("/retrieve", name="retrieve", response_model=Retrieved, responses=refusals, openapi_extra=schema)(
            self._retrieve
        )
        app.get("/health", name="health", responses=unavailable)(self._health)
        app.add_exception_handler(_Refused, _refuse)
        return app

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self._queue.start()
        looking = asyncio.create_task(self._follow_index())
        yield
        looking.cancel()
        await self._queue.close()

    async def _follow_index(self) -> None:
        """Take up documents that were added."""
        problem = ""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                index = await asyncio.to_thread(self.index.newest)
                if index is not self.index:
                    self.index = index
                    logger.warning("now serving %s documents", f"{len(index):,}")
                problem = self._unavailable = ""
            except Exception as error:  # whatever it is, what is served goes on
                if str(error) != problem:
                    logger.warning("still serving %s documents: %s", f"{len(self.index):,}", error)
                problem = str(error)
                self._unavailable = problem if isinstance(error, EngineUnavailable) else ""

    async def _health(self) -> Health:
        if self._unavailable:
            raise _Refused(503, self._unavailable, {"Retry-After": str(_ENGINE_AGAIN)})
        index = self.index
        return Health(
            status="ok",
            mode=self.mode,
            documents=len(index),
            generation=index.generation,
            pending=self._queue.pending,
        )

    async def _retrieve(self, request: Request) -> Response:
        client = request.headers.get(CLIENT_HEADER) or (request.client.host if request.client else "")
        client = client[:_LONGEST_NAME]
        seconds = _client_timeout(request)
        asked = self._read(await self._body(request))
        topk = asked.topk or self.settings.topk
        queries = [_Query(text, topk, asked.return_scores) for text in asked.queries]
        try:
            async with asyncio.timeout(seconds):
                answers = await self._ask_unless_gone(request, queries, client)
        except QueueFull as full:
            raise _Refused(429, str(full), {"Retry-After": str(full.retry_after)}) from full
        except EngineUnavailable as error:
            raise _Refused(503, str(error), {"Retry-After": str(_ENGINE_AGAIN)}) from error
        except TimeoutError as error:
            if seconds is None:
                raise
            raise _Refused(504, f"not searched within the {seconds:g} s that {TIMEOUT_HEADER} gives") from error
        return Response(b'{"result":[' + b",".join(answers) + b"]}", media_type="application/json")

    async def _ask_unless_gone(self, request: Request, queries: list[_Query], client: str) -> list[bytes]:
        """Wait for the answers; drop what still waits when the client has gone. Raises QueueFull."""
        asking = asyncio.ensure_future(self._queue.ask(queries, client))
        try:
            while not (await asyncio.wait([asking], timeout=GONE_EVERY))[0]:
                if await request.is_disconnected():
                    raise _Refused(408, "the client has gone")
            return asking.result()
        finally:
            asking.cancel()

    async def _body(self, request: Request) -> bytes:
        try:
            return await request.body()
        except ClientDisconnect as error:
            raise _Refused(400, "the request was not sent to its end") from error

    def _read(self, body: bytes) -> Retrieve:
        try:
            asked = self._accepted.model_validate_json(body, strict=True)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, problem["loc"])) or "body"
            raise _Refused(422, f"{where}: {problem['msg']}") from error
        return asked

    def _answer(self, queries: Sequence[_Query]) -> list[bytes]:
        """Make JSON lists of documents, in a thread because they may have to be read from the disk."""
        wanted, lists = [(query.text, query.topk) for query in queries], []
        for query, found in zip(queries, self.index.find(wanted, self.mode), strict=True):
            items = [
                b'{"document":%b,"score":%b}' % (item.document, repr(item.score).encode())
                if query.scores
                else item.document
                for item in found
            ]
            lists.append(b"[" + b",".join(items) + b"]")
        return lists


def open_index(settings: Settings) -> Searchable:
    """Open an index or a collection. Raises ConfigError, DataError, EngineUnavailable."""
    return MilvusIndex.open(settings.index) if is_collection(settings.index) else Index.open(settings.index)


def mode_of(settings: Settings, index: Searchable) -> Mode:
    """Choose how to search. Raises ConfigError when the settings' mode is not possible."""
    if settings.mode == "auto":
        return index.modes[0]
    if settings.mode not in index.modes:
        raise ConfigError(
            f"--mode {settings.mode}: {settings.index} can be searched only in the mode {' or '.join(index.modes)}; "
            "vectors are made with --embedding MODEL"
        )
    return settings.mode


def _client_timeout(request: Request) -> float | None:
    """Read the seconds that the client waits, if it says so."""
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise _Refused(422, f"{TIMEOUT_HEADER}: expected whole milliseconds, found {given!r:.40}")
    return int(given) / 1000


def _header(name: str, schema: JSON, description: str) -> dict[str, JSON]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


def _refusal(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status)


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, _Refused)
    return JSONResponse({"detail": error.detail}, error.status, error.headers)


def _schema(model: type[pydantic.BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(ref_template="#/components/schemas/{model}")
