"""OpenAI's Chat Completions: one object, or the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agentrl.openai_api.completion import Begun, Completion
from agentrl.openai_api.dialect import Kept, event
from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.fields import Api
from agentrl.openai_api.request import ChatMessage, ChatRequest, read_request
from agentrl.openai_api.wire import Reading, validated
from agentrl.openai_api.writer import EventWriter, pieces
from agentrl.system.json_value import JSON

DONE = b"data: [DONE]\n\n"


class ChatCompletions:
    """The dialect of POST chat/completions."""

    api: Api = "chat"
    path = "v1/chat/completions"

    def read(self, body: JSON, reading: Reading, kept: Kept) -> ChatRequest:
        return read_request(body, reading)

    def turns(self, answer: JSON, reading: Reading) -> list[ChatMessage]:
        return [validated(answer, ChatMessage, reading)]

    def answer(self, completion: Completion) -> dict[str, object]:
        """Make the `chat.completion` object."""
        choice: dict[str, object] = {
            "index": 0,
            "message": {**completion.message, "refusal": None},
            "logprobs": logprobs(completion),
            "finish_reason": completion.finish_reason,
        }
        extra: dict[str, object] = {**_tries(completion)}
        if completion.request.return_token_ids:
            choice["token_ids"] = completion.ids
            extra["prompt_token_ids"] = completion.prompt_ids
        return {**_head(completion, "chat.completion"), "choices": [choice], "usage": _usage(completion), **extra}

    def writer(self, begun: Begun) -> EventWriter:
        return _Chunks(begun)

    def error(self, error: ApiError) -> dict[str, JSON]:
        return openai_error(error)

    def error_event(self, error: ApiError) -> bytes:
        """Write the error as a chunk, which OpenAI's clients raise."""
        return event(openai_error(error))


class _Chunks(EventWriter):
    """Writes the `chat.completion.chunk` events: role, reasoning, text, calls (name, then arguments), end, usage,
    [DONE].

    Log-probs, token ids and tries, where there are any, come with the first.
    """

    def open(self, begun: Begun) -> Iterator[bytes]:
        first: dict[str, JSON] = {"role": "assistant", "content": "", "refusal": None}
        with_first: dict[str, JSON] = {"logprobs": None}
        more = dict[str, JSON]()
        if isinstance(begun, Completion):
            with_first["logprobs"] = logprobs(begun)
            more = _tries(begun)
            if begun.request.return_token_ids:
                with_first["token_ids"] = begun.ids
                more = {"prompt_token_ids": begun.prompt_ids, **more}
        yield _chunk(begun, [_choice(first, more=with_first)], **more)

    def reason(self, piece: str) -> Iterator[bytes]:
        yield _chunk(self.begun, [_choice({"reasoning_content": piece})])

    def say(self, piece: str) -> Iterator[bytes]:
        yield _chunk(self.begun, [_choice({"content": piece})])

    def close(self, completion: Completion) -> Iterator[bytes]:
        for index, call in enumerate(completion.message.get("tool_calls", ())):
            named = {**call, "index": index, "function": {"name": call["function"]["name"], "arguments": ""}}
            yield _chunk(completion, [_choice({"tool_calls": [named]})])
            for piece in pieces(str(call["function"].get("arguments", ""))):
                part = {"index": index, "function": {"arguments": piece}}
                yield _chunk(completion, [_choice({"tool_calls": [part]})])
        yield _chunk(completion, [_choice({}, finish_reason=completion.finish_reason)])
        options = completion.request.stream_options
        if options is not None and options.include_usage:
            yield _chunk(completion, [], usage=_usage(completion))
        yield DONE


def openai_error(error: ApiError) -> dict[str, JSON]:
    """Write an error in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _head(completion: Begun, kind: str) -> dict[str, JSON]:
    return {
        "id": f"chatcmpl-{completion.id}",
        "object": kind,
        "created": completion.created,
        "model": completion.request.model,
    }


def _choice(
    delta: Mapping[str, object], finish_reason: str | None = None, more: Mapping[str, JSON] | None = None
) -> dict[str, object]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, **(more or {})}


def _chunk(completion: Begun, choices: Sequence[object], **more: JSON) -> bytes:
    return event({**_head(completion, "chat.completion.chunk"), "choices": choices, **more})


def _tries(completion: Completion) -> dict[str, JSON]:
    return {} if completion.tries is None else {"tries": completion.tries}


def _usage(completion: Completion) -> dict[str, JSON]:
    return {
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(completion.ids),
        "total_tokens": len(completion.prompt_ids) + len(completion.ids),
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
    }


def logprobs(completion: Completion) -> dict[str, JSON] | None:
    """Write the log-probs of an answer's tokens; None where nobody asked for them."""
    if not completion.request.logprobs:
        return None
    content: list[JSON] = [
        {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
