"""Validation of chat completion requests.

A field that asks for something that the run decides (how to sample) is ignored and counted. One that would change the
result in a way that is not offered is refused by name. Any other unknown field is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr, ValidationError, field_validator

from agentrl.openai_api.errors import ApiError
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

RUN_DECIDES = ("temperature", "top_p", "top_k", "min_p", "seed", "reasoning_effort")
"""Fields that never hold: the trainer's log-probs are of the run's own sampling."""

DEFAULTS: dict[str, tuple[JSON, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "echo": (False,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    **dict.fromkeys(("functions", "function_call", "audio", "web_search_options", "stop_token_ids"), ([],)),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"), ()),
    **dict.fromkeys(("regex", "ebnf", "json_schema", "chat_template", "chat_template_kwargs", "documents"), ()),
}
"""Fields that would change the result, and the values (null besides) with which they do not."""

Part: TypeAlias = dict[str, Any]


class FunctionCall(BaseModel):
    """Function name and arguments, as JSON text, of a call."""

    name: str = ""
    arguments: str = ""


class ToolCall(BaseModel):
    """One call of an assistant message."""

    id: str | None = None
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message. Keys that clients add (refusal, annotations, audio, index, null fields) are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @field_validator("content")
    @classmethod
    def _text_only(cls, content: str | list[Part] | None) -> str | list[Part] | None:
        for part in content if isinstance(content, list) else ():
            if part.get("type") not in ("text", "refusal") or not isinstance(part.get(part["type"]), str):
                raise ValueError(f"only text parts are supported, found {part.get('type')!r}")
        return content

    @property
    def text(self) -> str:
        """The content as text, its parts joined."""
        if isinstance(self.content, list):
            return "".join(part[part["type"]] for part in self.content)
        return self.content or ""

    def to_message(self) -> Message:
        """Convert to the form that `Chat` takes. Arguments stay the text that they are."""
        message: Message = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        for key in ("reasoning_content", "tool_call_id", "name"):
            if value := getattr(self, key):
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()} for call in self.tool_calls
            ]
        return message


class FunctionSchema(BaseModel):
    """Function of a tool declaration."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDeclaration(BaseModel):
    """Check of a tool declaration: a template is given what the client sent, in the client's order of keys."""

    type: Literal["function"]
    function: FunctionSchema


class StreamOptions(BaseModel):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """Body of POST chat/completions, as far as it is read."""

    model_config = ConfigDict(extra="allow")

    model: str = "policy"
    messages: list[ChatMessage] = Field(min_length=1)
    tools: list[ToolSchema] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    stop: StrictStr | list[StrictStr] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    logprobs: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    """Extension of OpenAI's API: adds `token_ids` to the choice and `prompt_token_ids` to the answer."""

    @property
    def token_limit(self) -> int | None:
        """Tokens that the answer may have, the lower of both fields; None: as many as the budget allows."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def stops(self) -> tuple[str, ...]:
        """Non-empty stop texts."""
        return tuple(text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if text)

    @property
    def may_call(self) -> bool:
        """True when tool calls are read; with tool_choice "none" they stay text."""
        return (self.model_extra or {}).get("tool_choice") != "none"

    @field_validator("tools")
    @classmethod
    def _functions_only(cls, tools: list[ToolSchema] | None) -> list[ToolSchema] | None:
        for tool in tools or ():
            ToolDeclaration.model_validate(tool)
        return tools

    @property
    def declared_tools(self) -> list[ToolSchema]:
        """Declared tools without null fields, and with parameters, which chat templates take for granted."""
        declared = []
        for tool in self.tools or ():
            function = {key: value for key, value in tool["function"].items() if value is not None}
            function.setdefault("parameters", {"type": "object", "properties": {}})
            function["parameters"].setdefault("properties", {})
            declared.append({"type": "function", "function": function})
        return declared

    def overruled(self) -> list[str]:
        """List the fields that the run decides and that were given all the same."""
        extra = self.model_extra or {}
        return [name for name in RUN_DECIDES if extra.get(name) is not None]


def read_request(body: bytes) -> ChatRequest:
    """Parse a request. Raises ApiError naming the field that is wrong or not supported."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        raise _as_api_error(error) from None
    for name, value in (request.model_extra or {}).items():
        if name in DEFAULTS and value is not None and value not in DEFAULTS[name]:
            raise ApiError(400, f"{name}={_short(value)} is not supported by this endpoint.", param=name)
    return request


def _as_api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {first['msg']}")
    param = _path(first["loc"])
    return ApiError(400, f"{param or 'The body'}: {first['msg']}, found {_short(first['input'])}", param=param or None)


def _path(location: Sequence[int | str]) -> str:
    """Format a location as `messages[0].content`; the names of a union's alternatives are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "list"):
            path += f".{part}" if path else part
    return path


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
