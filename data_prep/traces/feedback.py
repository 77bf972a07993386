"""Feedback in a log: thumbs, scores and comments, and the branches that they are about."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.data.feedback import feedback_of
from agentrl.data.messages import Unfit
from agentrl.system.json_value import JSON, as_list
from data_prep.conversation_formats import BadConversation
from data_prep.left_out import LeftOuts
from data_prep.records import opened
from data_prep.traces.forms import IDS, REQUESTS, RESPONSES, SESSIONS, TRACES, Fields, first_id, inside
from data_prep.traces.sessions import Branch, Call, Joined

VALUES = ("feedback", "user_feedback", "thumbs", "thumb", "rating", "score", "feedback_rating", "value")
"""Members that hold feedback; the last only in records of their own."""
SURE = ("feedback", "user_feedback", "thumbs", "thumb", "rating", "feedback_rating")
"""Members of a record's metadata that are read, too; a score there may be anything's."""
INSIDE = ("value", "score", "rating", "thumbs", "thumb", "feedback", "type", "stringValue", "string_value", "label")
"""Members of an object that is feedback."""
COMMENTS = ("comment", "feedback_comment", "explanation", "comments", "text")
NAMES = {
    "",
    "feedback",
    "user_feedback",
    "user-feedback",
    "thumbs",
    "rating",
    "user_rating",
    "score",
    "user_score",
    "like",
}
"""Names of scores that are people's feedback."""
CALLS = (
    *("response_id", "responseId", "response", *IDS[1:], "message_id", "messageId", "completion_id"),
    *("observation_id", "observationId", "run_id"),
)
"""Members that name the answer that feedback is about; the answer's id first, as a vote's request has an id, too."""
PROMPTS = ("system", "instructions", "functions")
"""Members of a prompt that are not read where they stand around records."""
BODIES = (*REQUESTS, *RESPONSES, "messages", "conversations", "choices", "resourceSpans")
_LIKE_FEEDBACK = re.compile(
    r"[Ff]eedback|[Tt]humb|(?:(?<![a-z])r|R)ating|(?:(?<![a-z])s|S)(?:core|tars)|(?<![a-z])vote"
)
_NUMBER = re.compile(r"[+-]?[0-9]{1,15}(?:\.[0-9]{1,15})?")


@dataclass(slots=True)
class Vote:
    """Feedback of somebody on an answer, a trace or a session."""

    where: str
    value: float | None
    comment: str | None = None
    name: str = ""
    call: str | None = None
    trace: str | None = None
    session: str | None = None
    calls: list[Call] = field(default_factory=list)
    """Calls of its own record, if it stands in one."""


def number_of(value: JSON) -> float | None:
    """Read feedback as rows have it, a number in text, or an object; None: nobody said anything.

    Raises BadConversation.
    """
    if isinstance(value, Mapping):
        held = [name for name in INSIDE if name in value]
        strange = [name for name in value if name not in COMMENTS and value[name] not in (None, "", [], {})]
        if not held and strange:
            raise BadConversation(
                "feedback that is no number", f"expected a member {', '.join(INSIDE)}, found {', '.join(strange)}"
            )
        numbers = (number_of(value[name]) for name in held)
        return next((number for number in numbers if number is not None), None)
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        value = float(value)
    try:
        return feedback_of(value, "feedback")
    except Unfit as bad:
        raise BadConversation("feedback that is no number", f"expected {bad.expected}, found {bad.found}") from None


def votes_in(fields: Fields, where: str, calls: Sequence[Call] = (), *, around: bool = False) -> Iterator[Vote]:
    """Yield the feedback in a record. Raises BadConversation.

    calls: those of the record, if it is about any. around: the record is what stands around records.
    """
    alone = not calls and not around
    for score in as_list(fields.get("scores")) if calls else ():
        if isinstance(score, Mapping):
            yield from votes_in({**score, "feedback": score.get("value")}, where, calls)
    given = [fields[name] for name in (VALUES if alone else VALUES[:-1]) if fields.get(name) is not None]
    if not alone:
        given += [more[name] for more in [*inside(fields)][1:] for name in SURE if more.get(name) is not None]
    held = next((one for one in given if isinstance(one, Mapping)), {})
    comments = [fields.get(name) for name in (COMMENTS if alone else COMMENTS[:2])]
    comments += [held.get(name) for name in COMMENTS]
    comment = next((one for one in comments if isinstance(one, str) and one.strip()), None)
    if not given and comment is None:
        return
    values = {number_of(one) for one in given} - {None}
    if len(values) > 1:
        raise BadConversation("feedback that contradicts itself in one record", f"found {sorted(map(str, values))}")
    if not values and comment is None:
        return
    name = held.get("name", fields.get("key" if "run_id" in fields else "name") if alone else "")  # LangSmith: `key`
    yield Vote(
        where,
        next(iter(values), None),
        comment,
        str(name or ""),
        None if around else first_id([fields], CALLS),
        first_id([fields], TRACES),
        first_id([fields], SESSIONS),
        list(calls),
    )


