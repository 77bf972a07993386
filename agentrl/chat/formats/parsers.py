"""Parser of tool calls in sampled ids. Each call format is a file in this folder.

Ids are cut at their markers first, and every piece between is decoded once, so the time is linear in the ids for
any text. A marker that is one token of the vocabulary is matched by its id: the same characters spelled with
other tokens, for example inside a string argument, are text. A marker that is no token is matched in the decoded text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.chat.codec import GUARD, Codec, without_guards
from agentrl.chat.decoding import decodes_in_parts
from agentrl.chat.formats.growing import Marking
from agentrl.chat.message import AssistantMessage, ParsedCall, make_call
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import FunctionCall

THINK, THINK_END = "<think>", "</think>"
MARKER_TOKENS = 32
"""Tokens that a marker, and blanks after it, are spelled with at most."""
MOST_DIGITS = 3
"""Digits of the number of a call, where a template counts calls: a stand-in conversation has as many."""


class Found(NamedTuple):
    """One call as found in the text, not yet checked."""

    name: JSON = None
    arguments: JSON = None
    error: str | None = None
    id: str | None = None


BodyParser = Callable[[str, Sequence[ToolSchema]], list[Found]]
CallWriter = Callable[[Sequence[FunctionCall]], str]


class Turn(NamedTuple):
    """A turn taken apart. All text of the policy is in one of the three, except markers that only say where to cut."""

    texts: list[str]
    thoughts: list[str]
    """Reasoning."""
    bodies: list[tuple[str, str | None]]
    """Text of each call, and the error of its markers."""


MessageReader = Callable[[Sequence[tuple[str, str]]], Turn]
"""Takes a turn apart that is cut at its markers: (marker, the text after it), the first marker empty."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A way to write tool calls: the markers around a call, and the parser of the text between them."""

    open: str
    """Marker before a call. Empty: a call is the whole message, if `is_call` says so."""
    close: str
    """Marker after a call. Empty: a call ends where the next begins, or with the message."""
    body: BodyParser
    """Reads the text between the markers in time linear in its length. A broken call is a Found with its error."""
    group: tuple[str, ...] = ()
    """Markers around a group of calls, if there are any; they are dropped."""
    tags: tuple[str, ...] = ()
    """Markers inside a body that some vocabularies have as tokens; `body` then meets no spelling of them."""
    is_call: Callable[[str], bool] = lambda message: False
    """True for a whole message, stripped of blanks, that is or tries to be a call. Only without `open`."""
    begins: tuple[str, ...] | None = None
    """Texts of which one begins each message that `is_call`; None: a call may begin with anything."""
    reasoning: tuple[str, str] = (THINK, THINK_END)
    """Markers around reasoning. The first may be a token and text after it, e.g. a channel's name."""
    messages: MessageReader | None = None
    """Takes turns apart that are made of messages, each with its kind; None: a turn is reasoning, text and calls."""
    ends: tuple[str, ...] = ()
    """Tokens with which a policy ends its turn where the template's last turn does, though another token may stand
    there in turns before."""
    display: re.Pattern[str] | None = None
    """Pattern of calls in decoded text, for the display; None: they are all that stands between the markers."""
    write: CallWriter | None = None
    """Writes the calls of a turn, markers included, in place of a template that writes none, or none that is read."""
    names_in_ids: bool = False
    """True where the template writes a call's id in place of its name (`functions.NAME:INDEX`)."""
    numbers_calls: bool = False
    """True where the template counts calls over the conversation and ignores their ids. Needs `names_in_ids`; a call's
    id is then its number, of at most MOST_DIGITS digits."""
    signs: tuple[str, ...] = ()
    """Texts that a chat template with such calls has, all of them. Without any, `auto` chooses the format only where it
    is the first by name that reads a call which the template writes."""
    families: tuple[str, ...] = ()
    """Families of the `renderers` package whose calls are read by this format rather than by their own parser.
    Their parser takes quadratic time for some broken calls, drops or changes text around a call's form, and does not
    name the error."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers of the format."""
        return tuple(marker for marker in (self.open, self.close, *self.group) if marker)

    @property
    def shown(self) -> re.Pattern[str] | None:
        """Pattern of calls in decoded text, for the display; None: they have no markers."""
        return self.display or (between(*(self.group or (self.open, self.close))) if self.open else None)


