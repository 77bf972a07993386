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
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple, NoReturn

from fastapi import FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from agentrl.agent_loop.base import Episode
from agentrl.agents.task import LARGEST, MODEL
from agentrl.chat import Chat
from agentrl.errors import DataError
from agentrl.openai_api.asked import Asked
from agentrl.openai_api.dialect import Conversation, Dialect
from agentrl.openai_api.endpoint import (
    COUNT_TOKENS,
    DIALECTS,
    FEEDBACK,
    Endpoint,
    describe_model,
    dialect_of,
    elsewhere,
    json_answer,
    report_body,
)
from agentrl.openai_api.errors import NO_ROOM, ApiError, unknown_session
from agentrl.openai_api.history import Digest
from agentrl.openai_api.session import Call, Session
from agentrl.serve.options import FLAGS, LiveOptions
from agentrl.serve.session import LiveSession, continued
from agentrl.serve.store import KeyReused, Store, StoredSession, UnknownSession
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


class _Claim(NamedTuple):
    """Names of a request's session."""

    name: JSON
    answer: JSON
    """Id of the answer that it continues."""


class LiveEndpoint(Endpoint):
    """Server of live sessions. Call its methods on the loop that started it."""

    address_keys = FLAGS

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
        self._kept: dict[str, dict[str, Conversation]] = {}
        """Conversations of sessions that were silent, which a request may continue by the id of their last answer."""
        self._tokens: dict[str, str] = {}
        """Names by which the routes of `Endpoint` know them."""
        self._reader = self._made("reader")
        """Reads requests before their session is known; nothing is recorded there."""
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
        asked, claim = await self._read(body, request)
        async with self.moving:
            self._check_open()
            session = await self._hold(self._join(asked, claim), asked)
        try:
            response = await self._answer_in(session, asked, request)
        except ApiError as error:
            if error.code != NO_ROOM or not session.branches.all:
                raise
            async with self.moving:
                self._check_open()
                full, session = session, await self._hold(self._next(session.id), asked)
                session.kept |= full.kept
            response = await self._answer_in(session, asked, request)
        response.headers[HEADER] = session.id
        return response

    async def _hold(self, id: str, asked: Asked) -> LiveSession:
        """Return a session, which stays in memory until the request is answered."""
        session = await self._bring(id)
        self._asked(session.id)
        session.held.append(asked)
        return session

    async def _answer_in(self, session: LiveSession, asked: Asked, request: Request) -> Response:
        """Answer a request in the session that is held for it. A session that only refused requests never began."""
        is_answered = False
        try:
            response = await self.complete(self._tokens[session.id], request, asked)
            is_answered = True
            return response
        except ApiError as error:
            if error.code == unknown_session().code:  # This server ended it, as it ends itself.
                raise _stopping() from None
            raise
        finally:
            session.held.remove(asked)
            if not is_answered:
                await self._undo(session)
            self._on_news()

    async def _undo(self, session: LiveSession) -> None:
        async with self.moving:
            id = session.id
            if self.open.get(id) is session and not session.is_busy and self._store.undo(id):
                self._forget(id)
                await session.close()

    def _refused(self, session: Session, error: ApiError, dialect: Dialect) -> None:
        session.refused(error)
        if error.status == 400 and error.code != NO_ROOM and self._is_new(f"refused {dialect.path} {error.code}"):
            logger.warning("a client's request (POST %s) was refused: %s", dialect.path, error.message)

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

    async def _read(self, body: bytes, request: Request) -> tuple[Asked, _Claim]:
        """Read a request, and what it says of its session. No session begins by it. Raises ApiError."""
        dialect = dialect_of(request)
        kept: dict[str, Conversation] = {}
        try:
            told = await self._reader.parse(body)
            claim = _claim_in(as_object(told.value), request.headers.get(HEADER))
            async with self.moving:
                self._check_open()
                if (claimed := self._claimed(claim)) is not None and claimed.goes_on:
                    kept |= (await self._bring(claimed.id)).kept
            asked = await self._reader.read(told, dialect, kept)
            self._reader.check_asked(asked)
        except ApiError as error:
            if error.status == 400:
                error.message += await elsewhere(body, dialect)
                self._refused(self._reader, error, dialect)
            raise
        return asked, claim

    def _join(self, asked: Asked, claim: _Claim) -> str:
        """Return the id of a request's session; begin a session where there is no such one. Raises ApiError."""
        claimed = self._claimed(claim)
        if claimed is not None and claimed.goes_on:
            return claimed.id
        if claim.name is not None:
            return self._begin(str(claim.name), 1) if claimed is None else self._next(claimed.id)
        for digest in continued(asked):
            # A place that a running request continues is that client's.
            if (found := self._store.at(digest, but=partial(self._is_continued, digest))) is not None:
                return found
        return self._begin(secrets.token_urlsafe(12), 1)

    def _is_continued(self, digest: Digest, id: str) -> bool:
        return id in self.open and self.open[id].is_continued(digest)

    def _claimed(self, claim: _Claim) -> StoredSession | None:
        """Find the session that a request names: the newest part of a name, else the session of an answer.

        Raises ApiError for a name of another form, and for a part that was never begun.
        """
        name = claim.name
        if name is None:
            id = self._of_answer(claim.answer) if isinstance(claim.answer, str) else None
            return None if id is None else self._store.find(id)
        found = ID.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            message = f"{HEADER}: expected 1 to 100 letters, digits, '.', '_', ':' and '-', found {name!r:.120}."
            raise ApiError(400, message, param=HEADER, code="invalid_value")
        stored = self._store.newest_of(found[1])
        if found[2] is not None and (stored is None or int(found[2]) > stored.part):
            raise ApiError(404, f"{HEADER}: no session {name!r:.120} was begun.", param=HEADER, code="unknown_session")
        return stored

    def _next(self, id: str) -> str:
        """Begin the next part of a session's name."""
        stored = self._store.find(id)
        assert stored is not None
        newest = self._store.newest_of(stored.name)
        return self._begin(stored.name, 1 + (stored if newest is None else newest).part)

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
            session = self.open[id]
            if session.is_busy or not session.is_lost:
                return session
            await self._put_away(id)
        if len(self.open) >= MOST_AT_ONCE:
            silent = [other for other, one in self.open.items() if not one.is_busy]
            if not silent:
                message = f"Requests of {MOST_AT_ONCE:,} sessions are being answered; ask again later."
                raise ApiError(429, message, code="rate_limit_exceeded")
            await self._put_away(min(silent, key=self._last.__getitem__))
        stored = self._store.find(id)
        session = self._made(id)
        if stored is not None and stored.record is not None and stored.state is not None:
            try:
                session.resume(stored.record, stored.state)
            except DataError as error:
                logger.error("session %s cannot go on: %s. Its client begins another part of it", id, error)
                self._store.stop(id)
                return await self._bring(self._next(id))
        session.kept |= self._kept.pop(id, {})
        self._last[id] = self._now() if stored is None else stored.last
        self.open[id], self._tokens[id] = session, (token := secrets.token_urlsafe(24))
        self._sessions[token] = session
        return session

    def _made(self, id: str) -> LiveSession:
        return LiveSession(id, self._make(id), self._tool_lists, self._thread, on_answer=self._answered)

    def _asked(self, id: str) -> None:
        self._last[id] = now = self._now()
        self._store.asked(id, now)

    def _answered(self, session: LiveSession, call: Call) -> None:
        """Write a session down before its answer is sent."""
        self._last[session.id] = now = self._now()
        written, answer = session.written(), (call.begun.id, call.branch.digest)
        left = [*continued(call.asked), *session.dropped]
        self._store.keep(session.id, now, written.versions, written.record, written.state, answer, left)
        session.dropped.clear()  # The same answer may be sampled again.

    async def rest(self, before: float) -> None:
        """Write down sessions that were silent since `before`, and take them from memory."""
        for id, session in list(self.open.items()):
            if not session.is_busy and (session.is_lost or self._last[id] <= before):
                async with self.moving:
                    if self.open.get(id) is session and not session.is_busy:
                        await self._put_away(id)

    async def _put_away(self, id: str) -> None:
        session, last = self._forget(id)
        if session.kept:
            self._kept[id] = session.kept
        if len(self._kept) > MOST_AT_ONCE:
            del self._kept[next(iter(self._kept))]
        if session.is_lost:  # The store has it as its last answer left it.
            await session.close()
            return
        written = await session.end()
        self._store.keep(id, last, written.versions, written.record, written.state, left=session.dropped)

    def _forget(self, id: str) -> tuple[LiveSession, float]:
        """Take a session from memory; return it, and the time of its last request or answer."""
        self._sessions.pop(self._tokens.pop(id), None)
        return self.open.pop(id), self._last.pop(id, self._now())

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


def _claim_in(told: Mapping[str, JSON], name: str | None) -> _Claim:
    """Read what a request says of its session. `name`: its header, which counts before its body."""
    answer = told.get("previous_response_id") or as_object(told.get("thread")).get("previous_message_id")
    return _Claim(name or as_object(told.get("metadata")).get("session_id"), answer)


def _stopping() -> ApiError:
    return ApiError(503, "The server is stopping; ask it again when it is back.", code="stopping")
