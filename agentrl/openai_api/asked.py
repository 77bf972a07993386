"""One request to a session, read: its messages, tools and digests, before the session has a place for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from agentrl.chat import Chat
from agentrl.chat.message import content_text
from agentrl.openai_api.dialect import Dialect, Kept, Translated
from agentrl.openai_api.history import Digest, digest_after, digests_of
from agentrl.openai_api.request import ChatRequest, as_templates_take
from agentrl.openai_api.system_turns import placed_turns
from agentrl.openai_api.wire import Reading
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message
from agentrl.trajectory.picture import pictures_in

LONG_BODY = 64 << 10
"""Bytes of a request from which it is read, rendered and encoded off the event loop."""


@dataclass(frozen=True, slots=True)
class Body:
    """Body of a request, parsed."""

    value: JSON
    long: bool
    """True: it has more than LONG_BODY bytes."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was read."""

    request: ChatRequest
    messages: list[Message]
    tools: list[ToolSchema]
    digests: list[Digest]
    """Digests by number of messages, as `digests_of` makes them."""
    characters: int
    """Number of characters in texts that every template writes; blanks are left out where there are many."""
    long: bool
    """True: its messages are rendered off the event loop."""
    dropped: Mapping[str, str]
    """Reasons by the name of what was dropped from the request."""
    number: int = 0
    """Number of the session's requests up to it."""
    begun: str = ""
    """Beginning of the answer, which the prompt ends with, and the policy continues."""
    later: Sequence[ToolSchema] = ()
    """Tools that may be called, and are not among `tools`."""

    @property
    def digest(self) -> Digest:
        """Digest of the prompt's messages, and of the beginning of the answer."""
        return _with_beginning(self.digests[-1], self.begun)


def read(body: Body, dialect: Dialect, reading: Reading, kept: Kept, chat: Chat, most_characters: int | None) -> Asked:
    """Read a request; blanks are only told from text where there are more characters than `most_characters`.

    Raises ApiError.
    """
    request = dialect.read(body.value, reading, kept)
    messages = _with_names([message.to_message() for message in request.messages])
    if not reading.strict:
        messages, is_changed = placed_turns(messages, chat)
        if is_changed:
            reading.drop("system_turns", "the chat template writes none in the middle: a user's text stands for them")
    # Templates may leave out an assistant's text, such as reasoning.
    texts = [content_text(message["content"]) for message in messages if message["role"] != "assistant"]
    characters = sum(map(len, texts))
    if most_characters is not None and characters > most_characters:
        characters = sum(len("".join(text.split())) for text in texts)
    tools = request.declared_tools
    long = body.long or any(pictures_in(messages))  # Small files may hold many pixels.
    begun, later = (request.begun, request.later) if isinstance(request, Translated) else ("", ())
    further = as_templates_take(cast(Sequence[ToolSchema], later))
    return Asked(
        request, messages, tools, digests_of(messages, tools), characters, long, reading.dropped, 0, begun, further
    )


def _with_names(messages: list[Message]) -> list[Message]:
    """Add to tool answers the name of the function they answer, which some templates write."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id", "")] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message and (answered := message.get("tool_call_id")) in names:
            message["name"] = names[answered]
    return messages


def _with_beginning(digest: Digest, begun: str) -> Digest:
    """Digest a prompt that ends with the beginning of an answer: no other answer continues it."""
    return digest_after(digest, {"role": "begun", "content": begun}) if begun else digest
