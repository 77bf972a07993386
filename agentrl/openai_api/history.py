"""Lookup of the recorded transcript that a call's messages continue.

Every place of a transcript from which a conversation may continue is a `Checkpoint`. Such places are after a prompt
(an assistant turn comes next) and after an assistant turn (an answer to it comes next). A checkpoint's key is a digest
of the tools and of all messages up to there. So a call is compared with all transcripts of its session at once, in
time linear in its own length.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

from agentrl.system.json_value import JSON, as_object
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

Owner = TypeVar("Owner")
Digest = bytes
Defaults = Mapping[str, Mapping[str, str]]
"""Defaults of parameters, in JSON text, by function and name."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint(Generic[Owner]):
    """Place in the owner's transcript whose first `tokens` tokens stand for `messages`."""

    owner: Owner
    messages: Sequence[Message]
    tokens: int
    replied: bool
    """True: the last of the messages is a sampled assistant turn; otherwise the tokens end with a generation prompt."""


@dataclass(slots=True)
class History(Generic[Owner]):
    """All checkpoints of a session."""

    _known: dict[Digest, list[Checkpoint[Owner]]] = field(default_factory=dict)

    def add(self, digest: Digest, checkpoint: Checkpoint[Owner]) -> None:
        """Store a checkpoint under the digest of its messages."""
        self._known.setdefault(digest, []).append(checkpoint)

    def remove(self, digest: Digest, checkpoint: Checkpoint[Owner]) -> None:
        """Remove a checkpoint whose messages, which have the digest, are in no transcript any more."""
        self._known[digest].remove(checkpoint)

    def items(self) -> Iterable[tuple[Digest, Sequence[Checkpoint[Owner]]]]:
        """Return all checkpoints with the digests of their messages."""
        return self._known.items()

    def find(self, messages: Sequence[Message], digests: Sequence[Digest]) -> list[Checkpoint[Owner]]:
        """Find the checkpoints of the longest beginning of `messages` from which the rest can be appended, oldest
        first.

        The rest is empty after a prompt. After an assistant turn it is anything but assistant turns.
        """
        for end in range(len(messages), 0, -1):
            rest = messages[end:]
            if rest and rest[0]["role"] == "assistant":
                return []
            found = [
                checkpoint
                for checkpoint in self._known.get(digests[end], ())
                if checkpoint.replied == bool(rest) and _same_reasoning(checkpoint.messages, messages)
            ]
            if found:
                return found
        return []


def cause_of(
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    recorded: Iterable[tuple[Sequence[Message], Sequence[ToolSchema]]],
) -> str:
    """Name the difference that keeps a call from continuing one of the `recorded` conversations, each with its tools.

    tools: only its tools differ. system: its system message, or its tools, too. edited: it begins as one of them does,
    and differs later. new: it begins otherwise, as a sub-agent's or a side call's.
    """
    causes = set[str]()
    given = [digest_after(b"", message) for message in messages]
    for known, their_tools in recorded:
        theirs = [digest_after(b"", message) for message in known]
        if _agree(given, theirs):
            causes.add("tools" if list(their_tools) != list(tools) else "edited")
            continue
        ours, own = (_without_system(one, keys) for one, keys in ((messages, given), (known, theirs)))
        if _agree(ours, own):
            causes.add("system")
        elif ours[:1] == own[:1]:
            causes.add("edited")
    return next((cause for cause in ("tools", "system", "edited") if cause in causes), "new")


def _agree(one: Sequence[Digest], other: Sequence[Digest]) -> bool:
    """Say whether one conversation begins with the other, and both have a message."""
    both = min(len(one), len(other))
    return both > 0 and one[:both] == other[:both]


def _without_system(messages: Sequence[Message], keys: list[Digest]) -> list[Digest]:
    return keys[1:] if messages and messages[0]["role"] in ("system", "developer") else keys


def digests_of(messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[Digest]:
    """Digest the tools alone, and with the first, the first two, ... messages: len(messages) + 1 digests."""
    digests, defaults = [_digest(b"", tools or None)], defaults_of(tools or ())
    calls = dict[str, int]()
    for message in messages:
        if message["role"] == "assistant":
            calls = {call.get("id", ""): number for number, call in enumerate(message.get("tool_calls", ()))}
        answered = calls.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        digests.append(digest_after(digests[-1], message, defaults, answered=answered))
    return digests


def defaults_of(tools: Sequence[ToolSchema], *, doubles: bool = True) -> Defaults:
    """List the defaults of parameters that schemas declare, by function; `doubles` as in `digest_after`."""
    defaults = dict[str, Mapping[str, str]]()
    for tool in tools:
        properties = as_object(tool["function"].get("parameters", {}).get("properties"))
        declared = {
            name: _text(_plain_numbers(one["default"], doubles))
            for name, one in properties.items()
            if isinstance(one, dict) and "default" in one
        }
        if declared:
            defaults[tool["function"]["name"]] = declared
    return defaults


def digest_after(
    before: Digest,
    message: Message,
    defaults: Defaults = MappingProxyType({}),
    *,
    answered: int | None = None,
    doubles: bool = True,
) -> Digest:
    """Digest a message that follows `before`. Two messages are the same when role, text and calls are.

    Arguments are compared as JSON values where they are JSON. An argument that is null or equals its declared default
    may be left out: programs write both into the calls that they send back, and some leave null out. The ids of
    assistant turns' calls are names that clients may replace, and most clients do not send reasoning back: both are
    left out.

    answered: number of the call that a tool's message answers, of the turn before, which stands for its id.
    doubles: integers above 2^53 are the same where they are the same double, as clients send them back. Otherwise each
    is a number of its own.
    """
    calls = list[JSON]()
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], _canonical(call["function"]["arguments"], doubles)
        if isinstance(arguments, dict):
            declared = defaults.get(name, {})
            arguments = {
                key: value
                for key, value in arguments.items()
                if value is not None and (key not in declared or declared[key] != _text(value))
            }
        calls.append([name, arguments])
    named = None if message["role"] in ("assistant", "tool") else message.get("name")
    return _digest(before, [message["role"], message["content"], calls, named, answered])


def _digest(before: Digest, value: object) -> Digest:
    return hashlib.blake2b(before + _text(value).encode(), digest_size=16).digest()


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, sort_keys=True, default=str)  # str: of images


def _canonical(arguments: JSON, doubles: bool) -> JSON:
    if not isinstance(arguments, str):
        return arguments
    try:
        return _plain_numbers(json.loads(arguments), doubles)
    except (ValueError, RecursionError):
        return arguments


def _plain_numbers(value: JSON, doubles: bool) -> JSON:
    """Write numbers as a client whose numbers are doubles sends them back: 1.0 as 1, and large integers rounded."""
    if isinstance(value, dict):
        return {name: _plain_numbers(member, doubles) for name, member in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(member, doubles) for member in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1 << 53:
        return float(value) if doubles and abs(value) <= sys.float_info.max else value
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= 1 << 53 else value


def _same_reasoning(recorded: Sequence[Message], given: Sequence[Message]) -> bool:
    """Check that reasoning that a client sends back is the policy's own. Reasoning left out is not compared."""
    return all(
        message.get("reasoning_content") in (None, kept.get("reasoning_content"))
        for kept, message in zip(recorded, given, strict=False)
        if message["role"] == "assistant"
    )
