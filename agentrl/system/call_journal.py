"""Journal of a trajectory's calls: each answer is written as it comes, so that a kill loses no answer.

After a kill the trajectory's code runs again from its start. It is given the recorded answers until they run out; then
it continues live. A call is identified by its callee, method and arguments, and by the number of equal calls before it,
never by the order in which answers came. A call that differs from the recorded ones is a mismatch, and the trajectory
restarts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, get_args

from agentrl.errors import ConfigError, InfrastructureError
from agentrl.system.numbers import number_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
OnResume = Literal["answers", "calls", "none"]
"""How a trajectory's session with a tool or an interaction comes back in the process after a kill.

answers: the callee keeps nothing that a later call needs, so the recorded answer is given again. calls: the same calls
are made again and must be answered the same. none: resuming is impossible, and the trajectory restarts."""
RENAMED = {"after_kill": "on_resume"}
"""Present name, by earlier ones, of the attribute of users' classes, and of the key of their YAML files."""


def check_on_resume(word: object, *, remembers: bool = False) -> None:
    """Raise ConfigError for a word that is no `OnResume`, and for `answers` where `remembers` earlier calls."""
    if word not in get_args(OnResume):
        raise ConfigError(f"on_resume is {word!r}; expected one of {', '.join(get_args(OnResume))}")
    if remembers and word == "answers":
        raise ConfigError(
            "on_resume is 'answers', but later answers or the score depend on earlier calls, which a new process "
            "knows only if they are made again; expected calls or none"
        )


class Diverged(InfrastructureError):
    """The trajectory's code differs from its journal; the trajectory restarts."""


class Kind(StrEnum):
    """Kind of event that an entry records."""

    BEGUN = "begun"
    """A call was made to a callee that does not resume by answers; the call may have had an effect."""
    ANSWERED = "answered"
    FAILED = "failed"
    """The try `nth` ended in a fault, `content`; answers within that try are void."""
    ANEW = "anew"
    """Nothing before it counts."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Record of one event of a trajectory."""

    trajectory: str
    kind: Kind
    who: str = ""
    key: str = ""
    """Digest of who is asked, the method and the arguments."""
    nth: int = 0
    """Calls with the key before it."""
    versions: tuple[int, int] | None = None
    """Versions of the oldest and the newest token, of a generation that has any."""
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Codec(Generic[T]):
    """Way to write an answer, and to read it. `write` raises TypeError or ValueError where it has no form."""

    write: Callable[[T], bytes]
    read: Callable[[bytes], T]
    versions: Callable[[T], tuple[int, int] | None] = lambda _: None


