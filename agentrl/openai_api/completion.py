"""Finished assistant turns in OpenAI's shapes: one object, or the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.chat import AssistantMessage
from agentrl.chat.message import content_text
from agentrl.openai_api.request import ChatRequest
from agentrl.system.json_value import JSON
from agentrl.trajectory import Message

PIECE = 64
"""Characters of text in one chunk of a stream."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": generating\n\n"


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
                    "arguments": call.raw if call.arguments is None else _json(call.arguments),
                },
            }
            for id, call in zip(call_ids, message.calls, strict=True)
        ]
    return answer


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `tokens` are the texts of `ids`, one each."""

    request: ChatRequest
    message: Message
    finish_reason: str
    prompt_ids: list[int]
    ids: list[int]
    logprobs: list[float]
    tokens: list[str]
    cached_tokens: int
    tries: int | None
    """Answers that were sampled until this one met the request's rules for calls; None: it has no such rules."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def size(self) -> int:
        """Number of characters of the answer, about: a token's log-prob takes as long as 8 of its text."""
        said = self.message.get("reasoning_content") or ""
        return len(content_text(self.message["content"])) + len(said) + 8 * len(self.tokens)

    def body(self) -> dict[str, object]:
        """Make the `chat.completion` object."""
        choice: dict[str, object] = {
            "index": 0,
            "message": {**self.message, "refusal": None},
            "logprobs": self._logprobs(),
            "finish_reason": self.finish_reason,
        }
        extra: dict[str, object] = {**self._tries()}
        if self.request.return_token_ids:
            choice["token_ids"] = self.ids
            extra["prompt_token_ids"] = self.prompt_ids
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage(), **extra}

    def chunks(self) -> Iterator[bytes]:
        """Make the `chat.completion.chunk` events: role, reasoning, text, calls (name, then arguments), end, usage,
        [DONE].

        Log-probs, token ids and tries, where there are any, come with the first.
        """
        first: dict[str, JSON] = {"role": "assistant", "content": "", "refusal": None}
        with_first: dict[str, JSON] = {"logprobs": self._logprobs()}
        if self.request.return_token_ids:
            with_first["token_ids"] = self.ids
            yield self._event([self._choice(first, more=with_first)], prompt_token_ids=self.prompt_ids, **self._tries())
        else:
            yield self._event([self._choice(first, more=with_first)], **self._tries())
        said = {
            "reasoning_content": self.message.get("reasoning_content"),
            "content": content_text(self.message["content"]),
        }
        for key, text in said.items():
            for piece in _pieces(text or ""):
                yield self._event([self._choice({key: piece})])
        for index, call in enumerate(self.message.get("tool_calls", ())):
            named = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
            yield self._event([self._choice({"tool_calls": [named]})])
            for piece in _pieces(str(call["function"].get("arguments", ""))):
                yield self._event([self._choice({"tool_calls": [{"index": index, "function": {"arguments": piece}}]})])
        yield self._event([self._choice({}, finish_reason=self.finish_reason)])
        if self.request.stream_options is not None and self.request.stream_options.include_usage:
            yield self._event([], usage=self._usage())
        yield DONE

    def _head(self, kind: str) -> dict[str, JSON]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.request.model}

    def _choice(
        self, delta: Mapping[str, object], finish_reason: str | None = None, more: Mapping[str, JSON] | None = None
    ) -> dict[str, object]:
        return {"index": 0, "delta": delta, "finish_reason": finish_reason, **(more or {})}

    def _event(self, choices: Sequence[object], **more: JSON) -> bytes:
        return event({**self._head("chat.completion.chunk"), "choices": choices, **more})

    def _tries(self) -> dict[str, JSON]:
        return {} if self.tries is None else {"tries": self.tries}

    def _usage(self) -> dict[str, JSON]:
        return {
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": len(self.ids),
            "total_tokens": len(self.prompt_ids) + len(self.ids),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _logprobs(self) -> dict[str, JSON] | None:
        if not self.request.logprobs:
            return None
        content: list[JSON] = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(self.tokens, self.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


def event(value: object) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _json(value: JSON) -> str:
    """Encode as readable JSON; escaped where the policy spelled half a surrogate pair, which has no UTF-8."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(value)
    return text


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), PIECE):
        yield text[start : start + PIECE]
