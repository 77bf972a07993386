"""Assistant turns, begun and finished, which a dialect writes in its shape."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field

from agentrl.chat import AssistantMessage
from agentrl.chat.message import content_text
from agentrl.openai_api.request import ChatRequest
from agentrl.trajectory import Message


def assistant_message(message: AssistantMessage, call_ids: list[str]) -> Message:
    """Make the message that the client is given. A malformed call has its raw text as arguments."""
    answer: Message = {"role": "assistant", "content": message.text}
    if message.reasoning:
        answer["reasoning_content"] = message.reasoning
    if message.calls:
        answer["content"] = message.text or None
        answer["tool_calls"] = [
            {
                "id": id,
                "type": "function",
                "function": {
                    "name": call.name.encode(errors="replace").decode(),
                    "arguments": call.raw if call.arguments is None else encoded(call.arguments).decode(),
                },
            }
            for id, call in zip(call_ids, message.calls, strict=True)
        ]
    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An answer that is being sampled."""

    request: ChatRequest
    prompt_ids: list[int]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Begun):
    """One answer. `tokens` are the texts of `ids`, one each."""

    message: Message
    finish_reason: str
    ids: list[int]
    logprobs: list[float]
    tokens: list[str]
    cached_tokens: int
    tries: int | None
    """Answers that were sampled until this one met the request's rules for calls; None: it has no such rules."""
    matched: str | None
    """The stop text that ended it."""

    @property
    def size(self) -> int:
        """Number of characters of the answer, about: a token's log-prob takes as long as 8 of its text."""
        said = self.message.get("reasoning_content") or ""
        return len(content_text(self.message["content"])) + len(said) + 8 * len(self.tokens)


def encoded(value: object) -> bytes:
    """Encode as readable JSON; escaped where the policy spelled half a surrogate pair, which has no UTF-8."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()
