"""Answers to a trajectory's calls, written down as they come, so that a kill costs none of them.

In the process after the kill the trajectory's code runs again from its start and is given what was answered until that
runs out; then it goes on live. A call is known by who is asked, the method, the arguments, and how many equal ones came
before it, never by the order in which answers came. What the code asks otherwise than before is a mismatch, and the
trajectory begins anew.
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

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
AfterKill = Literal["answers", "calls", "none"]
"""How a trajectory's session with a tool or an interaction comes back in the process after a kill.

answers: it keeps nothing that a later call needs, so what it answered is given again; calls: the same calls are made
again and must be answered the same; none: it cannot, and the trajectory begins anew."""


def check_after_kill(word: object, *, remembers: bool = False) -> None:
    """Raise ConfigError for a word that is no `AfterKill`, and for `answers` of one that `remembers` earlier calls."""
    if word not in get_args(AfterKill):
        raise ConfigError(f"after_kill is {word!r}; expected one of {', '.join(get_args(AfterKill))}")
    if remembers and word == "answers":
        raise ConfigError(
            "after_kill is 'answers', but later answers or the score depend on earlier calls, which a new process "
            "knows only if they are made again; expected calls or none"
        )


class Diverged(InfrastructureError):
    """Error of a trajectory that is not what was written down of it, and begins anew."""


class Kind(StrEnum):
    """Event that an entry tells of."""

    BEGUN = "begun"
    """A call was made to one that does not come back by answers, and may have had an effect."""
    ANSWERED = "answered"
    FAILED = "failed"
    """The try `nth` ended in a fault, `content`; what was answered in it counts no more."""
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
    """Way to write an answer, and to read it. `write` raises TypeError or ValueError for what it has no form for."""

    write: Callable[[T], bytes]
    read: Callable[[bytes], T]
    versions: Callable[[T], tuple[int, int] | None] = lambda _: None


class Answers:
    """Answers to one trajectory: taken down, and given again where they were `recorded`.

    Args:
        write: takes down an entry.
        after_kill: by who is asked; whoever is not in it comes back by answers.
        on_anew: told why the trajectory begins anew.
    """

    def __init__(
        self,
        trajectory: str,
        write: Callable[[Entry], None],
        recorded: Iterable[Entry] = (),
        after_kill: Mapping[str, AfterKill] = {},
        on_anew: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.trajectory, self._write, self._after_kill, self._on_anew = trajectory, write, after_kill, on_anew
        self.causes: list[str] = []
        """Faults that ended the tries before this one."""
        self.mismatch: str | None = None
        """Why this try is no more what was written down of it."""
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
            self.begin_anew(why)
        self._left.update(one.who for one in self._recorded.values() if one.kind is Kind.ANSWERED)

    async def of(
        self,
        who: str,
        key: str,
        perform: Callable[[], Awaitable[T]],
        codec: Codec[T],
        *,
        strict: bool = False,
    ) -> T:
        """Return the recorded answer to a call, or that of `perform`, which is taken down.

        A call to one that comes back by answers may be made again, so that its start is not taken down. `strict`: a
        call that is not recorded is a mismatch as long as recorded answers of `who` are left. Raises Diverged, and what
        `perform` raises.
        """
        if self.mismatch is not None:
            raise Diverged(self.mismatch)
        nth, comes_back = self._counts[key], self._after_kill.get(who, "answers")
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
            self.take_down(who, key, nth, answer, codec)
        return answer

    def take_down(self, who: str, key: str, nth: int, answer: T, codec: Codec[T]) -> None:
        """Write an answer. With one that has no form in which it could be given again the trajectory begins anew."""
        try:
            content = codec.write(answer)
        except (TypeError, ValueError):
            self._add(Entry(self.trajectory, Kind.ANEW))
            self.stop()
        else:
            self._add(Entry(self.trajectory, Kind.ANSWERED, who, key, nth, codec.versions(answer), content))

    def failed(self, cause: str) -> None:
        """Take down that a try ended in a fault. The next one is another trajectory of the same name."""
        self._is_writing = True
        self._add(Entry(self.trajectory, Kind.FAILED, nth=len(self.causes), content=cause.encode(errors="replace")))
        self.causes.append(cause)
        self._forget()

    def begin_anew(self, why: str) -> None:
        """Forget what was answered, and take that down."""
        self._is_writing = True
        self._add(Entry(self.trajectory, Kind.ANEW))
        self._on_anew(why)
        self.causes.clear()
        self._forget()

    def stop(self) -> None:
        """Take nothing more down: what comes is the end of a try, by a cancellation or a fault."""
        self._is_writing = False

    def _lost(self) -> str | None:
        """Say which session cannot come back; None: all can."""
        for one in self._recorded.values():
            comes_back = self._after_kill.get(one.who, "answers")
            if comes_back == "none":
                return f"{one.who} keeps a state that cannot be made again (after_kill=none)"
            if comes_back == "calls" and one.kind is Kind.BEGUN:
                return f"a call of {one.who} was made and not answered (after_kill=calls)"
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
    answers: Answers | None,
    who: str,
    method: str,
    arguments: object,
    perform: Callable[[], Awaitable[T]],
    codec: Codec[T],
) -> T:
    """Ask `perform`, or what was recorded; without `answers` nothing is."""
    if answers is None:
        return await perform()
    text = json.dumps([who, method, arguments], skipkeys=True, default=str)
    return await answers.of(who, digest(text.encode(errors="surrogatepass")), perform, codec)


def digest(*parts: bytes) -> str:
    """Hash the parts of a call, each with its length, to 32 hex digits."""
    found = blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def as_json(value: object) -> bytes:
    """Write a value as JSON, numbers of other libraries as floats. Raises TypeError for what has no such form."""
    return json.dumps(value, default=_number).encode()


def fields_as_json(value: DataclassInstance) -> bytes:
    """Write the fields of a dataclass by `as_json`."""
    return as_json({name: getattr(value, name) for name in value.__dataclass_fields__})


def _number(value: object) -> float:
    if not hasattr(value, "__float__"):
        raise TypeError(f"{value!r:.100} has no form in JSON")
    return float(value)
