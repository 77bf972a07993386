"""Which transcripts of a finished session are trained on, and what kind each of them is.

The choice is of a conversation: all tokens that the policy sampled in it, also where another transcript holds them. A
transcript that another one was branched off is therefore trained on up to the branch.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import cast

from agentrl.agents.harness import Harness
from agentrl.chat.message import content_text
from agentrl.config.registries import HARNESSES
from agentrl.errors import ConfigError
from agentrl.openai_api.history import Digest, defaults_of, digest_after, digests_of
from agentrl.system.json_value import JSON
from agentrl.system.targets import load_target
from agentrl.system.user_code import contract_error, user_code
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, Trajectory

KEY = "openai_proxy.train"
SHORT = 20
"""Letters and digits below which an answer must be a whole line or value of the text that it stands in."""
RUN = 100
"""Letters and digits that are looked for together, of an answer with twice as many or more."""
_LINE_END = re.compile(r"[\r\n]|<[^<>\n]*>")
_REMINDER = re.compile(r"<system-reminder>.*?</system-reminder>", re.DOTALL)
"""Text that programs add to what a user says."""
_TAG = re.compile(r"</?[A-Za-z][\w-]*>")
"""Tag, which programs take away, e.g. around a summary."""
_NO_LETTER = re.compile(r"\\[nrt]|[\W_]+")


_ACTING = ("assistant", "tool")
"""Roles of messages that stand for a turn of their own; others may quote whole conversations."""


class Kind(StrEnum):
    """Relation of a transcript to its session."""

    MAIN = "main"
    """The conversation with the last answer that the agent took, or an earlier part of it."""
    SUB_AGENT = "sub_agent"
    """One of its answers stands in such a conversation as a tool's answer."""
    SIDE_CALL = "side_call"
    """Nothing of it reached such a conversation: a title, a topic, an answer that was asked for again."""


@dataclass(frozen=True, slots=True)
class Given:
    """A message that a transcript was given."""

    message: Message
    start: int
    """Place of its tokens; 0 for those of the first prompt."""
    request: int
    """Number of the request that brought it, from 1."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the policy."""

    message: Message
    """The answer as the client was sent it."""
    start: int
    end: int
    """Its tokens in the transcript."""
    request: int
    """Number of the request that it answers, from 1."""
    model: str
    """Model that the request named."""
    id: str = ""
    """Id that the client was sent, without the prefix of its API; empty: it was asked for again, and not sent."""
    recorded: Message | None = field(default=None, repr=False, compare=False)
    """The message as the trajectory has it."""
    is_part: bool = False
    """The client went away before it had all of the answer; the rest was removed."""


@dataclass(frozen=True, slots=True)
class SessionTranscript:
    """A transcript of a finished session."""

    number: int
    """Its place among the trajectory's transcripts."""
    opened: str
    """Why its first request continued no transcript: `first`, or a cause of docs/openai_endpoint.md."""
    given: tuple[Given, ...]
    answers: tuple[Answer, ...]
    """Answers that the client took, and those before them that broke the promise of their request."""
    prompt_length: int
    """Tokens of its first prompt."""
    tools: tuple[ToolSchema, ...] = ()
    """Tools that its requests declare."""
    source: int | None = None
    """Number of the transcript whose first tokens it begins with."""
    shared: int = 0
    """These tokens, of which the policy sampled some there."""
    asked_again: bool = False
    """True: its first request was answered in `source` before, by an answer that broke the request's promise."""
    kind: Kind = Kind.SIDE_CALL

    @property
    def models(self) -> frozenset[str]:
        """Models that its requests named."""
        return frozenset(answer.model for answer in self.answers)

    @property
    def placed(self) -> list[Given | Answer]:
        """Given messages and answers, in their order."""
        return sorted((*self.given, *self.answers), key=lambda one: one.start)

    @property
    def messages(self) -> list[Message]:
        """The conversation, as the client sent and was sent it."""
        return [one.message for one in self.placed]


Choose = Callable[[Sequence[SessionTranscript]], Iterable[SessionTranscript]]
"""A user's function: the transcripts of a session, in the order in which they were opened, to those to be trained."""


def train_of(train: str | Sequence[str], harness: str | None) -> str | Sequence[str]:
    """Resolve `auto` of `openai_proxy.train`: a harness's own choice, else all transcripts. Raises ConfigError."""
    if train != "auto":
        return train
    return "all" if harness is None else cast(type[Harness], HARNESSES.get(harness)).train


