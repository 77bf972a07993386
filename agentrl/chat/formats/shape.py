"""Shapes: the text between two assistant turns, learnt once for each kind of turn.

The text around new messages depends on their roles and names, hardly ever on their contents. A shape is that text with
a slot for each content, found by having the format write slot names in place of contents. Probes then show how contents
are inserted: as they are, stripped, or as JSON. Where they are inserted in another way, or are blank, there is no shape
and the format writes each text itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence

from agentrl.trajectory import Message

SLOT = "AgentrlSlot{}End"
PROBES = (
    *("x", "1", "null", "[1, 2]", '{"q": "é\\"}', "a <b> & 'c'\n\nd"),
    *(" a\n", "  b  ", "\n\nc\n\n", "=)", "'s", "/x", "中"),
)
MAX_SHAPES = 1000
Insert = Callable[[str], str]
Write = Callable[[list[Message]], str]
"""Writes messages in the format."""


def _as_json(text: str) -> str:
    """Escape as JSON, without the quotes: those are around the slot already."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


INSERTS: tuple[Insert, ...] = (str, str.strip, _as_json)


class Shape:
    """Pieces of text with a content between each two, and the way each content is inserted."""

    def __init__(self, pieces: Sequence[str], inserts: Sequence[Insert]) -> None:
        self._first, *self._others = pieces
        self._inserts = inserts

    def fill(self, contents: Sequence[str]) -> str:
        """Insert one content into each slot."""
        parts = [self._first]
        for insert, content, piece in zip(self._inserts, contents, self._others, strict=True):
            parts += (insert(content), piece)
        return "".join(parts)


class Shapes:
    """Learnt shapes, by a key that holds everything but the contents."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[object, Shape | None]] = {}
        self._seen: set[Hashable] = set()

    def fill(self, key: Hashable, keep: object, messages: Sequence[Message], write: Write) -> str | None:
        """Write `messages` by their shape; None without a shape. `keep` stays alive: its id may be in `key`."""
        contents = [text for message in messages if isinstance(text := message["content"], str) and text.strip()]
        if len(contents) < len(messages):
            return None
        known = self._known.get(key)  # Read once: another thread may forget it.
        if known is None:
            if key not in self._seen:  # Learning costs a dozen writes: not for call ids that never come back.
                if len(self._seen) >= MAX_SHAPES:
                    self._seen.clear()
                    self._known.clear()
                self._seen.add(key)
                return None
            known = self._known[key] = (keep, learn_shape(messages, write))
        shape = known[1]
        return None if shape is None else shape.fill(contents)


def learn_shape(messages: Sequence[Message], write: Write) -> Shape | None:
    """Learn the shape of `messages`; None where a content is not inserted in one of the known ways."""
    slots = [SLOT.format(index) for index in range(len(messages))]
    rest = write(_with_contents(messages, slots))
    pieces = []
    for slot in slots:
        piece, found, rest = rest.partition(slot)
        if not found:
            return None
        pieces.append(piece)
    pieces.append(rest)
    inserts = []
    for index in range(len(slots)):
        insert = _learn_insert(messages, write, slots, pieces, index)
        if insert is None:
            return None
        inserts.append(insert)
    return Shape(pieces, inserts)


def _learn_insert(
    messages: Sequence[Message], write: Write, slots: list[str], pieces: list[str], index: int
) -> Insert | None:
    """Find the way in which the content of `messages[index]` is inserted, if all probes agree."""
    probed = [[*slots[:index], probe, *slots[index + 1 :]] for probe in PROBES]
    written = [write(_with_contents(messages, contents)) for contents in probed]
    for insert in INSERTS:
        shape = Shape(pieces, [insert if at == index else str for at in range(len(slots))])
        if [shape.fill(contents) for contents in probed] == written:
            return insert
    return None


def _with_contents(messages: Sequence[Message], contents: Sequence[str]) -> list[Message]:
    return [{**message, "content": content} for message, content in zip(messages, contents, strict=True)]
