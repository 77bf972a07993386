"""A turn that is still being sampled: the reasoning and the text that it is certain to be read with in the end.

Text that more tokens could still change is held back: the beginning of a marker, half a character, and all text after a
call. Blanks are held back, too, as a call would take them away. More is given only where nothing is held. So the given
text is exactly the text that the same format reads in the turn's first tokens. Each character is looked at a bounded
number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from agentrl.chat.codec import GUARD, Codec
from agentrl.chat.decoding import Decoding
from agentrl.chat.formats.frame import Frame
from agentrl.chat.message import AssistantMessage


class Grown(NamedTuple):
    """More of a turn. The reasoning comes before the text."""

    tokens: int
    """Number of the turn's first ids that all that was given by now stands for."""
    reasoning: str
    text: str


@dataclass(frozen=True, slots=True)
class Marking:
    """The markers of a turn, as its parser cuts them."""

    tokens: Mapping[int, str]
    """Markers that are tokens."""
    spelled: Sequence[str]
    """Markers that are found in the text."""
    think: str
    think_end: str
    channel: str
    """Text after the marker that opens reasoning, which belongs to it."""
    calls: Sequence[str] | None
    """Markers that open calls; empty where a whole message is the call; None where no calls are read."""
    begins: Sequence[str] | None
    """Texts of which one begins a message that is a call; None where any may."""
    starts_in_reasoning: bool


@dataclass(frozen=True, slots=True)
class Ends:
    """Tokens that end a turn, and that are not read."""

    stops: frozenset[int]
    leads: Sequence[Sequence[int]] = ()
    """Tokens directly before one of them that belong to it."""

    def may_be(self, ids: Sequence[int]) -> bool:
        """Say whether ids are the end of a turn, or its beginning."""
        *before, last = ids
        is_lead = any(list(lead[: len(ids)]) == list(ids) for lead in self.leads)
        return is_lead or (last in self.stops and (not before or before in map(list, self.leads)))


class _State(Enum):
    BEGUN = auto()
    """Nothing but blanks has come, or text of which a marker will say what it is."""
    REASONING = auto()
    CALL_IN_REASONING = auto()
    """A marker of calls stands in reasoning that is not closed: it is reasoning if that is closed later."""
    TEXT = auto()
    OPEN = auto()
    """The rest is read at the end."""


