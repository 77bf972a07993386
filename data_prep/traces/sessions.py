"""Calls of a log, joined to sessions and their branches by common beginnings.

Each prompt is a path in one tree of messages, so that a message which a thousand later prompts repeat is held once. A
call is found to continue another by looking up the places of its own path: the time is linear in the size of the log.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from agentrl.openai_api.history import Defaults, Digest, digest_after
from agentrl.trajectory import Message

ROOT = 0


@dataclass(slots=True)
class Tree:
    """Messages behind their beginnings. Two messages are the same as `history.digest_after` says."""

    exact: bool = False
    """True: two messages are the same only when they are written alike."""
    messages: list[Message] = field(default_factory=lambda: [cast(Message, {})])
    _before: list[int] = field(default_factory=lambda: [ROOT])
    _digests: list[Digest] = field(default_factory=lambda: [b""])
    _places: dict[Digest, int] = field(default_factory=dict)

    def extended(self, place: int, messages: Sequence[Message], defaults: Defaults = MappingProxyType({})) -> int:
        """Return the place of a conversation: `place`, then `messages`."""
        for message in messages:
            digest = self._digest_after(self._digests[place], message, defaults)
            known = self._places.get(digest)
            if known is None:
                known = self._places[digest] = len(self.messages)
                self.messages.append(message)
                self._before.append(place)
                self._digests.append(digest)
            place = known
        return place

    def _digest_after(self, before: Digest, message: Message, defaults: Defaults) -> Digest:
        if self.exact:
            return hashlib.blake2b(before + json.dumps(message, sort_keys=True).encode(), digest_size=16).digest()
        answered = message.get("tool_call_id", "")  # a number in its turn, see forms.numbered
        return digest_after(before + answered.encode(), message, defaults, doubles=False)

    def up(self, place: int) -> Iterator[int]:
        """Yield the places of a conversation, the last first."""
        while place != ROOT:
            yield place
            place = self._before[place]

    def path(self, place: int) -> list[Message]:
        """List the messages of a conversation."""
        return [self.messages[place] for place in self.up(place)][::-1]

    def digest(self, place: int) -> Digest:
        """Digest of a conversation."""
        return self._digests[place]


@dataclass(frozen=True, slots=True)
class Whole:
    """A record that is a conversation with all of its answers, each of which is a call."""

    where: str
    end: int
    """Place behind its last message."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a model."""

    where: str
    form: str
    prompt: int
    """Place in the tree."""
    end: int
    """Place of prompt and answer."""
    turns: list[Message]
    """The answer; more than one turn where a provider's tool ran between them."""
    tools: str
    """JSON text."""
    shown: int = ROOT
    """Place of the prompt in the tree of messages as they were written."""
    ids: tuple[str, ...] = ()
    """Names that the log has for the call, its answer's id among them."""
    session: str | None = None
    trace: str | None = None
    model: str | None = None
    time: float | None = None
    """Seconds since 1970."""
    depth: int = 0
    """Number of messages of the prompt; of a whole conversation, of all of it."""
    whole: Whole | None = None
    """Conversation that the call was read of, if its record is one."""
    order: int = 0
    """Its place in the log, by time and then as it stands there."""
    repeats: Call | None = None
    """Earlier call of the session with the same prompt, tools and answer."""
    before: Call | None = None
    """Call that this one continues."""
    branch: Branch | None = None


@dataclass(slots=True, eq=False)
class Branch:
    """Calls that continue one another. Its beginning may be another branch's."""

    session: Session
    calls: list[Call]
    """Its own."""

    def path(self) -> list[Call]:
        """List all its calls, those of its beginning, too."""
        found, call = list[Call](), cast(Call | None, self.calls[-1])
        while call is not None:
            found.append(call)
            call = call.before
        return found[::-1]


@dataclass(slots=True, eq=False)
class Session:
    """Branches that belong together."""

    id: str | None
    """Name that the log gave."""
    branches: list[Branch] = field(default_factory=list)


@dataclass(slots=True)
class Joined:
    """Sessions of a log, in order, and how their calls were found to belong together."""

    sessions: list[Session] = field(default_factory=list)
    by: dict[str, int] = field(default_factory=dict)
    """Number of calls by what joined them to their session."""
    repeated: list[Call] = field(default_factory=list)


def join(calls: Sequence[Call], tree: Tree) -> Joined:
    """Join calls to sessions. They are taken by time; without one, short prompts first, then in the log's order.

    - A call with a session's id belongs to that session; otherwise one with a trace's id to the session of the trace. A
      session without an id takes that of a later call of its trace.
    - Otherwise all calls of a whole conversation belong to one session: its own, or that of an earlier one which it
      continues.
    - Otherwise it belongs to the session of a call whose prompt and answer its prompt begins with.
    - Otherwise to the session without an id of a call that has the same first user message, and all before it: an
      answer was asked for again, or a later question was edited. Where the answer is the same, too, somebody else asked
      the same, and the session is another one, unless both calls have an id in common.
    - In a session, a call continues the call with the longest prompt and answer that its prompt begins with, and the
      same tools. The first that does so stays in its branch. All others open one.
    """
    joining = _Joining(tree)
    for call in _ordered(calls):
        joining.add(call)
    return joining.found


