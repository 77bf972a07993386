"""Records of logs, joined to sessions and branches, as rows of conversations.

Reads per-call logs of OpenAI's and Anthropic's APIs, whole conversations (`forms`), spans of OpenTelemetry (`spans`)
and runs of LangSmith (`runs`), joins calls to sessions and branches (`sessions`) and takes secrets out (`scrub`). A
row is a branch; a report says what became of each record.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from agentrl.errors import DataError
from agentrl.openai_api.errors import ApiError
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from data_prep.conversation_formats import BadConversation, Conversation
from data_prep.files import Row
from data_prep.left_out import LeftOut, LeftOuts
from data_prep.records import Record, read_whole_records
from data_prep.tool_conversations import SCHEMA as CONVERSATIONS
from data_prep.tool_conversations import SERVED, checked
from data_prep.traces.feedback import Applied, Said, Vote, apply, is_vote, unread_around, unread_feedback, votes_in
from data_prep.traces.forms import SPANS, Around, Later, Reader, Waits, records_in
from data_prep.traces.runs import MODEL, run_kind
from data_prep.traces.scrub import Scrubber
from data_prep.traces.sessions import Branch, Call, Joined, Session, join
from data_prep.traces.spans import Spans

SCHEMA = pa.schema(
    [
        *CONVERSATIONS,
        ("session", pa.string()),
        ("branch", pa.int64()),
        ("model", pa.string()),
        ("began", pa.string()),
        ("feedback", pa.float64()),
        ("comment", pa.string()),
    ]
)
OTHERS = {"SPAN", "EVENT", "TOOL", "AGENT", "CHAIN", "RETRIEVER", "EMBEDDING", "GUARDRAIL", "EVALUATOR"}
"""Kinds of Langfuse's observations that are no calls of a model."""