class Selection:
    """Choice of `openai_proxy.train` among the transcripts of each session."""

    def __init__(self, train: str | Sequence[str]) -> None:
        """Raises ConfigError for a function that cannot be loaded."""
        self._train = train
        self.everything, self.is_main = train == "all", train == "main"
        self._choose: Choose | None = None
        if isinstance(train, str) and train not in ("all", "main"):
            self._choose = _load(train)

    def ends(self, transcripts: Sequence[SessionTranscript], main: Mapping[int, tuple[Kind, int]]) -> dict[int, int]:
        """Return by number the transcripts that are trained on, each with the tokens up to which it is.

        main: the result of `main_of`. Raises CodeError where the user's function fails, or returns something else than
        transcripts that it was given.
        """
        if self.is_main:
            return {number: end for number, (_, end) in main.items()}
        if self._choose is None:
            chosen = [one for one in transcripts if one.models & set(self._train)]
        else:
            chosen = _chosen(self._choose, f"{KEY}={self._train}", transcripts)
        known, found = {one.number: one for one in transcripts}, dict[int, int]()
        for one in chosen:
            for number, end in _conversation(one, _length(one), known):
                found[number] = max(end, found.get(number, 0))
        return found

    def nothing(self, transcripts: Sequence[SessionTranscript]) -> str:
        """Say that nothing of a session was chosen."""
        named = ", ".join(sorted(set[str]().union(*(one.models for one in transcripts))))
        if self._choose is None and not self.is_main:
            wanted = f"named one of the models {', '.join(self._train)}; they named {named}"
            return f"{KEY}: no call of its session {wanted}, so nothing of this try is trained on"
        return (
            f"{KEY}={self._train} chose none of the {len(transcripts)} transcripts of its session (models that its "
            f"calls name: {named}), so nothing of this try is trained on"
        )


def leave_out(trajectory: Trajectory, transcripts: Sequence[SessionTranscript], ends: Mapping[int, int]) -> int:
    """Mark the tokens of the trajectory that are not trained on, and take their messages away from scorers.

    Returns the number of transcripts that lose some or all of the policy's tokens.
    """
    gone = set[int]()
    for one in transcripts:
        transcript, end = trajectory.transcripts[one.number], ends.get(one.number, 0)
        if end < _length(one) or not end:
            transcript.trained_to = end
        gone.update(id(given.message) for given in one.given if not end or given.start >= end)
        gone.update(id(answer.recorded) for answer in one.answers if answer.start >= end)
    trajectory.messages = [message for message in trajectory.messages if id(message) not in gone]
    return sum(one.trained_length < one.sampled_length for one in trajectory.transcripts)


def main_of(transcripts: Sequence[SessionTranscript], *, by_tools: bool = False) -> dict[int, tuple[Kind, int]]:
    """Return by number the transcripts of the main conversation, its kind and the tokens up to which it belongs there.

    The main conversation has the last request whose answer was taken. Where a sub-agent ends last, it is the
    conversation whose calls began the sub-agent. A transcript belongs to it up to the last of its answers that stands
    in a later message to the conversation:

    - as an assistant's message, after tools, system message or reasoning have changed;
    - as a tool's answer, for a sub-agent;
    - in another message, as the summary of a compaction. A request for a summary quotes a conversation, which belongs
      to it with all of its answers before that message.

    A transcript also belongs to it if the conversation has another message in place of the transcript's last answer.
    The program then edited the answer, or took it out with an error. Each rule also holds for transcripts of
    transcripts that belong to it.

    by_tools: the program acts by tools. So a last request without tools is a side call where others have some, e.g.
    a summary of work that is over.
    """
    known = {one.number: one for one in transcripts}
    taken = {one.number: [answer for answer in one.answers if not answer.is_part] for one in transcripts}
    has_tools = by_tools and any(one.tools for one in transcripts if taken[one.number])
    answered = (one for one in transcripts if taken[one.number] and (one.tools or not has_tools))
    last = max(answered, key=lambda one: (taken[one.number][-1].request, one.number), default=None)
    if last is None:
        return {}
    read = _Texts([tool for one in transcripts for tool in one.tools])
    texts = {one.number: [(given, read.of(given.message)) for given in one.given] for one in transcripts}
    said = {one.number: [_Said(answer, texts[one.number], read) for answer in one.answers] for one in transcripts}
    places = _Places(transcripts)
    found: dict[int, tuple[Kind, int]] = {}
    while (parent := _parent(last, transcripts)) is not None:
        last = parent
    waiting = [(last, _length(last), Kind.MAIN)]
    while waiting:
        one, until, kind = waiting.pop()
        for number, end in _conversation(one, until, known):
            before = found.get(number)
            if before is not None and before[1] >= end and (before[0] is Kind.MAIN or kind is not Kind.MAIN):
                continue
            is_main = kind is Kind.MAIN or (before is not None and before[0] is Kind.MAIN)
            found[number] = (Kind.MAIN if is_main else kind, max(end, before[1] if before else 0))
            waiting += [(other, _length(other), kind) for other in places.replaced(known[number], end)]
            told = [pair for pair in texts[number] if pair[0].start < end]
            for other in transcripts:
                if other.number == number or found.get(other.number, (kind, 0))[1] >= _length(other) > 0:
                    continue
                for its in reversed(said[other.number]):
                    if (given := its.given_in(told)) is not None:
                        role, end = given.message["role"], its.answer.end
                        is_sub = role == "tool" or (role not in _ACTING and _parent(other, transcripts) is not None)
                        if role not in _ACTING:
                            end = max(answer.end for answer in other.answers if answer.request < given.request)
                        waiting.append((other, end, Kind.SUB_AGENT if is_sub else kind))
                        break
    return found