def between(open: str, close: str) -> re.Pattern[str]:
    """Pattern of text from one marker to the other, or to the end."""
    end = f"(?:{re.escape(close)}|\\Z)" if close else r"\Z"
    return re.compile(f"{re.escape(open)}.*?{end}", re.DOTALL)


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Make the pattern, a group, of any of the texts; None without texts."""
    return re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None


class CallParser:
    """Parses one assistant turn. `format` None: text and reasoning only."""

    def __init__(self, codec: Codec, format: CallFormat | None, *, starts_in_reasoning: bool) -> None:
        self._codec = codec
        self._format = format
        self._starts_in_reasoning = starts_in_reasoning
        think, self._think_end = format.reasoning if format else (THINK, THINK_END)
        before, *opening = codec.split(think)
        self._think, self._channel = opening if len(opening) == 2 and not before else (think, "")
        markers: tuple[str, ...] = (self._think, self._think_end)
        tags: tuple[str, ...] = ()
        if format is not None:
            markers = (*format.markers, *(format.tags if format.messages else markers))
            tags = tuple(tag for tag in format.tags if tag in codec.added)
            self._begun = re.split(f"({'|'.join(map(re.escape, markers))})", think)
        self._tokens = {codec.added[marker]: marker for marker in (*markers, *tags) if marker in codec.added}
        self._spelled_tags = _any_of(tags)
        spelled = [marker for marker in markers if marker not in codec.added]
        self._spelled = _any_of(spelled)
        marking = Marking(
            tokens=self._tokens,
            spelled=spelled,
            think=self._think,
            think_end=self._think_end,
            channel=self._channel,
            calls=None if format is None else (format.open, *format.group[:1]) if format.open else (),
            begins=None if format is None else format.begins,
            starts_in_reasoning=starts_in_reasoning,
        )
        is_known = (format is None or format.messages is None) and decodes_in_parts(codec)
        self.marking = marking if is_known else None
        """Markers of turns that may be read as they grow; None for turns made of messages."""

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Say whether a prompt ends with the marker that opens reasoning."""
        end = self._codec.decode(prompt[-MARKER_TOKENS:]).rstrip()
        return end.endswith(self._think.rstrip()) or end.endswith((self._think + self._channel).rstrip())

    def is_marker(self, id: int) -> bool:
        """True for a token that opens or closes calls or reasoning."""
        return id in self._tokens

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema] | None, *, spoken: bool = False
    ) -> AssistantMessage:
        """Parse one turn, given without its stop token unless that is a marker.

        `spoken`: text at its beginning is text, also before a marker that closes reasoning.
        """
        pieces = list(self._lex(ids))
        if self._format is not None and self._format.messages is not None:
            if self._starts_in_reasoning:
                *begun, last = self._begun
                pieces[:1] = list(zip(["", *begun[1::2]], [*begun[::2], last + pieces[0][1]], strict=True))
            texts, thoughts, bodies = self._format.messages(pieces)
            calls = self._read(self._format.body, bodies, tools)
            return AssistantMessage("".join(texts), "".join(thoughts) or None, calls)
        reasoning, rest = self._split_reasoning(pieces, spoken=spoken)
        if self._format is None:
            return AssistantMessage(concatenated(rest), reasoning)
        if not self._format.open:
            return self._whole_message(reasoning, concatenated(rest), tools or ())
        texts, bodies = self._split_calls(rest)
        calls = self._read(self._format.body, bodies, tools)
        if calls:  # blanks separate the texts around them from calls
            texts = ["\n".join(filter(None, [texts[0].rstrip(), *(text.strip() for text in texts[1:])]))]
        return AssistantMessage("".join(texts), reasoning, calls)

    @staticmethod
    def _read(
        read: BodyParser, bodies: list[tuple[str, str | None]], tools: Sequence[ToolSchema] | None
    ) -> tuple[ParsedCall, ...]:
        calls: list[ParsedCall] = []
        for body, wrong in bodies:
            found = read(body, tools or ()) if wrong is None else [Found(error=wrong)]
            if GUARD in body:
                found, body = [_unguarded(call) for call in found], without_guards(body)
            raw = body.strip()  # one text for all calls of it: there may be thousands
            calls += [make_call(len(calls) + n, raw, *call) for n, call in enumerate(found)]
        return tuple(calls)

    def _lex(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Yield (marker, the text after it) in order; the first marker is empty."""
        ids = list(ids)
        cuts = [index for index, id in enumerate(ids) if id in self._tokens]
        for cut, end in zip([-1, *cuts], [*cuts, len(ids)], strict=True):
            marker = self._tokens[ids[cut]] if cut >= 0 else ""
            text = self._codec.decode(ids[cut + 1 : end]) if end > cut + 1 else ""
            if GUARD in text:  # Written by the policy. The guards that follow are taken out again.
                text = self._codec.encodable(text)
            if self._spelled is None:
                yield marker, text
                continue
            first, *others = self._spelled.split(text)
            yield marker, first
            yield from zip(others[::2], others[1::2], strict=True)

    def _split_reasoning(
        self, pieces: list[tuple[str, str]], *, spoken: bool
    ) -> tuple[str | None, list[tuple[str, str]]]:
        """Split off the reasoning at the start, if any. Reasoning that is never closed ends at the first call.

        A marker that closes some before anything else begins belongs to a prompt that has begun it, as those after
        the first one may.
        """
        blank = not pieces[0][1].strip()
        markers = [marker for marker, _ in pieces]
        explicit = blank and self._think in markers[1:2]
        closes = not spoken and self._think_end in markers[1:2] and self._think_end in self._codec.added
        begun = self._starts_in_reasoning or closes
        if not (explicit or begun):
            return None, pieces
        begin = 1 if explicit else 0
        end = _index(markers, self._think_end, begin)
        closed = end is not None
        if end is None:
            end = self._first_call(markers, begin)
        inside = pieces[begin:end]
        text = inside[0][1] + concatenated(inside[1:]) if inside else ""
        text = text.removeprefix(self._channel).strip("\n")
        if end is None:
            rest = [("", "")]
        elif closed:
            rest = [("", pieces[end][1].lstrip("\n")), *pieces[end + 1 :]]
        else:
            rest = [("", ""), *pieces[end:]]
        return text if text.strip() else None, rest

    def _first_call(self, markers: Sequence[str], begin: int) -> int | None:
        """Find the first marker that opens a call, from `begin` on."""
        if self._format is None or not self._format.open:
            return None
        opens = (self._format.open, *self._format.group[:1])
        return min((at for at in (_index(markers, open, begin) for open in opens) if at is not None), default=None)

    def _split_calls(self, pieces: list[tuple[str, str]]) -> tuple[list[str], list[tuple[str, str | None]]]:
        """Split into texts outside of calls, and (body, error of its markers) of each call.

        A later block of reasoning is text with all that stands in it, if it is closed.
        """
        assert self._format is not None
        open, close = self._format.open, self._format.close
        texts: list[str] = []
        bodies: list[tuple[str, str | None]] = []
        body: list[str] | None = None
        last_end = max((at for at, (marker, _) in enumerate(pieces) if marker == self._think_end), default=-1)
        thinking = False
        for at, (marker, text) in enumerate(pieces):
            if body is None and marker in (self._think, self._think_end):
                thinking = marker == self._think and at < last_end
            if thinking:
                texts.append(marker + text)
            elif body is not None and marker == close:
                bodies.append(("".join(body), None))
                body = None
                texts.append(text)
            elif body is not None and (close or marker != open):
                body += (marker, self._guarded(text))
            elif marker == open:
                if body is not None:
                    bodies.append(("".join(body), None))
                body = [self._guarded(text)]
            else:
                if marker == close and bodies and texts[-1].strip():  # another end after text
                    bodies[-1] = bodies[-1][0], f"{close} stands twice behind the call; a value cannot hold it"
                texts.append(text if marker in self._format.group else marker + text)
        if body is not None:
            bodies.append(("".join(body), f"the call is not closed with {close}" if close else None))
        return texts, bodies

    def _guarded(self, text: str) -> str:
        """Break the spellings of tags that are tokens, so that only the tokens are read as tags."""
        if self._spelled_tags is None:
            return text
        return self._spelled_tags.sub(lambda tag: tag[0][0] + GUARD + tag[0][1:], text)

    def _whole_message(self, reasoning: str | None, text: str, tools: Sequence[ToolSchema]) -> AssistantMessage:
        """Read a whole message as one call where it is one, or tries to be."""
        assert self._format is not None
        body = text.strip()
        if not (tools and self._format.is_call(body)):
            return AssistantMessage(text, reasoning)
        found = self._format.body(body, tools)
        return AssistantMessage("", reasoning, tuple(make_call(n, body, *call) for n, call in enumerate(found)))


def _unguarded(call: Found) -> Found:
    return Found(
        without_guards(call.name), without_guards(call.arguments), without_guards(call.error), without_guards(call.id)
    )


def concatenated(pieces: Iterable[tuple[str, str]]) -> str:
    """Join pieces to the text that they were cut from."""
    return "".join(marker + text for marker, text in pieces)


def _index(markers: Sequence[str], marker: str, start: int) -> int | None:
    return markers.index(marker, start) if marker in markers[start:] else None
