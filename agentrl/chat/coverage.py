"""Coverage: the messages of a conversation that a chat template writes.

A template may have no branch for a message's role, or only one for another place (a system message after a user's).
Then it writes nothing and raises nothing, and nobody would see it. So each shape of a conversation is written once with
words that stand nowhere else, and each word is looked for. A word survives trimming and escaping; the real texts, which
a template may change, are not compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import cast

from agentrl.errors import ConfigError, DataError
from agentrl.trajectory import Message, Part

DEVELOPER, SYSTEM = "developer", "system"
UNKNOWN_ROLE = "agentrlrole"
QUESTION: Message = {"role": "user", "content": "AgentrlQuestion"}
REPLY: Message = {"role": "assistant", "content": "AgentrlReply"}
MAX_SHAPES = 1000
AS_SYSTEM = "developer messages, written as system messages: the chat template has no branch for that role"
BESIDE_CALLS = "text beside tool calls of an assistant turn, which the chat template does not write"
MOVED = (
    "a system message, which the chat template moves to the last user turn: a transcript keeps it where it was first"
)
REASONING = "reasoning_content of an assistant turn, which the chat template does not write there"

Write = Callable[[list[Message]], str]
"""Writes messages as text. Raises ConfigError where the template refuses them."""
Kind = tuple[object, ...]


MADE_UP = re.compile("agentrl[tr][a-j]+?end")
"""Text or reasoning of a probe, as `_probe` makes them."""


class Coverage:
    """Shapes of conversations that a template writes whole. `where` names the template in messages."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._known: dict[Hashable, tuple[str, ...]] = {}

    def check(
        self, given: Sequence[Message], prepared: Sequence[Message], write: Write, further: Hashable, first: int = 0
    ) -> tuple[str, ...]:
        """Return the template's deliberate changes and omissions. Raises DataError for an unwritten message.

        given: the messages as they came; the first is message number `first` of its conversation.
        prepared: the same messages as the template is given them.
        further: all else on which the output of `write` depends, e.g. whether there are tools.
        """
        kinds = [_kind(message) for message in given]
        counts = frozenset((kind, min(count, 2)) for kind, count in Counter(kinds).items())
        shape = (further, counts, (*kinds[:2], *kinds[-1:]), frozenset(pairwise(kinds[1:])))
        known = self._known.get(shape)
        if known is None:
            known = self._probe(given, prepared, write, first)
            if len(self._known) >= MAX_SHAPES:
                self._known.clear()
            self._known[shape] = known
        return known

    def _probe(
        self, given: Sequence[Message], prepared: Sequence[Message], write: Write, first: int
    ) -> tuple[str, ...]:
        texts, thoughts = ([f"Agentrl{kind}{_letters(at)}End" for at in range(len(given))] for kind in "TR")
        try:
            written = write(list(map(_with_words, prepared, texts, thoughts))).casefold()
        except ConfigError:
            return ()  # The template reads its texts, and may refuse made-up ones.
        told = {*MADE_UP.findall(written)}
        found: list[str] = []
        if prepared[0]["role"] == SYSTEM and prepared[-1]["role"] == "user":
            later = [*map(_with_words, prepared, texts, thoughts), REPLY, QUESTION]
            with suppress(ConfigError):
                written_later = write(later).casefold()
                if written_later.rfind(texts[0].casefold()) > written_later.rfind(str(REPLY["content"]).casefold()):
                    found.append(MOVED)
        for at, (message, one) in enumerate(zip(given, prepared, strict=True)):
            if message["role"] != one["role"]:
                found.append(AS_SYSTEM)
            if one.get("reasoning_content") and thoughts[at].casefold() not in told:
                found.append(REASONING)
            if not _is_told(one) or texts[at].casefold() in told:
                continue
            if not one.get("tool_calls"):
                raise DataError(self._unwritten(given, prepared, at, first))
            found.append(BESIDE_CALLS)
        return tuple(dict.fromkeys(found))

    def _unwritten(self, given: Sequence[Message], prepared: Sequence[Message], at: int, first: int) -> str:
        role, written = given[at]["role"], prepared[at]["role"]
        found = (
            f"role {role!r}" if role == written else f"role {role!r} (taken for {written!r}: it has no branch for it)"
        )
        before = given[at - 1]["role"] if at else "assistant" if first else None
        place = f"behind one of role {before!r}" if before else "at the beginning of its messages"
        return (
            f"message {first + at} (the first is 0): expected a message that {self._where} writes, found one of "
            f"{found}, {place}, whose text it leaves out, so that the model would not see it. Put the text into a "
            f"message that is written, e.g. the first system message or a user's, or choose a chat template that "
            f"writes such messages (model.chat_template)"
        )


def knows_developer(write: Write) -> bool:
    """Say whether a template has a branch of its own for the role `developer`.

    It has no such branch where it writes nothing, or writes the same as for an invented role: a header with the role's
    name, which no model has learnt.
    """
    asked: Message = {"role": DEVELOPER, "content": "AgentrlInstruction"}
    try:
        own = write([asked, QUESTION]).casefold()
    except ConfigError:
        return False
    try:
        any_role = write([{**asked, "role": UNKNOWN_ROLE}, QUESTION]).casefold()
    except ConfigError:
        any_role = ""
    return str(asked["content"]).casefold() in own and own != any_role.replace(UNKNOWN_ROLE, DEVELOPER)


def writes_turns_of(role: str, write: Write, write_after: Callable[[list[Message]], str]) -> bool:
    """Say whether a template writes messages of the role, e.g. `system`, at their place in the middle.

    It may refuse them, leave them out, or move them to its beginning or end. `write_after`: writes messages after a
    conversation that ends with a reply.
    """
    first, later = "AgentrlFirst", "AgentrlLater"
    turn: Message = {"role": role, "content": later}
    talk: list[Message] = [{"role": SYSTEM, "content": first}, QUESTION, turn]
    try:
        written = [write(talk), write([*talk, REPLY, QUESTION]), write_after([QUESTION, turn])]
    except (ConfigError, ValueError):
        return False
    asked, said = str(QUESTION["content"]), str(REPLY["content"])
    order = [(first, asked, later), (first, asked, later, said, asked), (asked, later)]
    return all(_in_order(text, words) for text, words in zip(written, order, strict=True))


def _in_order(text: str, words: Sequence[str]) -> bool:
    """Say whether a text has these words, and in this order."""
    return re.findall("|".join(set(words)), text) == list(words)


def _kind(message: Message) -> Kind:
    """Reduce a message to the properties by which a template may choose a branch."""
    content = message.get("content")
    form = type(content) if isinstance(content, list) else _is_told(message)
    return message["role"], form, bool(message.get("tool_calls")), bool(message.get("reasoning_content"))


def _is_told(message: Message) -> bool:
    """Say whether a message has text."""
    content = message.get("content")
    if isinstance(content, str):
        return bool(content) and not content.isspace()
    return any(isinstance(part, str) or "text" in part for part in content or ())


def _with_words(message: Message, text: str, thought: str) -> Message:
    """Put made-up words in place of a message's texts."""
    probe: dict[str, object] = dict(message)
    content = message.get("content")
    if _is_told(message):
        probe["content"] = text if isinstance(content, str) else [_said(part, text) for part in content or ()]
    if message.get("reasoning_content"):
        probe["reasoning_content"] = thought
    return cast(Message, probe)


def _said(part: str | Part, text: str) -> str | Part:
    if isinstance(part, str):
        return text
    return {**part, "text": text} if "text" in part else part


def _letters(number: int) -> str:
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))