def unread_feedback(fields: Fields) -> list[str]:
    """List the members of a record with calls that look like feedback by their names, and are not read."""
    own, *more = inside(fields)
    known = {*VALUES, *COMMENTS, "scores"}
    found = [name for name in own if name not in known]
    found += [name for held in more for name in held if name not in (*SURE, *COMMENTS)]
    values = {name: held[name] for held in (own, *more) for name in held}
    return [name for name in found if _LIKE_FEEDBACK.search(name) and values[name] not in (None, "", [], {})]


def unread_around(fields: Fields) -> list[str]:
    """List the members around records that change their prompts or look like feedback, and are not read."""
    return [*unread_feedback(fields), *(f"{name} around records" for name in PROMPTS if fields.get(name))]


def is_vote(fields: Fields) -> bool:
    """Check for feedback that stands on its own: a value or a comment, and no call."""
    if not any(fields.get(name) is not None for name in (*VALUES, COMMENTS[0])):
        return False
    return not any(fields.get(name) is not None and _is_body(name, fields[name]) for name in BODIES)


def _is_body(name: str, value: JSON) -> bool:
    return not isinstance(value, str) or name not in ("request", "response") or opened(value) != value


@dataclass(slots=True)
class Said:
    """Feedback of a branch."""

    value: float | None = None
    comment: str | None = None


@dataclass(slots=True)
class Applied:
    """Feedback by branch, and what became of the rest."""

    branches: dict[Branch, Said] = field(default_factory=dict)
    found: int = 0
    problems: LeftOuts = field(default_factory=LeftOuts)

    def refuse(self, vote: Vote, reason: str, detail: str, count: int = 1) -> None:
        """Count feedback that is not used."""
        self.problems.add(reason, f"{vote.where}: {reason}: {detail}", count)


def apply(votes: Sequence[Vote], joined: Joined, calls: Sequence[Call], names: Iterable[str] = ()) -> Applied:
    """Find the branches that votes are about.

    Feedback on an answer is about the branch that the answer stands in first. Feedback on a trace is about the branches
    of its calls, feedback on a session about all branches. Where votes on one branch differ, it gets no number.
    Feedback on one of several answers, which does not say which, is not used.
    """
    applied, wanted = Applied(found=len(votes)), {*names} or NAMES
    by_id, by_trace, by_session = _index(calls, joined)
    heard = dict[Branch, list[Vote]]()
    for vote in votes:
        if vote.name.lower() not in wanted:
            applied.refuse(vote, "a score of another name", f"{vote.name!r}; --score NAME takes it")
            continue
        if vote.calls:
            branches = {one.branch: None for one in vote.calls if one.branch is not None}
        elif vote.call is not None:
            branches = by_id.get(vote.call) or by_trace.get(vote.call, {})  # LangSmith's name of a trace is a run's
        elif vote.trace is not None:
            branches = by_trace.get(vote.trace, {})
        elif vote.session is not None:
            branches = by_session.get(vote.session, {})
        else:
            applied.refuse(vote, "feedback without an id", "expected a session, trace, call or response")
            continue
        if len(branches) > 1 and vote.calls:
            applied.refuse(vote, "feedback on a call with several answers", f"{len(branches)} answers")
            continue
        if len(branches) > 1 and vote.call in by_id:
            applied.refuse(vote, "feedback on an id of several answers", repr(vote.call))
            continue
        if not branches:
            about = vote.call or vote.trace or vote.session
            applied.refuse(vote, "feedback on what is not in the log", repr(about))
        for branch in branches:
            heard.setdefault(branch, []).append(vote)
    for branch, said in heard.items():
        applied.branches[branch] = _agreed(said, applied)
    return applied


def _index(calls: Sequence[Call], joined: Joined) -> tuple[dict[str, dict[Branch, None]], ...]:
    by_id, by_trace, by_session = (dict[str, dict[Branch, None]]() for _ in range(3))
    for call in calls:
        if call.branch is not None:
            for id in call.ids:
                by_id.setdefault(id, {})[call.branch] = None
            if call.trace is not None:
                by_trace.setdefault(call.trace, {})[call.branch] = None
    for session in joined.sessions:
        if session.id is not None:
            by_session[session.id] = dict.fromkeys(session.branches)
    return by_id, by_trace, by_session


def _agreed(votes: Sequence[Vote], applied: Applied) -> Said:
    values = {vote.value: vote for vote in votes if vote.value is not None}
    comments = "\n".join(dict.fromkeys(vote.comment for vote in votes if vote.comment))
    if len(values) > 1:
        told = " and ".join(f"{value:g} at {vote.where}" for value, vote in values.items())
        applied.refuse(votes[0], "feedback that contradicts other feedback on the same branch", told, len(votes))
    return Said(next(iter(values)) if len(values) == 1 else None, comments or None)