def _ordered(calls: Sequence[Call]) -> list[Call]:
    """Order calls; one without a time has that of the call before it in the log."""
    last, times = float("-inf"), list[float]()
    for call in calls:
        last = last if call.time is None else call.time
        times.append(last)
    for number, index in enumerate(sorted(range(len(calls)), key=lambda index: (times[index], index))):
        calls[index].order = number
    order = sorted(range(len(calls)), key=lambda index: (times[index], calls[index].depth, index))
    return [calls[index] for index in order]


class _Joining:
    def __init__(self, tree: Tree) -> None:
        self.found = Joined()
        self._tree = tree
        self._named: dict[tuple[str, str], Session] = {}
        self._answered: dict[int, dict[Session, None]] = {}
        """Sessions by the place behind an answer; of several, those that no call continued yet."""
        self._asked: dict[int, Session] = {}
        """Sessions without ids by the place behind the first user message."""
        self._wholes: dict[int, list[Session]] = {}
        """Sessions of whole conversations by the place behind their end, until another record continues them."""
        self._ends: dict[tuple[int, int, str], list[Call]] = {}
        self._first: dict[tuple[object, ...], Call] = {}
        """First call with an answer to a prompt in a session."""

    def add(self, call: Call) -> None:
        session, why = self._session_of(call)
        if call.session is not None:
            self._named.setdefault(("session", call.session), session)
        if call.trace is not None:
            self._named.setdefault(("trace", call.trace), session)
        self._answered.setdefault(call.end, {}).setdefault(session)
        if call.session is None and call.whole is not None:
            self._name_whole(call.whole, session)
        elif call.session is None and (asked := self._first_question(call)) is not None:
            self._asked.setdefault(asked, session)
        self.found.by[why] = self.found.by.get(why, 0) + 1
        call.repeats = self._same(call, session)
        if call.repeats is not None:
            call.branch = call.repeats.branch
            self.found.repeated.append(call)
            return
        self._place(call, session)
        self._ends.setdefault((id(session), call.end, call.tools), []).append(call)
        self._first[_key(call, session)] = call

    def _same(self, call: Call, session: Session) -> Call | None:
        """Find the call of a session with the same prompt, tools and answer."""
        return self._first.get(_key(call, session))

    def _session_of(self, call: Call) -> tuple[Session, str]:
        if call.session is not None:
            if found := self._named.get(("session", call.session)):
                return found, "the session's id"
            found = None if call.trace is None else self._named.get(("trace", call.trace))
            if found is not None and found.id is None:
                found.id = call.session
                return found, "the trace's id"
        else:
            if call.trace is not None and (found := self._named.get(("trace", call.trace))):
                return found, "the trace's id"
            if call.whole is not None:
                return self._session_of_whole(call.whole)
            for place in self._tree.up(call.prompt):
                if sessions := self._answered.get(place):
                    last, _ = sessions.popitem() if len(sessions) > 1 else (next(iter(sessions)), None)
                    return last, "the prompt and answer that it continues"
            asked = self._first_question(call)
            if asked is not None and (found := self._asked.get(asked)):
                same = self._same(call, found)
                if same is None or {*same.ids}.intersection(call.ids):
                    return found, "the same first question"
        return self._opened(call.session)

    def _session_of_whole(self, whole: Whole) -> tuple[Session, str]:
        if found := self._named.get(("conversation", whole.where)):
            return found, "the conversation that it stands in"
        begun = (place for place in self._tree.up(whole.end) if place != whole.end)
        if sessions := next((self._wholes[place] for place in begun if self._wholes.get(place)), None):
            return sessions.pop(), "the conversation that it continues"
        return self._opened(None)

    def _name_whole(self, whole: Whole, session: Session) -> None:
        """Remember the session of a conversation, at its first call."""
        if ("conversation", whole.where) not in self._named:
            self._named["conversation", whole.where] = session
            self._wholes.setdefault(whole.end, []).append(session)

    def _opened(self, id: str | None) -> tuple[Session, str]:
        session = Session(id)
        self.found.sessions.append(session)
        return session, "nothing: it opens a session"

    def _first_question(self, call: Call) -> int | None:
        """Return the place behind the first user message of a prompt."""
        found = None
        for place in self._tree.up(call.prompt):
            if self._tree.messages[place]["role"] == "user":
                found = place
        return found

    def _place(self, call: Call, session: Session) -> None:
        for place in self._tree.up(call.prompt):
            if ends := self._ends.get((id(session), place, call.tools)):
                earlier = (one for one in reversed(ends) if one.order < call.order)
                call.before = next(earlier, ends[-1])
                break
        branch = None if call.before is None else call.before.branch
        if branch is None or branch.calls[-1] is not call.before:
            branch = Branch(session, [])
            session.branches.append(branch)
        branch.calls.append(call)
        call.branch = branch


def _key(call: Call, session: Session) -> tuple[object, ...]:
    return (id(session), call.prompt, call.end, call.tools, reasoning(call))


def reasoning(call: Call) -> tuple[str | None, ...]:
    """Return the reasoning of each turn of an answer."""
    return tuple(turn.get("reasoning_content") for turn in call.turns)
