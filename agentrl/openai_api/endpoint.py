"""HTTP server, in the event loop that starts it.

A session's base URL holds a random token that names it and is all that a caller needs. Scores and results are posted to
another address, with a token of its own: tools of the policy may know the first one. A caller that goes away ends
its generation. Streams begin at once, and send tokens as they are sampled, or comments so that clients see them alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import os
import re
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import ClassVar, NoReturn

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from agentrl.agent_loop.base import Episode
from agentrl.agent_loop.roles import problem_of
from agentrl.agents.session_queue import SessionQueue
from agentrl.agents.task import MODEL, AgentError, blamed, read_numbers, read_report
from agentrl.chat import Chat
from agentrl.chat.check import why_no_tools
from agentrl.errors import ConfigError
from agentrl.openai_api.asked import Asked
from agentrl.openai_api.chat_completions import ChatCompletions
from agentrl.openai_api.completion import Completion, encoded
from agentrl.openai_api.dialect import KEEP_ALIVE, Dialect
from agentrl.openai_api.errors import NO_ROOM, ApiError, unknown_session
from agentrl.openai_api.fields import fields_of
from agentrl.openai_api.history import Digest
from agentrl.openai_api.messages import Messages
from agentrl.openai_api.responses import Responses
from agentrl.openai_api.session import Call, Session
from agentrl.system.client_bounds import ACCEPTED_AT_ONCE, MAX_HEADERS, Listener
from agentrl.system.delivery import Last, Watched, WholeStream, watched
from agentrl.system.front import fronted, metered
from agentrl.system.garbage import collect_if_due, put_off_full_collections
from agentrl.system.http import allow_many_files
from agentrl.system.json_value import JSON
from agentrl.system.threads import OwnThread, beside_loop
from agentrl.system.throttle import OncePerKey
from agentrl.tool import ToolSchema

logger = logging.getLogger(__name__)

MAX_BODY = 8 << 20
"""Bytes of a request."""
STREAM_PIECE = 2 << 10
"""Bytes of a stream that are sent at once."""
ENDING = 3
"""Events of any dialect that say that a turn ends; clients leave at one of them."""
KEEP_ALIVE_SECONDS = 5.0
GATHER_SECONDS = 0.05
"""Time in which further tokens of a live answer are gathered for one piece."""
SILENT_MILLISECONDS = 30_000
"""Time after which a connection ends whose other side acknowledges nothing that it was sent."""
IDLE_SECONDS = 3600
"""Seconds that an idle connection is kept: longer than clients keep theirs, who must be the ones to close it."""


CHAT = ChatCompletions()
DIALECTS: dict[str, Dialect] = {dialect.path: dialect for dialect in (CHAT, Responses(), Messages())}
COUNT_TOKENS = f"{Messages.path}/count_tokens"
FEEDBACK, RESULT = "v1/feedback", "v1/result"
UNSEEN_TOOLS = "openai_unseen_tools"
"""Metric: requests whose tools the run's chat format does not show to the policy, or whose calls it does not read."""
MAX_DROPPED, MAX_NAME = 64, 40
"""Names under which dropped fields are counted, and characters of one."""
MAX_REPORT = 64 << 10
"""Bytes of a report."""
MOST_OF_DOOR = 128
"""Connections of one container."""
ROUTES = {**dict.fromkeys((*DIALECTS, COUNT_TOKENS), "POST"), "v1/models": "GET", "v1/models/NAME": "GET"}
SESSIONS = "/v1/sessions"
"""Route of programs that ask for sessions; it lies in none."""


class _Protocol(Watched, H11Protocol):  # type: ignore[misc]
    """HTTP by h11, whose answers are followed to their client."""


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the program."""
        yield


def _only(app: ASGIApp, token: str) -> ASGIApp:
    """Wrap the app for the programs of one session, which count as one client."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(f"/{token}/"):
            await _refusal_unread(404, unknown_session().message)(scope, receive, send)
        else:
            await app({**scope, "client": (token, 0)}, receive, send)

    return answer