def _parent(one: SessionTranscript, transcripts: Sequence[SessionTranscript]) -> SessionTranscript | None:
    """Return the transcript with an earlier call whose argument is the question of a new conversation; None without."""
    begun = [given for given in one.given if not given.start]
    asked = [_plain(_REMINDER.sub("", content_text(each.message["content"]))) for each in begun if _is_users(each)]
    if not asked or not asked[-1] or any(given.message["role"] == "assistant" for given in begun):
        return None
    for other in transcripts:
        for answer in other.answers if other is not one else ():
            if answer.request < begun[0].request and any(_plain(text) == asked[-1] for text in _arguments(answer)):
                return other
    return None


def _is_users(given: Given) -> bool:
    return given.message["role"] == "user" and bool(_plain(_REMINDER.sub("", content_text(given.message["content"]))))


def _arguments(answer: Answer) -> Iterator[str]:
    """Yield the values in the arguments of an answer's calls."""
    for call in answer.message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        yield from _values(arguments if isinstance(arguments, str) else json.dumps(arguments))


def _conversation(
    one: SessionTranscript, until: int, known: Mapping[int, SessionTranscript]
) -> Iterator[tuple[int, int]]:
    """Yield the transcripts that hold the tokens of a conversation, each with its number of tokens of it.

    Answers that broke the promise of a request go with the answer that kept it.
    """
    yield one.number, until
    while one.source is not None:
        source = known[one.source]
        until = _length(source) if one.asked_again and until > one.prompt_length else one.shared
        if ends := [answer.end for answer in source.answers if answer.end <= until]:
            yield source.number, ends[-1]
        one = source


def _length(one: SessionTranscript) -> int:
    """Count the tokens up to the end of the last answer."""
    return one.answers[-1].end if one.answers else 0


def _load(target: str) -> Choose:
    function = load_target(target, KEY)
    if not callable(function):
        raise ConfigError(f"{KEY}: expected a function, {target} is {function!r:.200}")
    try:
        inspect.signature(function).bind([])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}: {target} must take one argument, the transcripts of a session: {error}") from error
    return cast(Choose, function)


def _chosen(choose: Choose, what: str, transcripts: Sequence[SessionTranscript]) -> list[SessionTranscript]:
    with user_code(what, choose):
        answer: object = choose(transcripts)
        chosen = list(answer) if isinstance(answer, Iterable) else None
    if chosen is None or not all(any(one is known for known in transcripts) for one in chosen):
        problem = f"it must return those of the transcripts that are trained on, found {answer!r:.200}"
        raise contract_error(what, choose, problem)
    return cast(list[SessionTranscript], chosen)


class _Places:
    """Answers by the conversation before them."""

    def __init__(self, transcripts: Sequence[SessionTranscript]) -> None:
        self._chains: dict[int, list[tuple[Given | Answer, Digest, Digest]]] = {}
        """(message, digest of tools and messages before it, digest with it) of each transcript."""
        self._sampled: dict[Digest, list[tuple[SessionTranscript, Answer, Digest]]] = {}
        for one in transcripts if len(transcripts) > 1 else ():
            placed = one.placed
            digests = digests_of([_as_text(each.message) for each in placed], one.tools)
            self._chains[one.number] = list(zip(placed, digests, digests[1:], strict=False))
            for each, before, after in self._chains[one.number]:
                if isinstance(each, Answer):
                    self._sampled.setdefault(before, []).append((one, each, after))

    def replaced(self, one: SessionTranscript, until: int) -> Iterator[SessionTranscript]:
        """Yield transcripts in place of whose last answer the first `until` tokens of `one` have a client's message."""
        for given, before, after in self._chains.get(one.number, ()):
            if isinstance(given, Answer) or given.start >= until or before not in self._sampled:
                continue
            sampled = self._sampled[before]
            if all(after != its for _, _, its in sampled):
                earlier = [(other, answer) for other, answer, _ in sampled if answer.request < given.request]
                other, answer = max(earlier, key=lambda pair: pair[1].request, default=(one, None))
                if answer is not None and answer is other.answers[-1] and not answer.is_part:
                    yield other


