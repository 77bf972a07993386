"""The endpoint of live clients: the routes of `agentrl.openai_api` under `/v1`, and feedback by session.

A call is joined to its session by the name that its client gives, by the answer that it continues, or by its history. A
history joins where the messages before the last ones are an open session's. Any other call begins a session. The header
`x-session-id` of the answer has the session's id, by which feedback names it.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from agentrl.agent_loop.base import Episode
from agentrl.chat import Chat
from agentrl.openai_api.agent_task import LARGEST, MODEL
from agentrl.openai_api.asked import LONG_BODY, Asked, read
from agentrl.openai_api.completion import Completion
from agentrl.openai_api.dialect import Dialect
from agentrl.openai_api.endpoint import (
    COUNT_TOKENS,
    DIALECTS,
    FEEDBACK,
    Endpoint,
    describe_model,
    dialect_of,
    json_answer,
    report_body,
)
from agentrl.openai_api.errors import ApiError, unknown_session
from agentrl.openai_api.history import Digest
from agentrl.openai_api.wire import Reading
from agentrl.serve.options import LiveOptions
from agentrl.serve.session import LiveSession
from agentrl.serve.store import KeyReused, Store, UnknownSession
from agentrl.system.json_value import JSON, as_object

logger = logging.getLogger(__name__)
HEADER = "x-session-id"
NAME = r"[A-Za-z0-9._:-]{1,100}"
ID = re.compile(rf"({NAME})(?:~([1-9][0-9]{{0,6}}))?")
"""Name of a session, with the number of its part."""
LONGEST_COMMENT, LONGEST_KEY = 4000, 100
MOST_AT_ONCE = 4096
"""Sessions in this process's memory."""
PREFIXES = re.compile(r"(?:chatcmpl-|msg_|resp_)?(.*)", re.DOTALL)
FIELDS = ("session", "response", "value", "comment", "id")

_Answer = (
    Callable[[Request], Awaitable[Response]]
    | Callable[[Request], Awaitable[dict[str, JSON]]]
    | Callable[[str, Request], Awaitable[dict[str, JSON]]]
)
"""Function of a route."""