class GrowingTurn:
    """One turn, whose ids are added as they come."""

    def __init__(
        self,
        codec: Codec,
        marking: Marking,
        ends: Ends,
        read: Callable[[Sequence[int]], AssistantMessage],
        *,
        prompt_opens_reasoning: bool,
        offers_tools: bool,
        strips_lines: bool = False,
        frame: Frame | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        """Begin a turn.

        Args:
            read: reads the whole turn, where text before a marker that closes reasoning is text.
            prompt_opens_reasoning: the prompt ends with the marker that opens reasoning.
            strips_lines: line breaks around the text are taken off.
            stop: texts that end the text; it is cut before the first one.
        """
        self._codec, self._marking, self._ends, self._read = codec, marking, ends, read
        self._lexer = _Lexer(codec, marking)
        self._waits = prompt_opens_reasoning and not marking.starts_in_reasoning and marking.think_end in codec.added
        whole = marking.calls is not None and not marking.calls and offers_tools
        self._reasoning = _Reasoning(marking.channel)
        self._text = _Text(marking.begins if whole else (), frame, stop, strips_lines=strips_lines)
        self._state = _State.BEGUN
        self._kept: list[str] = []
        """Text whose kind a later marker decides."""
        self._pending: list[int] = []
        """Last ids, which may be the turn's end."""
        self._count = 0
        self._given = self._is_misread = False
        self._first = True
        """No marker has come."""
        self._new: tuple[list[str], list[str]] = ([], [])

    def add(self, ids: Sequence[int]) -> Grown | None:
        """Add ids; return the further part that is certain by now and was not given before, if any."""
        grown: Grown | None = None
        for id in ids:
            self._count += 1
            self._pending.append(id)
            while self._pending and not self._ends.may_be(self._pending):
                for piece, is_marker in self._lexer.add(self._pending.pop(0)):
                    (self._mark if is_marker else self._write)(piece)
            if not self._holds:
                grown = self._more(grown)
        return grown

    def settled(self, ids: Sequence[int], message: AssistantMessage) -> AssistantMessage:
        """Return the whole turn, which continues the given text; `message`: the turn as it is read alone.

        Text that was given stays text: after it, a marker that closes reasoning is the policy's mistake.
        """
        return self._read(ids) if self._is_misread and self._given else message

    @property
    def _holds(self) -> bool:
        return (
            self._state in (_State.OPEN, _State.CALL_IN_REASONING)
            or bool(self._pending or self._kept)
            or self._lexer.held
            or self._reasoning.held
            or self._text.held
        )

    def _more(self, grown: Grown | None) -> Grown | None:
        reasoning, text = map("".join, self._new)
        if not (reasoning or text):
            return grown
        self._given, self._new = True, ([], [])
        if grown is None:
            return Grown(self._count, reasoning, text)
        return Grown(self._count, grown.reasoning + reasoning, grown.text + text)

    def _write(self, text: str) -> None:
        """Add text without a marker in it."""
        if self._state is _State.BEGUN:
            self._kept.append(text)
            if text.isspace() or self._waits:
                return
            self._state = _State.REASONING if self._marking.starts_in_reasoning else _State.TEXT
            text = self._released()
        if self._state is _State.CALL_IN_REASONING:
            self._kept.append(text)
        elif self._state is _State.REASONING:
            self._new[0].append(self._reasoning.add(text))
        elif self._state is _State.TEXT:
            reasoning, more = self._text.add(text)
            self._new[0].append(reasoning)
            self._new[1].append(more)

    def _mark(self, marker: str) -> None:
        first, self._first = self._first, False
        marking = self._marking
        if self._state is _State.BEGUN:
            is_blank = all(map(str.isspace, self._kept))
            closes = first and marker == marking.think_end and marker in self._codec.added
            if first and is_blank and marker == marking.think:
                self._kept.clear()
                self._state = _State.REASONING
                return
            self._state = _State.REASONING if marking.starts_in_reasoning or closes else _State.TEXT
            if kept := self._released():
                self._write(kept)
        elif first and self._state is _State.TEXT and marker == marking.think_end and marker in self._codec.added:
            # Read alone, all of the text before it would be reasoning.
            self._is_misread, self._state = True, _State.OPEN
        if self._state in (_State.REASONING, _State.CALL_IN_REASONING):
            self._mark_in_reasoning(marker)
        elif self._state is _State.TEXT:
            if marking.calls:
                self._state = _State.OPEN
            else:
                self._text.keep_lines()
                self._write(marker)

    def _mark_in_reasoning(self, marker: str) -> None:
        marking = self._marking
        if marker == marking.think_end:
            self._state = _State.REASONING
            if kept := self._released():
                self._write(kept)
            self._text.reasoned = self._reasoning.close()
            self._state = _State.TEXT
            self._text.drop_lines()
        elif self._state is _State.CALL_IN_REASONING or marker in (marking.calls or ()):
            self._kept.append(marker)
            self._state = _State.CALL_IN_REASONING
        else:
            self._write(marker)

    def _released(self) -> str:
        kept = "".join(self._kept)
        self._kept.clear()
        return kept


class _Lexer:
    """Cuts a turn at its markers as `CallParser` does."""

    def __init__(self, codec: Codec, marking: Marking) -> None:
        self._codec, self._tokens = codec, marking.tokens
        self._decoding = Decoding(codec)
        self._tails = _Tails(marking.spelled)
        self._spelled = re.compile("|".join(map(re.escape, marking.spelled))) if marking.spelled else None
        self._tail = ""

    @property
    def held(self) -> bool:
        return bool(self._tail) or self._decoding.held

    def add(self, id: int) -> Iterator[tuple[str, bool]]:
        """Add an id; yield pieces, and whether each is a marker."""
        marker = self._tokens.get(id)
        if marker is None:
            yield from self._cut(self._decoding.add(id), last=False)
            return
        yield from self._cut(self._decoding.end(), last=True)
        self._decoding = Decoding(self._codec)
        yield marker, True

    def _cut(self, text: str, *, last: bool) -> Iterator[tuple[str, bool]]:
        if GUARD in text:
            text = self._codec.encodable(text)
        text, self._tail, at = self._tail + text, "", 0
        while self._spelled is not None:
            end = len(text) if last else self._tails.begin(text, at)
            found = self._spelled.search(text, at)
            if found is None or found.start() >= end:
                break
            if found.start() > at:
                yield text[at : found.start()], False
            yield found[0], True
            at = found.end()
        else:
            end = len(text)
        self._tail = text[end:]
        if end > at:
            yield text[at:end], False


class _Tails:
    """Finds the place in a text from which on it may become one of some marks."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(filter(None, marks))
        self._longest = max(map(len, self._marks), default=1)
        self._firsts = {mark[0] for mark in self._marks}

    def begin(self, text: str, at: int = 0) -> int:
        """Return the place, from `at` on; the text's length where there is no such place."""
        for place in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[place] in self._firsts:
                tail = text[place:]
                if any(len(mark) > len(tail) and mark.startswith(tail) for mark in self._marks):
                    return place
        return len(text)


class _Blanks:
    """Holds back blanks until something else follows."""

    def __init__(self, kinds: str | None = None) -> None:
        """`kinds`: characters that are blanks; None: all that Python strips."""
        self._kinds, self._held = kinds, list[str]()

    @property
    def held(self) -> bool:
        return bool(self._held)

    def add(self, text: str) -> str:
        kept = text.rstrip(self._kinds)
        before = "".join(self._held) if kept else ""
        if kept:
            self._held.clear()
        if len(kept) < len(text):
            self._held.append(text[len(kept) :])
        return before + kept


class _Reasoning:
    """The text of reasoning, without its channel, and line breaks around it; blanks alone are no reasoning."""

    def __init__(self, channel: str) -> None:
        self._channel, self._begin = channel, ""
        self._blank: list[str] = []
        self._lines = _Blanks("\n")
        self._is_begun = self._is_closed = False

    @property
    def held(self) -> bool:
        return not self._is_closed and bool(self._begin or self._blank or self._lines.held)

    def add(self, text: str) -> str:
        if self._channel:
            text = self._begin = self._begin + text
            if len(text) < len(self._channel) and self._channel.startswith(text):
                return ""
            text, self._channel, self._begin = text.removeprefix(self._channel), "", ""
        if not self._is_begun:
            if not text or text.isspace():
                self._blank.extend([text] if text else [])
                return ""
            text = ("".join(self._blank) + text).lstrip("\n")
            self._is_begun = True
            self._blank.clear()
        return self._lines.add(text)

    def close(self) -> bool:
        """End it; say whether there was any."""
        self._is_closed = True
        return self._is_begun


class _Text:
    """The text of a turn after its reasoning, up to its calls."""

    def __init__(
        self, begins: Sequence[str] | None, frame: Frame | None, stop: Sequence[str], *, strips_lines: bool
    ) -> None:
        """`begins`: the possible beginnings of a message that is a call; empty: no whole message is a call."""
        self._begins, self._is_call = begins, begins is None
        self._decides = begins is None or bool(begins)
        self._undecided: list[str] = []
        self._is_blank = True
        self._blanks = _Blanks()
        self._strips_lines = strips_lines
        self._drops = False
        self._frame = None if frame is None else _Framed(frame)
        self._stop = _Stop(stop)
        self.reasoned = False
        """The turn has reasoning before it."""

    @property
    def held(self) -> bool:
        framed = self._frame is not None and self._frame.held
        return self._is_call or bool(self._undecided) or self._blanks.held or framed or self._stop.held

    def drop_lines(self) -> None:
        """Drop the line breaks that follow."""
        self._drops = True

    def keep_lines(self) -> None:
        """Drop no more line breaks: other text follows."""
        self._drops = False

    def add(self, text: str) -> tuple[str, str]:
        """Add text; return more (reasoning, text) that is certain. Marks around a turn may show reasoning in it."""
        if self._drops:
            text = text.lstrip("\n")
            self._drops = not text
        if self._decides:
            text = self._decided(text)
        text = self._blanks.add(text)
        if self._strips_lines:
            text = text.lstrip("\n")
            self._strips_lines = not text
        reasoning, text = self._frame.add(text, reasoned=self.reasoned) if self._frame is not None else ("", text)
        return reasoning, self._stop.add(text)

    def _decided(self, text: str) -> str:
        """Hold a message while it may be a call."""
        if self._is_call:
            return ""
        self._undecided.extend([text] if text else [])
        self._is_blank = self._is_blank and (not text or text.isspace())
        if self._is_blank:
            return ""
        whole = "".join(self._undecided)
        begin = whole.lstrip()
        assert self._begins is not None
        if begin.startswith(tuple(self._begins)):
            self._is_call = True
            self._undecided.clear()
            return ""
        if any(one.startswith(begin) for one in self._begins):
            return ""
        self._decides = False
        self._undecided.clear()
        return whole


class _Framed:
    """Takes the marks of a template off a text, as `Frame.strip` does."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._is_reasoning: bool | None = None if frame.closes else False
        """A text that begins as reasoning does is one if the mark that closes it comes; None: not known."""
        self._begins = bool(frame.before)
        self._drops = False
        self._head = ""
        self._thought: list[str] = []
        self._closing = ""
        self._tails = _Tails([frame.after, frame.after + "\n"] if frame.after else [])
        self._lines = _Blanks("\n")
        self._tail = ""

    @property
    def held(self) -> bool:
        return bool(self._is_reasoning or self._head or self._tail or self._lines.held)

    def add(self, text: str, *, reasoned: bool) -> tuple[str, str]:
        reasoning = ""
        if self._is_reasoning is None and reasoned:
            self._is_reasoning = False
        if self._is_reasoning is not False:
            reasoning, text = self._split(text)
        if self._is_reasoning is False and self._begins:
            text = self._begun(text)
        if self._drops:
            text = text.lstrip("\n")
            self._drops = not text
        return reasoning, self._without_end(text)

    def _split(self, text: str) -> tuple[str, str]:
        """Split reasoning off; hold a text that may be it."""
        frame = self._frame
        if self._is_reasoning is None:
            self._head += text
            begin = self._head.lstrip()
            if not begin or (len(begin) < len(frame.opens) and frame.opens.startswith(begin)):
                return "", ""
            text, self._head = self._head, ""
            self._is_reasoning = begin.startswith(frame.opens)
            if not self._is_reasoning:
                return "", text
        seen = self._closing + text
        at = seen.find(frame.closes)
        if at < 0:
            cut = max(0, len(seen) - len(frame.closes) + 1)
            self._thought.append(seen[:cut])
            self._closing = seen[cut:]
            return "", ""
        thought, self._is_reasoning = "".join(self._thought) + seen[:at], False
        if not thought.lstrip().startswith(frame.opens):  # The first mark that closes is in the one that opens.
            return "", "".join(self._thought) + seen
        text = seen[at + len(frame.closes) :].lstrip("\n")
        self._drops = not text
        return thought.strip().removeprefix(frame.opens).strip(), text

    def _begun(self, text: str) -> str:
        """Take the mark before a text off."""
        mark = self._frame.before
        self._head += text
        begin = self._head.lstrip()
        if not begin or (len(begin) < len(mark) and mark.startswith(begin)):
            return ""
        text, self._head, self._begins = self._head, "", False
        if not begin.startswith(mark):
            return text
        text = begin.removeprefix(mark).lstrip("\n")
        self._drops = not text
        return text

    def _without_end(self, text: str) -> str:
        """Hold what may be the mark after a text."""
        if not self._frame.after:
            return text
        text = self._tail + text
        at = self._tails.begin(text)
        self._tail = text[at:]
        return self._lines.add(text[:at])


class _Stop:
    """Cuts a text before the first of some texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._tails = _Tails(texts)
        self._texts = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._tail = ""
        self._is_over = False

    @property
    def held(self) -> bool:
        return bool(self._tail) or self._is_over

    def add(self, text: str) -> str:
        if self._texts is None or self._is_over:
            return "" if self._is_over else text
        text = self._tail + text
        found, end = self._texts.search(text), self._tails.begin(text)
        if found is not None and found.start() <= end:
            self._is_over, self._tail = True, ""
            return text[: found.start()]
        text, self._tail = text[:end], text[end:]
        return text