def _as_text(message: Message) -> Message:
    """A message in one form, whether it was given or sampled."""
    if message["role"] == "assistant":
        return {**message, "content": content_text(message["content"])}
    # Ids are the policy's own here, and the client's there.
    return {**message, "tool_call_id": ""}


class _Text:
    """A message's text, and the parts that are looked for in other messages where it is an answer."""

    def __init__(self, role: str, text: str, digest: bytes) -> None:
        self.role, self.text, self.digest = role, text, digest
        self.plain = _plain(text)

    @cached_property
    def parts(self) -> frozenset[str]:
        """Lines of the text, cut at tags, too, and values of a text that is JSON."""
        return frozenset(map(_plain, (*_LINE_END.split(self.text), *_values(self.text))))

    @cached_property
    def pieces(self) -> tuple[str, ...]:
        """Parts of the text; a message that holds one of them was given this text."""
        size = len(self.plain)
        if size < 2 * RUN:
            return (self.plain,) if size else ()
        return tuple(self.plain[start : start + RUN] for start in range(0, size - RUN + 1, RUN))

    def holds(self, piece: str) -> bool:
        """Check whether a piece stands in this text; a short one alone in a line or a value."""
        return piece in self.plain if len(piece) >= SHORT else piece == self.plain or piece in self.parts


class _Texts:
    """Texts of messages, each read once: many transcripts repeat one conversation."""

    def __init__(self, tools: Sequence[ToolSchema]) -> None:
        self._defaults = defaults_of(tools)
        self._known: dict[tuple[str, str, bytes], _Text] = {}

    def of(self, message: Message) -> _Text:
        role, text = str(message["role"]), content_text(message["content"])
        digest = digest_after(b"", {**message, "content": text}, self._defaults) if role == "assistant" else b""
        return self._known.get((role, text, digest)) or self._known.setdefault(
            (role, text, digest), _Text(role, text, digest)
        )


class _Said:
    """An answer, and the texts that are known to hold it, or not to."""

    def __init__(self, answer: Answer, own: Sequence[tuple[Given, _Text]], read: _Texts) -> None:
        """`own`: messages that the answer's transcript was given."""
        self.answer, self._own, self._text = answer, own, read.of(answer.message)
        self._says = bool(self._text.plain or answer.message.get("tool_calls"))
        self._held: dict[int, bool] = {}

    @cached_property
    def _fresh(self) -> list[str]:
        """Pieces that the transcript was not given: to repeat a task's words is no use of an answer."""
        return [piece for piece in self._text.pieces if not any(text.holds(piece) for _, text in self._own)]

    @cached_property
    def _calls(self) -> list[str]:
        """Each call as a quoted conversation shows it: the function's name, then its arguments."""
        functions = [call["function"] for call in self.answer.message.get("tool_calls", ())]
        return [_plain(f"{one['name']} {one['arguments']}") for one in functions]

    def given_in(self, told: Iterable[tuple[Given, _Text]]) -> Given | None:
        """Return the first message after the answer that holds it; None: no message holds it."""
        for given, text in told:
            if given.request > self.answer.request and self._says and self._stands_in(text):
                return given
        return None

    def _stands_in(self, text: _Text) -> bool:
        if text.role == "assistant":
            return text.digest == self._text.digest
        if id(text) not in self._held:
            pieces = self._text.pieces if text.role == "tool" else self._fresh
            is_quoted = text.role != "tool" and any(call in text.plain for call in self._calls)
            self._held[id(text)] = is_quoted or any(map(text.holds, pieces))
        return self._held[id(text)]


def _plain(text: str) -> str:
    """Leave out all but letters and digits: clients change blanks, quote and escape what they show, and take tags."""
    return _NO_LETTER.sub("", _TAG.sub(" ", text))


def _values(text: str) -> Iterator[str]:
    if text.lstrip()[:1] not in ("{", "["):
        return
    try:
        waiting: list[JSON] = [json.loads(text)]
    except (ValueError, RecursionError):
        return
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
        elif value is not None:
            yield str(value)