class CallJournal:
    """Answers to one trajectory: written down, and given again where they were `recorded`.

    Args:
        write: writes an entry down.
        on_resume: by callee; a callee that is absent resumes by answers.
        on_restart: called with the reason when the trajectory restarts.
    """

    def __init__(
        self,
        trajectory: str,
        write: Callable[[Entry], None],
        recorded: Iterable[Entry] = (),
        on_resume: Mapping[str, OnResume] = {},
        on_restart: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.trajectory, self._write, self._on_resume, self._on_restart = trajectory, write, on_resume, on_restart
        self.causes: list[str] = []
        """Faults that ended the tries before this one."""
        self.mismatch: str | None = None
        """Why this try differs from its journal."""
        self._is_writing = True
        self._counts: Counter[str] = Counter()
        self._recorded: dict[tuple[str, int], Entry] = {}
        self._left: Counter[str] = Counter()
        """Recorded answers that were not given yet, by who gave them."""
        for one in recorded:
            if one.kind is Kind.FAILED:
                self.causes.append(one.content.decode())
            else:
                self._recorded[one.key, one.nth] = one
        if (why := self._lost()) is not None:
            self.restart(why)
        self._left.update(one.who for one in self._recorded.values() if one.kind is Kind.ANSWERED)
        self.resumes = bool(self._recorded)
        """Answers of an earlier process are given again."""

    async def call(
        self,
        who: str,
        key: str,
        perform: Callable[[], Awaitable[T]],
        codec: Codec[T],
        *,
        strict: bool = False,
    ) -> T:
        """Return the recorded answer to a call, or perform the call and record its answer.

        The start of a call is not recorded where the callee resumes by answers, since such a call may be made again.
        `strict`: a call that is not recorded is a mismatch as long as recorded answers of `who` are left. Raises
        Diverged, and the errors of `perform`.
        """
        if self.mismatch is not None:
            raise Diverged(self.mismatch)
        nth, comes_back = self._counts[key], self._on_resume.get(who, "answers")
        self._counts[key] += 1
        found = self._recorded.pop((key, nth), None)
        is_answered = found is not None and found.kind is Kind.ANSWERED
        if found is None and self._left[who] and (strict or comes_back == "calls"):
            self._diverge(f"{who} is asked otherwise than before")
        if found is not None and is_answered:
            self._left[found.who] -= 1
            if comes_back == "answers":
                return codec.read(found.content)
        if found is None and comes_back != "answers":
            self._add(Entry(self.trajectory, Kind.BEGUN, who, key, nth))
        answer = await perform()
        if found is not None and is_answered:
            if codec.read(codec.write(answer)) != codec.read(found.content):
                self._diverge(f"{who} answers otherwise than before")
        else:
            self.record(who, key, nth, answer, codec)
        return answer

    def record(self, who: str, key: str, nth: int, answer: T, codec: Codec[T]) -> None:
        """Write an answer. An answer that has no form in which it could be given again makes the trajectory restart."""
        try:
            content = codec.write(answer)
        except (TypeError, ValueError):
            self._add(Entry(self.trajectory, Kind.ANEW))
            self.stop()
        else:
            self._add(Entry(self.trajectory, Kind.ANSWERED, who, key, nth, codec.versions(answer), content))

    def failed(self, cause: str) -> None:
        """Record that a try ended in a fault. The next try is another trajectory of the same name."""
        self._is_writing = True
        self._add(Entry(self.trajectory, Kind.FAILED, nth=len(self.causes), content=cause.encode(errors="replace")))
        self.causes.append(cause)
        self._forget()

    def restart(self, why: str) -> None:
        """Forget all answers, and record the restart."""
        self._is_writing = True
        self._add(Entry(self.trajectory, Kind.ANEW))
        self._on_restart(why)
        self.causes.clear()
        self._forget()

    def stop(self) -> None:
        """Record nothing more: further events are the end of a try, by a cancellation or a fault."""
        self._is_writing = False

    def _lost(self) -> str | None:
        """Name the session that cannot be resumed; None: all can."""
        for one in self._recorded.values():
            comes_back = self._on_resume.get(one.who, "answers")
            if comes_back == "none":
                return f"{one.who} keeps a state that cannot be made again (on_resume=none)"
            if comes_back == "calls" and one.kind is Kind.BEGUN:
                return f"a call of {one.who} was made and not answered (on_resume=calls)"
        return None

    def _diverge(self, why: str) -> None:
        self.mismatch = why
        self.stop()
        raise Diverged(why)

    def _forget(self) -> None:
        self._recorded.clear()
        self._left.clear()
        self._counts.clear()
        self.mismatch = None

    def _add(self, entry: Entry) -> None:
        if self._is_writing:
            self._write(entry)


async def answered(
    journal: CallJournal | None,
    who: str,
    method: str,
    arguments: object,
    perform: Callable[[], Awaitable[T]],
    codec: Codec[T],
) -> T:
    """Return the recorded answer, or perform the call; without `journal` nothing is recorded."""
    if journal is None:
        return await perform()
    text = json.dumps([who, method, arguments], skipkeys=True, default=str)
    return await journal.call(who, digest(text.encode(errors="surrogatepass")), perform, codec)


def digest(*parts: bytes) -> str:
    """Hash the parts of a call, each with its length, to 32 hex digits."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def as_json(value: object) -> bytes:
    """Write a value as JSON, numbers of other libraries as floats. Raises TypeError where JSON has no form."""
    return json.dumps(value, default=_number).encode()


def fields_as_json(value: DataclassInstance) -> bytes:
    """Write the fields of a dataclass by `as_json`."""
    return as_json({name: getattr(value, name) for name in value.__dataclass_fields__})


def _number(value: object) -> float:
    if (number := number_of(value)) is None:
        raise TypeError(f"{value!r:.100} has no form in JSON")
    return number