class LiveEndpoint(Endpoint):
    """Server of live sessions. Call its methods on the loop that started it."""

    def __init__(
        self,
        options: LiveOptions,
        store: Store,
        chat: Chat,
        begin: Callable[[str], Episode],
        on_news: Callable[[], object],
        now: Callable[[], float] = time.time,
    ) -> None:
        """`begin(id)`: makes the episode of a session. `on_news`: called when a session may have become ready."""
        super().__init__(options.host, options.port)
        self._options, self._store, self._on_news, self._now = options, store, on_news, now
        self._chat, self._make = chat, begin
        self.open: dict[str, LiveSession] = {}
        """Sessions in memory, by id."""
        self._last: dict[str, float] = {}
        """Time of their last request or answer."""
        self._tokens: dict[str, str] = {}
        """Names by which the routes of `Endpoint` know them."""
        self._joined: dict[str, Digest] = {}
        """Digest of the history by which the last request was joined to a session."""
        self._is_closing = False
        self.moving = asyncio.Lock()
        """Held while a session comes into memory or leaves it, or a prompt takes it."""

    def _app(self) -> FastAPI:
        app = super()._app()
        routes: list[tuple[str, _Answer, str]] = []
        for path in (*DIALECTS, COUNT_TOKENS):  # Anthropic's clients add `v1` to a base URL that ends with it, too.
            routes += [(f"/{path}", self._ask, "POST"), (f"/v1/{path}", self._ask, "POST")]
        routes += [(f"/{FEEDBACK}", self._give, "POST")]
        routes += [("/v1/models", self._list, "GET"), ("/v1/models/{name}", self._describe, "GET")]
        routes += [("/{path:path}", self._refuse_path, method) for method in ("GET", "POST", "PUT", "PATCH", "DELETE")]
        # In place of the routes of `Endpoint`, whose paths begin with a session's token.
        app.router.routes[:] = [
            APIRoute(path, answer, methods=[method], response_model=None) for path, answer, method in routes
        ]
        return app

    async def _refuse_path(self, path: str, request: Request) -> NoReturn:
        known = ", ".join((*DIALECTS, COUNT_TOKENS, FEEDBACK, "v1/models"))
        message = (
            f"{request.method} {path[:100]} does not exist; this server answers {known}. A base URL ends with /v1."
        )
        raise ApiError(404, message, code="unknown_url")

    async def close(self) -> None:
        async with self.moving:
            self._is_closing = True
            for id in list(self.open):
                await self._put_away(id)
        await super().close()

    # Requests of clients

    async def _ask(self, request: Request) -> Response:
        self._check_key(request, self._options.client_key, "client's")
        body = await request.body()
        if request.url.path.endswith(COUNT_TOKENS):
            return await self._count(body, request)
        async with self.moving:
            self._check_open()
            id = await self._join(body, request)
            session = await self._bring(id)
            token = self._tokens[id]
            session.held += 1
            self._asked(id)
        try:
            response = await self._complete(token, request)
        except ApiError as error:
            if error.code == unknown_session().code:  # This server ended it, as it ends itself.
                raise _stopping() from None
            raise
        finally:
            session.held -= 1
            self._on_news()
        response.headers[HEADER] = id
        return response

    async def _count(self, body: bytes, request: Request) -> Response:
        """Count the tokens of a prompt that no session is begun for."""
        session = self._made("count")
        try:
            return json_answer({"input_tokens": await session.count_tokens(body, dialect_of(request))})
        finally:
            await session.close()

    async def _list(self, request: Request) -> dict[str, JSON]:
        self._check_key(request, self._options.client_key, "client's")
        return {"object": "list", "data": [describe_model(MODEL)], "has_more": False}

    async def _describe(self, name: str, request: Request) -> dict[str, JSON]:
        self._check_key(request, self._options.client_key, "client's")
        return describe_model(name[:100])

    def _check_key(self, request: Request, expected: str, whose: str) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        found = given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if hmac.compare_digest(found.encode("utf-8", "replace"), expected.encode()):
            return
        self._store.count("wrong_keys")
        is_client = hmac.compare_digest(found.encode("utf-8", "replace"), self._options.client_key.encode())
        if self._is_new(f"wrong key {whose}"):
            said = "the client's key" if is_client else "another key" if found else "no key"
            logger.warning("a request was refused: it needs the %s key, and has %s", whose, said)
        if is_client:
            raise ApiError(403, "A client's key gives no feedback: it needs the operator's.", code="operator_only")
        message = f"Expected the {whose} key, as Authorization: Bearer KEY or x-api-key: KEY; found another, or none."
        raise ApiError(401, message, code="invalid_api_key")

    def _check_open(self) -> None:
        if self._is_closing:
            raise _stopping()

    # Which session

    async def _join(self, body: bytes, request: Request) -> str:
        """Return the id of a request's session; begin a session where there is no such one. Raises ApiError."""
        told, dialect = self._told(body), dialect_of(request)
        name = request.headers.get(HEADER) or as_object(told.get("metadata")).get("session_id")
        if name is not None:
            return self._named(name)
        previous = told.get("previous_response_id")
        if isinstance(previous, str) and (found := self._of_answer(previous)) is not None:
            stored = self._store.find(found)
            if stored is not None and stored.is_open:
                return found
        asked = await self._read(body, dialect)
        for end in range(len(asked.messages) - 1, 0, -1):
            if asked.messages[end]["role"] == "assistant" or asked.messages[end - 1]["role"] != "assistant":
                continue
            if (found := self._store.at(asked.digests[end])) is not None:
                self._joined[found] = asked.digests[end]
                return found
        return self._begin(secrets.token_urlsafe(12), 1)

    async def _read(self, body: bytes, dialect: Dialect) -> Asked:
        work = partial(read, body, dialect, Reading(dialect.api), {}, self._chat, None)
        return await self._thread.submit(work) if len(body) > LONG_BODY else work()

    def _told(self, body: bytes) -> dict[str, JSON]:
        try:
            return as_object(from_json(body))
        except ValueError:
            return {}  # The session says what is wrong.

    def _named(self, name: object) -> str:
        found = ID.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            message = f"{HEADER}: expected 1 to 100 letters, digits, '.', '_', ':' and '-', found {name!r:.120}."
            raise ApiError(400, message, param=HEADER, code="invalid_value")
        stored = self._store.newest_of(found[1])
        if stored is None and found[2] is None:
            return self._begin(found[1], 1)
        if stored is None or (found[2] is not None and int(found[2]) > stored.part):
            raise ApiError(404, f"{HEADER}: no session {name!r:.120} was begun.", param=HEADER, code="unknown_session")
        return stored.id if stored.is_open else self._begin(stored.name, stored.part + 1)

    def _begin(self, name: str, part: int) -> str:
        return self._store.begin(name, part, self._now())

    def _of_answer(self, response: str) -> str | None:
        found = PREFIXES.fullmatch(response)
        return None if found is None else self._store.of_answer(found[1])

    # Sessions in memory

    async def _bring(self, id: str) -> LiveSession:
        """Return a session, from the store where it is not in memory; then the longest silent one makes room.

        Raises ApiError where requests of too many sessions are being answered.
        """
        if id in self.open:
            return self.open[id]
        if len(self.open) >= MOST_AT_ONCE:
            silent = [other for other, one in self.open.items() if not one.is_busy]
            if not silent:
                message = f"Requests of {MOST_AT_ONCE:,} sessions are being answered; ask again later."
                raise ApiError(429, message, code="rate_limit_exceeded")
            await self._put_away(min(silent, key=self._last.__getitem__))
        stored = self._store.find(id)
        session = self._made(id)
        if stored is not None and stored.record is not None and stored.state is not None:
            session.resume(stored.record, stored.state)
        self.open[id], self._tokens[id] = session, (token := secrets.token_urlsafe(24))
        self._sessions[token] = session
        return session

    def _made(self, id: str) -> LiveSession:
        answered = partial(self._answered, id)
        return LiveSession(self._make(id), self._tool_lists, self._thread, strict=False, on_answer=answered)

    def _asked(self, id: str) -> None:
        self._last[id] = now = self._now()
        self._store.asked(id, now)

    def _answered(self, id: str, session: LiveSession, completion: Completion, history: Digest) -> None:
        """Write a session down before its answer is sent."""
        self._last[id] = now = self._now()
        written, left = session.written(), self._joined.pop(id, None)
        answer = completion.id, history
        self._store.keep(id, now, written.versions, written.record, written.state, answer, left)

    async def rest(self, before: float) -> None:
        """Write down sessions that were silent since `before`, and take them from memory."""
        for id, session in list(self.open.items()):
            if not session.is_busy and (session.is_lost or self._last[id] <= before):
                async with self.moving:
                    if self.open.get(id) is session and not session.is_busy:
                        await self._put_away(id)

    async def _put_away(self, id: str) -> None:
        session, last = self.open.pop(id), self._last.pop(id, self._now())
        self._sessions.pop(self._tokens.pop(id), None)
        self._joined.pop(id, None)
        if session.is_lost:  # The store has it as its last answer left it.
            await session.close()
            return
        written = await session.end()
        self._store.keep(id, last, written.versions, written.record, written.state)

    # Feedback

    async def _give(self, request: Request) -> Response:
        """Take the operator's feedback on a session."""
        self._check_key(request, self._options.operator_key, "operator's")
        try:
            told = await report_body(request)
            self._check_open()
            id, value, key, comment = self._feedback_in(told)
            fate = self._store.give(id, value, self._now(), key=key, comment=comment)
        except UnknownSession as unknown:
            self._store.count("feedback_unknown")
            message = (
                f"session: no session {str(unknown)!r:.120} was begun here. It is the header {HEADER} of an answer."
            )
            raise ApiError(404, message, param="session", code="unknown_session") from None
        except KeyReused:
            self._store.count("feedback_refused")
            message = "id: it was posted before, for another session or with another value; nothing is taken."
            raise ApiError(409, message, param="id", code="id_reused") from None
        except (TypeError, ValueError) as error:
            self._store.count("feedback_refused")
            raise ApiError(400, f"feedback: {error}", code="invalid_value") from None
        self._on_news()
        return json_answer({"session": id, "status": fate.value})

    def _feedback_in(self, body: bytes) -> tuple[str, float, str | None, str | None]:
        """Read feedback: session, value, key and comment. Raises TypeError or ValueError; UnknownSession."""
        told: JSON = from_json(body, allow_inf_nan=False)
        if not isinstance(told, dict):
            raise TypeError(f"expected an object with {', '.join(FIELDS)}, found {told!r:.80}")
        if unknown := sorted(told.keys() - set(FIELDS)):
            raise TypeError(f"expected {', '.join(FIELDS)}, found {unknown[0]!r:.80}")
        value = told.get("value")
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= LARGEST:
            raise TypeError(f"value: expected a finite number of at most {LARGEST:g}, found {value!r:.80}")
        texts: dict[str, str | None] = {}
        for name, most in (("session", 120), ("response", 200), ("comment", LONGEST_COMMENT), ("id", LONGEST_KEY)):
            text = told.get(name)
            if text is not None and (not isinstance(text, str) or not 0 < len(text) <= most):
                raise TypeError(f"{name}: expected 1 to {most:,} characters, found {text!r:.80}")
            texts[name] = text
        session, response = texts["session"], texts["response"]
        if (session is None) == (response is None):
            raise TypeError("expected one of session (the header of an answer) and response (its id)")
        if response is not None and (session := self._of_answer(response)) is None:
            raise UnknownSession(response)
        assert session is not None
        return session, float(value), texts["id"], texts["comment"]


def _stopping() -> ApiError:
    return ApiError(503, "The server is stopping; ask it again when it is back.", code="stopping")