class Endpoint:
    """Server of sessions until it is closed. Call its methods on the loop that started it."""

    address_keys: ClassVar = ("openai_proxy.host", "openai_proxy.port")
    """Keys of the run that have its address."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, strict: bool = False) -> None:
        """`port` 0: any that is free. `strict`: unknown fields are refused, not dropped."""
        self.url = ""
        self.queue = SessionQueue()
        self._address = (host, port)
        self._turn = asyncio.Lock()
        self._sessions: dict[str, Session] = {}
        self._reported: dict[str, Session] = {}
        """Sessions by the token of their address for scores."""
        self._tool_lists: dict[Digest, list[ToolSchema]] = {}
        self._is_new = OncePerKey()
        self._strict = strict
        self._why_no_tools: dict[Chat, str | None] = {}
        self._dropped: set[str] = set()
        """Names under which dropped fields are counted."""
        self._strays: Counter[str] = Counter()
        """Refused requests of no session by the name of their metric, until a trajectory counts them."""
        self._thread = OwnThread("long requests of agents")
        self._front: ASGIApp | None = None
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the server; returns when calls are answered. Raises ConfigError for an address that it cannot have."""
        allow_many_files()
        listener = listen(*self._address, self.address_keys)
        host = self._address[0]
        self.url = self.queue.url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
        self._front = fronted(self._app(), MAX_BODY, _refusal_unread)
        config = uvicorn.Config(
            self._front,
            http=metered(MAX_BODY, _Protocol),
            h11_max_incomplete_event_size=MAX_HEADERS,
            backlog=ACCEPTED_AT_ONCE,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """End all sessions and the server."""
        self.queue.close()
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._sessions.clear()
        self._reported.clear()
        self._thread.end()
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
        self._server = self._task = None

    @contextlib.asynccontextmanager
    async def session(self, episode: Episode) -> AsyncIterator[tuple[Session, str]]:
        """Open a session that records into branches of `episode`: (session, base URL). Ended with the context."""
        await self._in_turn()
        token = secrets.token_urlsafe(24)
        put_off_full_collections()
        session = self._sessions[token] = Session(episode, self._tool_lists, self._thread, strict=self._strict)
        self._reported[session.report_token] = session
        try:
            yield session, f"{self.url}/{token}/v1"
        finally:
            self._sessions.pop(token, None)
            self._reported.pop(session.report_token, None)
            for name, number in self._strays.items():
                session.count(name, number)
            self._strays.clear()
            await session.close()
            if not self._sessions:
                collect_if_due()

    @contextlib.asynccontextmanager
    async def door(self, token: str, listener: socket.socket) -> AsyncIterator[None]:
        """Answer at a further listening socket, for the session of one token alone.

        A program there reaches no other session, no address for scores and no queue, even if it knows their addresses.
        """
        assert self._server is not None and self._front is not None
        config = copy.copy(self._server.config)
        config.loaded_app = _only(self._front, token)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MILLISECONDS)
        server_state = self._server.server_state

        class Bounded(config.http_protocol_class):  # type: ignore[name-defined]  # uvicorn's
            opened = 0

            def connection_made(self, transport: asyncio.Transport) -> None:
                Bounded.opened += 1
                super().connection_made(transport)
                if Bounded.opened > MOST_OF_DOOR:
                    transport.abort()

            def connection_lost(self, exc: Exception | None) -> None:
                Bounded.opened -= 1
                super().connection_lost(exc)

        def connected() -> asyncio.Protocol:
            made: asyncio.Protocol = Bounded(config=config, server_state=server_state, app_state={})
            return made

        server = await asyncio.get_running_loop().create_server(connected, sock=listener, backlog=MOST_OF_DOOR)
        try:
            yield
        finally:
            server.close()

    def _app(self) -> FastAPI:
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
        # Anthropic's clients add `v1` to a base URL, also to one that ends with it.
        answers = {**dict.fromkeys(DIALECTS, self._complete), COUNT_TOKENS: self._count_tokens}
        answers |= {FEEDBACK: self._feedback, RESULT: self._result}
        app.add_api_route(SESSIONS, self._connect, methods=["GET"], response_model=None)
        for path, answer in answers.items():
            for below in ("/{token}/", "/{token}/v1/"):
                app.add_api_route(below + path, answer, methods=["POST"], response_model=None)
        for below in ("/{token}/v1/models", "/{token}/v1/v1/models"):
            app.add_api_route(below, self._models, methods=["GET"], response_model=None)
            app.add_api_route(below + "/{name}", self._one_model, methods=["GET"], response_model=None)
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        app.add_api_route("/{token}/{path:path}", self._refuse, methods=methods, response_model=None)
        app.add_exception_handler(ApiError, _answer_error)
        app.add_exception_handler(HTTPException, _answer_error)
        app.add_exception_handler(Exception, _answer_bug)
        return app

    def _find(self, token: str) -> Session:
        session = self._sessions.get(token)
        if session is None:
            self._strays["openai_unknown_sessions"] += 1
            if self._is_new("unknown session"):
                logger.warning("a request was refused: %s", unknown_session().message)
            raise unknown_session()
        return session

    def _find_reported(self, token: str, route: str) -> Session:
        """Find the session of an address for scores. Raises ApiError, also for the address of the policy's calls."""
        if token in self._reported:
            return self._reported[token]
        session = self._find(token)
        message = (
            f"POST {route} has an address of its own, report_url: on a command's stdin, in a pool's line, or a "
            "function's parameter. The base URL takes no score: tools of the policy know it, too."
        )
        refusal = ApiError(403, message, code="no_report_url")
        session.refused(refusal)
        session.count("openai_scores_refused")
        if self._is_new("score refused"):
            logger.warning("a score was posted to the address of the policy's calls, and refused: %s", message)
        raise refusal

    def report_url(self, session: Session) -> str:
        """Return the address that takes a session's scores."""
        return f"{self.url}/{session.report_token}/v1"

    async def _in_turn(self) -> None:
        """Wait for a turn. One session or call begins in a round of the event loop, and other work comes between."""
        async with self._turn:
            await asyncio.sleep(0)

    async def _models(self, token: str) -> dict[str, JSON]:
        names = list(self._find(token).episode.context.roles) or [MODEL]
        models: list[JSON] = [describe_model(name) for name in names]
        return {"object": "list", "data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    async def _one_model(self, token: str, name: str) -> Mapping[str, JSON]:
        session = self._find(token)
        roles = session.episode.context.roles
        if roles and (problem := problem_of([name], roles)) is not None:
            raise ApiError(404, f"model: {problem}.", param="model", code="model_not_found")
        return describe_model(name)

    async def _complete(self, token: str, request: Request) -> Response:
        return await self.complete(token, request, None)

    async def complete(self, token: str, request: Request, asked: Asked | None) -> Response:
        """Answer a request in the session of a token. `asked`: the request, where it was read before."""
        body = await request.body()
        await self._in_turn()
        session, dialect = self._find(token), dialect_of(request)
        try:
            asked, call, task = await session.begin(body, dialect, watched(request.scope), asked)
        except ApiError as error:
            error.message += await elsewhere(body, dialect)
            self._refused(session, error, dialect)
            raise
        self._count_dropped(session, asked.dropped)
        if asked.tools:
            self._count_unseen_tools(session)
        leaving = asyncio.create_task(_leave_when_gone(request, session, call, task))
        if asked.request.stream:
            task.add_done_callback(lambda _: leaving.cancel())
            events = _events(session, call, task, dialect)
            return WholeStream(events, media_type="text/event-stream", headers=_NO_BUFFER)
        try:
            completion = await _result(session, task)
        finally:
            leaving.cancel()
        return await beside_loop(completion.size, lambda: json_answer(dialect.answer(completion)))

    def _count_dropped(self, session: Session, dropped: Mapping[str, str]) -> None:
        """Count the dropped fields of a request by name, and log each once. Names may be the policy's: few are kept."""
        for name, why in dropped.items():
            metric = re.sub("[^a-z0-9]+", "_", name.lower())[:MAX_NAME]
            if metric not in self._dropped:
                metric = metric if len(self._dropped) < MAX_DROPPED else "others"
                self._dropped.add(metric)
                counted = f"trajectory/openai_dropped_{metric}"
                if self._is_new(counted):
                    logger.warning("an agent's requests have %r, which is dropped (%s); %s", name[:80], why, counted)
            session.count(f"openai_dropped_{metric}")

    def _count_unseen_tools(self, session: Session) -> None:
        """Count a request whose tools the policy cannot call by the run's chat format, and warn of the first."""
        chat = session.episode.context.chat
        if chat not in self._why_no_tools:
            self._why_no_tools[chat] = why_no_tools(chat)
        if (why := self._why_no_tools[chat]) is not None:
            session.count(UNSEEN_TOOLS)
            if self._is_new(UNSEEN_TOOLS):
                counted = f"trajectory/{UNSEEN_TOOLS}"
                logger.warning("an agent's requests have tools, which the policy cannot call: %s; %s", why, counted)

    def _refused(self, session: Session, error: ApiError, dialect: Dialect) -> None:
        """Count a refused request, and log the first one for each field: programs may continue without it."""
        session.refused(error)
        if error.status == 400 and error.code != NO_ROOM and self._is_new(_kind(error, dialect)):
            logger.warning(
                "a request of an agent (POST %s) was refused, counted as trajectory/openai_bad_requests: %s",
                *(dialect.path, error.message),
            )

    async def _count_tokens(self, token: str, request: Request) -> Response:
        session = self._find(token)
        try:
            return json_answer({"input_tokens": await session.count_tokens(await request.body(), dialect_of(request))})
        except ApiError as error:
            self._refused(session, error, dialect_of(request))
            raise

    async def _feedback(self, token: str, request: Request) -> Response:
        """Take numbers about a session's trajectory: its score, its last turn's reward, and others by name.

        With `response`, the id of an answer, it is the score of that answer's transcript alone.
        """
        session = self._find_reported(token, FEEDBACK)
        try:
            value = from_json(await report_body(request), allow_inf_nan=False)
            if not isinstance(value, dict):
                raise TypeError(f"expected an object of names and numbers, found {value!r:.80}")
            response = value.pop("response", None)
            numbers = read_numbers(value)
            if response is None:
                session.tell(numbers)
            elif isinstance(response, str) and numbers.keys() == {"score"}:
                session.tell_of(response, numbers["score"])
            else:
                raise TypeError(f"expected with response, the id of an answer, a score alone, found {response!r:.80}")
        except ApiError as error:
            if error.param == "response" and error.status != 409:  # which is counted as openai_feedback_twice
                session.refused(error)
            raise
        except (TypeError, ValueError) as error:
            refusal = ApiError(400, f"feedback: {error}", code="invalid_value")
            session.refused(refusal)
            raise refusal from None
        return json_answer({"taken": sorted(value)})

    async def _connect(self, request: Request) -> Response:
        """Send a program its sessions, a line each, until it leaves."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        ticket = self.queue.ticket(token.strip()) if scheme.lower() == "bearer" else None
        if ticket is None:
            found = "another token" if token else "no such header"
            message = (
                f"GET {SESSIONS} needs the header Authorization: Bearer TOKEN, with the token of this run's agents "
                f"(AGENTRL_TOKEN of a pool, the variable that token_env names for remote agents); found {found}."
            )
            self._strays["openai_wrong_tokens"] += 1
            if self._is_new("wrong token"):
                logger.warning("a program that asked for sessions was refused: %s", message)
            raise ApiError(401, message, code="invalid_api_key")
        if self.queue.is_taken(ticket):
            raise ApiError(409, "This process has a connection, and needs no other.", code="connected")
        scheme = request.headers.get("x-forwarded-proto", "http")
        url = f"{'https' if scheme == 'https' else 'http'}://{request.headers.get('host', request.url.netloc)}"
        lines = self.queue.connect(ticket, url)
        return StreamingResponse(lines, media_type="application/x-ndjson", headers=_NO_BUFFER)

    async def _result(self, token: str, request: Request) -> Response:
        """Take the result of a session that a program was sent: numbers as feedback has them, or an `error`."""
        body, job = await request.body(), self.queue.settle(token)
        if job is None:
            self._find_reported(token, RESULT)
            raise ApiError(404, "This session ends with its agent, which returns its result.", code="unknown_url")
        try:
            value = from_json(body, allow_inf_nan=False)
            if isinstance(value, dict) and isinstance(said := value.get("error"), str):
                if len(said) > MAX_REPORT:  # A traceback begins with its head, and ends with its error.
                    said = f"{said[: MAX_REPORT // 2]} ... {said[-MAX_REPORT // 2 :]}"
                job.fail(blamed(f"agent: {said}", said, job.task.token, os.environ))
            else:
                job.end(read_report(value))
        except (TypeError, ValueError) as error:
            job.fail(AgentError(f"agent: {error}", str(error)))
            raise ApiError(400, f"result: {error}", code="invalid_value") from None
        return json_answer({"ended": True})

    async def _refuse(self, token: str, path: str, request: Request) -> NoReturn:
        """Refuse an unknown route, and list the known routes."""
        session = self._find(token)
        routes = ", ".join(f"{method} {route}" for route, method in ROUTES.items())
        message = (
            f"{request.method} {path} does not exist; this endpoint answers {routes}. Set a client's base URL to the "
            "one that the agent was given, which ends with /v1; Anthropic's clients take it without /v1, too."
        )
        refusal = ApiError(405 if path in ROUTES else 404, message, code="unknown_url")
        session.refused(refusal)
        raise refusal


async def report_body(request: Request) -> bytes:
    body = await request.body()
    if len(body) > MAX_REPORT:
        raise ApiError(413, f"expected a report of at most {MAX_REPORT:,} bytes, found {len(body):,}")
    return body


def listen(host: str, port: int, keys: tuple[str, str]) -> socket.socket:
    """Open a socket whose connections end when their other side has been silent for long.

    Raises ConfigError, with the names of the keys, for an address that it cannot have.
    """
    # The protocol is named, or asyncio would leave Nagle's algorithm on, which costs 40 ms an answer.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MILLISECONDS)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"{keys[0]}={host}, {keys[1]}={port}: expected an address of this machine and a free port: "
            f"{error.strerror or error}"
        ) from error
    return listener


_NO_BUFFER = {"cache-control": "no-cache", "x-accel-buffering": "no"}


async def _result(session: Session, task: asyncio.Task[Completion]) -> Completion:
    """Wait for the completion. Raises ApiError, also for a generation that was cancelled because the session ended."""
    await asyncio.wait({task})
    if task.cancelled():
        raise unknown_session() if session.closed else ApiError(499, "The client closed the request.")
    return task.result()


async def _events(
    session: Session, call: Call, task: asyncio.Task[Completion], dialect: Dialect
) -> AsyncIterator[bytes]:
    writer, tokens = dialect.writer(call.begun), 0
    try:
        yield KEEP_ALIVE
        while not task.done():
            if not await _is_news(call):
                yield KEEP_ALIVE
                call.delivery.sent(len(KEEP_ALIVE), tokens)
            elif call.live is not None and (grown := call.live.more()) is not None:
                piece = b"".join(writer.more(grown.reasoning, grown.text))
                yield piece
                tokens = grown.tokens
                call.delivery.sent(len(piece), tokens)
                await asyncio.wait({task}, timeout=GATHER_SECONDS)
        completion = await _result(session, task)
    except ApiError as error:
        yield dialect.error_event(error)  # The stream has begun.
        return
    finally:
        session.leave(call, task)
    # In pieces, between which the client is heard: one that leaves early has not taken the rest.
    for piece in await beside_loop(completion.size, lambda: list(_joined(list(writer.end(completion))))):
        yield piece
        call.delivery.sent(len(piece), tokens)
        await asyncio.sleep(0)


async def _is_news(call: Call) -> bool:
    """Wait for tokens of an answer, or its end; False where neither comes for a while."""
    try:
        async with asyncio.timeout(KEEP_ALIVE_SECONDS):
            await call.news.wait()
    except TimeoutError:
        return False
    call.news.clear()
    return True


def _joined(events: Sequence[bytes]) -> Iterator[bytes]:
    """Join events to pieces of at least STREAM_PIECE bytes; the events that end a turn are in one."""
    piece = bytearray()
    for event in events[:-ENDING]:
        piece += event
        if len(piece) >= STREAM_PIECE:
            yield bytes(piece)
            piece.clear()
    yield Last(piece + b"".join(events[-ENDING:]))


async def _leave_when_gone(request: Request, session: Session, call: Call, task: asyncio.Task[Completion]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    session.leave(call, task)


def dialect_of(request: Request) -> Dialect:
    """Find the dialect of a request's path; Chat Completions for any other path."""
    path = f"{request.url.path}/"
    return next((one for begin, one in DIALECTS.items() if f"/{begin.removeprefix('v1/')}/" in path), CHAT)


def _kind(error: ApiError, dialect: Dialect) -> str:
    """Name a refusal by its field, without places in lists."""
    return f"refused {dialect.path} {re.sub(r'[0-9]+', '', error.param or '')} {error.code}"


async def elsewhere(body: bytes, dialect: Dialect) -> str:
    """Name the routes that know all fields of a refused request, where its own does not."""
    return await beside_loop(len(body), lambda: _elsewhere(body, dialect))


def _elsewhere(body: bytes, dialect: Dialect) -> str:
    with contextlib.suppress(ValueError):
        value = from_json(body)
        names = value.keys() if isinstance(value, dict) else frozenset()
        if not names <= fields_of(dialect.api):
            knowing = [f"POST {path}" for path, other in DIALECTS.items() if names <= fields_of(other.api)]
            return f" ({' and '.join(knowing)} {'know' if knowing[1:] else 'knows'} these fields.)" if knowing else ""
    return ""


def describe_model(name: str) -> dict[str, JSON]:
    """Describe a model as both OpenAI and Anthropic do."""
    openai: dict[str, JSON] = {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def json_answer(value: object, status: int = 200, **headers: str) -> Response:
    return Response(encoded(value), status, headers, media_type="application/json")


def _answer(error: ApiError, dialect: Dialect = CHAT) -> Response:
    """Make the answer; clients read in its header that the same request would fail again."""
    return json_answer(dialect.error(error), error.status, **{"x-should-retry": "false"})


def _refusal(status: int, detail: str, dialect: Dialect = CHAT) -> Response:
    return _answer(ApiError(status, detail, code="request_too_large" if status == 413 else None), dialect)


def _refusal_unread(status: int, detail: str) -> ASGIApp:
    """Make the app that refuses a request before it is read."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await _refusal(status, detail, dialect_of(Request(scope)))(scope, receive, send)

    return answer


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException) and error.status_code == 404:  # not even a session
        error = unknown_session()
    if isinstance(error, HTTPException):
        detail = f"{request.method} {request.url.path.split('/', 2)[-1]}: {error.detail}"
        return _refusal(error.status_code, detail, dialect_of(request))
    assert isinstance(error, ApiError)
    return _answer(error, dialect_of(request))


async def _answer_bug(request: Request, error: Exception) -> Response:
    """Answer an exception of this endpoint's own code, which the server then logs."""
    return _answer(ApiError(500, f"The endpoint failed: {type(error).__name__}: {error}"), dialect_of(request))