@dataclass(slots=True)
class Traces:
    """A log while it is read, joined and written."""

    scrubber: Scrubber
    strict: bool = False
    scores: Sequence[str] = ()
    reader: Reader = field(default_factory=Reader)
    spans: Spans = field(default_factory=Spans)
    calls: list[Call] = field(default_factory=list)
    votes: list[Vote] = field(default_factory=list)
    records: int = 0
    """Number of records: those with calls, feedback alone, and the skipped and the dropped ones."""
    used: int = 0
    """Number of records with calls."""
    votes_alone: int = 0
    """Number of records that are feedback alone."""
    unheard: LeftOuts = field(default_factory=LeftOuts)
    """Feedback that cannot be read, in records with calls."""
    read: Counter[str] = field(default_factory=Counter)
    """Number of calls by form."""
    skipped: LeftOuts = field(default_factory=LeftOuts)
    """Records that are no calls."""
    dropped: LeftOuts = field(default_factory=LeftOuts)
    """Records that cannot be used."""
    left_out: LeftOuts = field(default_factory=LeftOuts)
    """Branches that are not written."""
    rows: int = 0
    judged: int = 0
    """Number of rows with feedback."""
    applied: Applied = field(default_factory=Applied)
    joined: Joined = field(default_factory=Joined)
    _waiting: dict[str, list[Record]] = field(default_factory=lambda: defaultdict(list))
    """Records by the id of the answer that they continue."""
    _kept: dict[str, list[tuple[float | None, Record]]] = field(default_factory=lambda: defaultdict(list))
    """Records with their times, by the conversation of a server that they are of."""

    def take(self, paths: Sequence[Path]) -> None:
        """Read files. Raises DataError for one that cannot be opened, and with `strict` for the first bad record."""
        for path in paths:
            for record in read_whole_records(path, self._broken):
                for one in records_in(record):
                    if isinstance(one, Around):
                        self._hear_around(one)
                    elif not self.spans.add(one):
                        self.records += 1
                        self._take(one)
        for one, error in self.spans.records():
            self.records += 1
            if error is None:
                self._take(one, SPANS)
            elif error.reason == "no call of a model":
                self._add(self.skipped, str(error), f"{one.where}: {error}")
            else:
                self._drop(error.reason, one.where, str(error))
        for kept in self._kept.values():
            if all(time is not None for time, _ in kept):
                kept.sort(key=lambda one: one[0] or 0)
            for _, one in kept:
                self._take(one, in_order=True)
        for id, records in self._waiting.items():
            for one in records:
                reason = "it continues an answer that is not in the log"
                self._drop(reason, one.where, f"{reason}: {id!r}")

    def _broken(self, where: str, why: str) -> None:
        self.records += 1
        self._drop(f"no record: {why.partition(' (')[0]}", where, why)

    def _take(self, record: Record, form: str | None = None, *, in_order: bool = False) -> None:
        """Read a record, and then those that waited for its answer."""
        todo = [record]
        while todo:
            one = todo.pop()
            try:
                if kind := other_kind(one.fields):
                    self._add(
                        self.skipped, f"no call of a model: {kind}", f"{one.where}: no call of a model, but {kind}"
                    )
                    continue
                if is_vote(one.fields):
                    self.votes += votes_in(one.fields, one.where)
                    self.votes_alone += 1
                    continue
                calls = self.reader.calls(one, form, in_order=in_order)
                self.calls += calls
                self.used += 1
                self.read.update(call.form for call in calls)
                for call in calls:
                    for id in call.ids:
                        todo += self._waiting.pop(id, ())
                self._hear(one, calls)
            except Waits as wait:
                self._waiting[wait.id].append(one)
            except Later as later:
                self._kept[later.conversation].append((later.time, one))
            except (BadConversation, ApiError, ValueError, RecursionError) as error:
                self._bad(one, form, error)

    def _hear(self, record: Record, calls: Sequence[Call]) -> None:
        """Take the feedback in a record with calls. Feedback on a whole conversation is about its last answer."""
        about = calls[-1:] if calls[-1].whole is not None else calls
        self.reader.unread.update(unread_feedback(record.fields))
        try:
            self.votes += votes_in(record.fields, record.where, about)
        except BadConversation as error:
            detail = self._quiet_detail(record, None, error)
            self._refuse_if_strict(f"{record.where}: {detail}")
            self._add(self.unheard, error.reason, f"{record.where}: {detail}")

    def _hear_around(self, record: Around) -> None:
        """Take the feedback that stands around records as a record of its own, about their session or trace."""
        self.reader.unread.update(unread_around(record.fields))
        try:
            votes = list(votes_in(record.fields, record.where, around=True))
            self.votes += votes
            self.votes_alone += len(votes)
            self.records += len(votes)
        except BadConversation as error:
            self.records += 1
            self._bad(record, None, error)

    def _bad(self, record: Record, form: str | None, error: Exception) -> None:
        """Count a record that cannot be used."""
        self._drop(reason_of(error), record.where, self._quiet_detail(record, form, error))

    def _quiet_detail(self, record: Record, form: str | None, error: Exception) -> str:
        """Make an error's message again of a record without secrets, as it may quote and cut them."""
        detail = ""
        try:
            scrubber = quiet(self.scrubber)
            scrubber.begin([record.fields])
            clean = Record(record.where, cast(dict[str, JSON], scrubber.json(record.fields)))
            around = isinstance(record, Around)
            is_call = not around and not is_vote(clean.fields)
            calls = Reader().calls(clean, form, in_order=True) if is_call else ()
            list(votes_in(clean.fields, clean.where, calls, around=around))
        except Waits:
            pass
        except (BadConversation, ApiError, ValueError, RecursionError) as again:
            if reason_of(again) == reason_of(error):
                detail = str(again)
        return detail or reason_of(error)

    def _drop(self, reason: str, where: str, detail: str) -> None:
        self._refuse_if_strict(f"{where}: {detail}")
        self._add(self.dropped, reason, f"{where}: {detail}")

    def _refuse_if_strict(self, told: str) -> None:
        if self.strict:
            raise DataError(f"{told}. Mend it, or leave out --strict")

    def _add(self, found: LeftOuts, reason: str, first: str) -> None:
        """Count a reason, without secrets."""
        clean = quiet(self.scrubber)
        found.add(clean.text(reason), clean.text(first))

    def join(self) -> None:
        """Join all calls that were read."""
        self.joined = join(self.calls, self.reader.tree)
        self.applied = apply(self.votes, self.joined, self.calls, self.scores)

    def split(self, share: float) -> tuple[list[tuple[int, Session]], list[tuple[int, Session]]]:
        """Split sessions: (those to train on, those held out), each with its number."""
        sessions = list(enumerate(self.joined.sessions, start=1))
        if not share:
            return sessions, []
        digests = {number: self._digest(session) for number, session in sessions}
        chosen = sorted(digests, key=lambda number: digests[number])[: max(1, round(share * len(sessions)))]
        held = set(chosen)
        return [one for one in sessions if one[0] not in held], [one for one in sessions if one[0] in held]

    def _digest(self, session: Session) -> bytes:
        first = session.branches[0].calls[0]
        name = self.reader.tree.digest(first.prompt) if session.id is None else session.id.encode(errors="replace")
        return hashlib.blake2b(name, digest_size=16).digest()

    def rows_of(self, sessions: Sequence[tuple[int, Session]]) -> Iterator[Row]:
        """Iterate over the rows of sessions."""
        for number, session in sessions:
            self.scrubber.begin(self._texts(session))
            learnt = set[int]()
            for index, branch in enumerate(session.branches):
                row = self._row(number, index, branch, learnt)
                if row is not None:
                    self.rows += 1
                    self.judged += row["feedback"] is not None
                    yield row

    def _texts(self, session: Session) -> Iterator[JSON]:
        """Iterate over what the rows of a session hold."""
        for branch in session.branches:
            calls = branch.path()
            yield cast(JSON, self._conversation(calls, set()).messages)
            yield calls[-1].tools
            yield self.applied.branches.get(branch, Said()).comment

    def _row(self, number: int, index: int, branch: Branch, learnt: set[int]) -> Row | None:
        """Write a branch; None where it cannot be learnt from. `learnt`: calls of the session's earlier rows."""
        calls = branch.path()
        where = branch.calls[0].where
        self.scrubber.where = where
        found = self._conversation(calls, learnt)
        try:
            messages = checked(found, SERVED)
        except BadConversation as error:
            clean = quiet(self.scrubber)
            quoted = Conversation(
                [cast(dict[str, Any], clean.json(cast(JSON, one))) for one in found.messages],
                cast(list[ToolSchema], clean.json(cast(JSON, found.tools))),
                ends_with_calls=True,
            )
            detail = error.reason
            try:
                checked(quoted, SERVED)
            except BadConversation as again:
                detail = str(again) if again.reason == error.reason else detail
            self._refuse_if_strict(f"{where}: {detail}")
            self._add(self.left_out, error.reason, f"{where}: {detail}")
            return None
        learnt.update(id(call) for call in calls)
        said = self.applied.branches.get(branch, Said())
        return {
            "messages": [self._clean(message) for message in messages],
            "tools": self.scrubber.text(calls[-1].tools) if calls[-1].tools else None,
            "session": self._name(branch.session, number),
            "branch": index,
            "model": None if calls[-1].model is None else self.scrubber.text(calls[-1].model),
            "began": None if calls[0].time is None else datetime.fromtimestamp(calls[0].time, UTC).isoformat(),
            "feedback": said.value,
            "comment": None if said.comment is None else self.scrubber.text(said.comment),
        }

    def _conversation(self, calls: Sequence[Call], learnt: set[int]) -> Conversation:
        """Make a branch's messages: answers as they were logged, all others as the last prompt has them.

        Turns of the assistant that an earlier row has, or that no call of the log answered, get the weight 0.
        """
        tree, last = self.reader.tree, calls[-1]
        answered = dict[int, tuple[Message, bool]]()
        for call in calls:
            for place, turn in zip(tree.up(call.end), reversed(call.turns), strict=False):
                answered[place] = (turn, id(call) not in learnt)
        messages = list[Message]()
        given = [*self.reader.shown.path(last.shown), *last.turns]
        for place, written in zip(list(tree.up(last.end))[::-1], given, strict=True):
            message, is_new = answered.get(place, (written, False))
            made = cast(Message, dict(message))
            if made["role"] == "assistant" and not is_new:
                made["weight"] = 0
            messages.append(made)
        tools = cast(list[ToolSchema], json.loads(last.tools)) if last.tools else []
        return Conversation(cast(list[dict[str, Any]], messages), tools, ends_with_calls=True)

    def _clean(self, message: Message) -> Message:
        """Replace secrets in a message. Calls' ids and roles are ours."""
        text = self.scrubber.text
        made = cast(Message, {**message, "content": text(str(message["content"]))})
        for name in ("name", "reasoning_content"):
            if name in made:
                made[name] = text(str(made[name]))
        if "tool_calls" in made:
            made["tool_calls"] = [
                {
                    **call,
                    "function": {
                        "name": text(call["function"]["name"]),
                        "arguments": text(str(call["function"].get("arguments", "{}"))),
                    },
                }
                for call in made["tool_calls"]
            ]
        return made

    def _name(self, session: Session, number: int) -> str:
        """Name a session: by its id, unless that holds a secret."""
        if session.id is not None and self.scrubber.text(session.id) == session.id:
            return session.id
        return f"session-{number:06d}"

    def report(self) -> dict[str, JSON]:
        """Write what became of each record."""
        branches = sum(len(session.branches) for session in self.joined.sessions)
        said = self.applied.branches.values()
        return {
            "records": self.records,
            "records_used": self.used,
            "records_of_feedback": self.votes_alone,
            "calls": dict(sorted(self.read.items())),
            "joined_by": dict(sorted(self.joined.by.items())),
            "repeated_calls": len(self.joined.repeated),
            "sessions": len(self.joined.sessions),
            "branches": branches,
            "rows": self.rows,
            "skipped": _counts(self.skipped),
            "dropped": _counts(self.dropped),
            "left_out": _counts(self.left_out),
            "feedback": {
                "found": self.applied.found,
                "branches": sum(one.value is not None for one in said),
                "rows": self.judged,
                "positive": sum((one.value or 0) > 0 for one in said),
                "negative": sum((one.value or 0) < 0 for one in said),
                "zero": sum(one.value == 0 for one in said),
                "comments": sum(one.comment is not None for one in said),
                "problems": _counts(self.told_votes()),
            },
            "scrubbed": {
                name: {"count": one.count, "first": quiet(self.scrubber).text(one.first)}
                for name, one in sorted(self.scrubber.taken.items())
            },
            "not_read": {quiet(self.scrubber).text(name): n for name, n in sorted(self.reader.unread.items())},
        }

    def told_votes(self) -> LeftOuts:
        """Return what became of feedback that was not used, without secrets."""
        clean, text = LeftOuts(), quiet(self.scrubber).text
        for found in (self.applied.problems, self.unheard):
            for reason, one in found.reasons.items():
                clean.reasons[reason] = LeftOut(text(one.first), one.count, [text(place) for place in one.further])
        return clean


def other_kind(fields: Mapping[str, JSON]) -> str:
    """Return the kind of a record that is no call of a model, or ""."""
    if (run := run_kind(fields)) is not None:
        return "" if run == MODEL else run
    kind = str(fields.get("type"))
    return kind if kind in OTHERS else ""


def _counts(found: LeftOuts) -> JSON:
    return {
        reason: {"count": one.count, "first": one.first, **({"further": [*one.further]} if one.further else {})}
        for reason, one in found.by_count()
    }


def quiet(scrubber: Scrubber) -> Scrubber:
    """Return a scrubber by the same rules, for the same session, whose findings are not counted."""
    return Scrubber(scrubber.rules, counts=False, known=scrubber.known)


def reason_of(error: Exception) -> str:
    """Return the reason by which an error is counted: without what differs from record to record."""
    if isinstance(error, BadConversation):
        return error.reason
    if isinstance(error, ApiError):
        place = "".join("[]" if part.isdecimal() else part for part in _INDEX.split(error.param or "the body"))
        return f"not readable: {place}"
    return f"not readable: {type(error).__name__}"


_INDEX = re.compile(r"\[([0-9]+)\]")
