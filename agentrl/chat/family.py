"""Chat formats of known model families, by the `renderers` package.

Renderers answer with whole token sequences and scan the turn before; a bridge depends only on how that turn ended, so
a stand-in turn of a few tokens is given instead of the transcript, and the cost of a turn does not grow with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from renderers import RendererConfig, build_training_sample, create_renderer  # type: ignore[import-untyped]
from renderers.base import ParsedToolCall, ToolCallParseStatus, merge_chat_template_kwargs  # type: ignore[import-untyped]
from renderers.configs import config_from_name  # type: ignore[import-untyped]

from agentrl.chat.codec import Codec, RendererTokenizer
from agentrl.chat.message import AssistantMessage, ParsedCall, make_call
from agentrl.errors import ConfigError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

FAMILIES = tuple(
    name
    for config in get_args(get_args(RendererConfig)[0])
    if (name := config.model_fields["name"].default) not in ("auto", "default", "custom")
)
ERRORS = {
    ToolCallParseStatus.INVALID_JSON: "the call is not valid JSON",
    ToolCallParseStatus.UNCLOSED_BLOCK: "the call is not closed",
    ToolCallParseStatus.MISSING_NAME: "the call has no function name",
    ToolCallParseStatus.MALFORMED_STRUCTURE: "the call does not have the form that the system prompt shows",
}
USER: Message = {"role": "user", "content": "u"}
REPLY: Message = {"role": "assistant", "content": "a"}


class FamilyFormat:
    """One family's renderer behind the `Format` protocol."""

    parses_tools = True

    def __init__(self, codec: Codec, family: str, template_kwargs: dict[str, Any]) -> None:
        """Raises ConfigError when the tokenizer lacks the family's control tokens or a template kwarg is unknown."""
        self.name = family
        self._codec = codec
        # Harmony encodes contents literally by itself, with its own tokenizer.
        self.guards = family != "gpt-oss"
        try:
            config = merge_chat_template_kwargs(_config(family), template_kwargs)
            # A transcript is never re-rendered, so a bridge may never be refused for reasoning that it keeps.
            config = config.model_copy(update={"thinking_retention": "all"})
            self._renderer: Any = create_renderer(RendererTokenizer(codec), config)
        except (AssertionError, ValueError, OSError, RuntimeError) as fault:
            raise ConfigError(
                f"the chat format {family!r} does not fit the tokenizer at {codec.tokenizer.name_or_path}: {fault}. "
                f"Choose the model's own family in multi_turn.format, or `auto`"
            ) from fault
        self._renderer.effective_thinking_retention = "all"
        self._stops = frozenset(self._renderer.get_stop_token_ids())
        eos = codec.tokenizer.eos_token_id
        stops = [*self._renderer.get_stop_token_ids(), *([] if eos is None else [eos])]
        self.stop_token_ids = tuple(dict.fromkeys(stops))
        self._prompt = self._generation_prompt()
        self._reply, self.tail = self._reply_and_tail()
        self._close = self._reply[-1] if self._reply[-1] in self._stops else self.stop_token_ids[0]
        self._open_reply = self._reply[:-1] if self._reply[-1] in self._stops else self._reply

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> list[int]:
        ids: list[int] = self._renderer.render_ids(messages, tools=tools, add_generation_prompt=generation)
        return ids

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        if ids[-1] in self._stops:
            return self._bridge_closed(ids[-1], messages, tools)
        prompt, sampled = self._last_turn(ids)
        known = [*prompt, *sampled]
        bridged = self._renderer.bridge_to_next_turn(prompt, sampled, messages, tools=tools)
        if bridged is not None and bridged.token_ids[: len(known)] == known:
            return list(bridged.token_ids[len(known) :])
        close = [] if ids[-1] in self.stop_token_ids else [self._close]
        return [*close, *self._bridge_closed(self._close, messages, tools)]

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None) -> AssistantMessage:
        try:
            parsed = self._renderer.parse_response(list(ids), tools=tools, prompt_ids=self._prompt)
        except (ValueError, RecursionError) as fault:
            # E.g. a number of more digits, or a nesting deeper, than Python's JSON reader takes.
            text = self._codec.decode([id for id in ids if id not in self._stops])
            return AssistantMessage("", None, (make_call(0, text, None, None, f"the call cannot be read: {fault}"),))
        calls = tuple(_call(index, call) for index, call in enumerate(parsed.tool_calls))
        if not calls and self.name == "llama-3" and tools:
            calls = _broken_llama_call(parsed.content)
        return AssistantMessage(
            "" if calls and not parsed.tool_calls else parsed.content, parsed.reasoning_content, calls
        )

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None
    ) -> tuple[list[int], list[int]]:
        sample = build_training_sample(
            self._renderer,
            list(messages),
            tools=tools,
            role_to_mask=lambda message: message["role"] == "assistant",
            ensure_final_stop=True,
        )
        end = len(sample.loss_mask)
        while end and not sample.loss_mask[end - 1]:
            end -= 1
        end = end or len(sample.loss_mask)
        return sample.token_ids[:end], [int(trained) for trained in sample.loss_mask[:end]]

    def _generation_prompt(self) -> list[int]:
        """What a render adds for the policy to go on from."""
        without, with_prompt = self.render([USER], None, False), self.render([USER], None, True)
        shared = len(without) if with_prompt[: len(without)] == without else 0
        return with_prompt[shared:]

    def _reply_and_tail(self) -> tuple[list[int], list[int]]:
        """A short reply as the policy would sample it, and what stands behind it in a full render."""
        rendered = self._renderer.render([USER, REPLY])
        sampled = rendered.sampled_mask
        last = max(index for index, is_sampled in enumerate(sampled) if is_sampled)
        reply = [id for id, is_sampled in zip(rendered.token_ids, sampled, strict=True) if is_sampled]
        return reply, list(rendered.token_ids[last + 1 :])

    def _last_turn(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """The last generation prompt and what was sampled after it; looks no further back than that turn."""
        size = len(self._prompt)
        for index in range(len(ids) - 1, -1, -1):
            if ids[index] == self._prompt[0] and list(ids[index : index + size]) == self._prompt:
                return self._prompt, list(ids[index + size :])
            if ids[index] in self._stops:
                return [ids[index]], list(ids[index + 1 :])
        return self._prompt, list(ids)

    def _bridge_closed(self, stop: int, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        reply = [*self._open_reply, stop]
        bridged = self._renderer.bridge_to_next_turn([stop], reply, messages, tools=tools)
        if bridged is not None:
            return list(bridged.token_ids[1 + len(reply) :])
        return self._difference(messages, tools)

    def _difference(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        """For bridges that a renderer refuses: what a full render writes after a stand-in turn that made the calls."""
        calls = [
            {
                "id": m.get("tool_call_id", ""),
                "type": "function",
                "function": {"name": m.get("name", "f"), "arguments": {}},
            }
            for m in messages
            if m["role"] == "tool"
        ]
        before: list[Message] = [USER, {**REPLY, "tool_calls": calls} if calls else REPLY]
        prior, whole = self.render(before, tools, False), self.render([*before, *messages], tools, True)
        closed = len(prior) - len(self.tail)
        if whole[:closed] != prior[:closed]:
            roles = [message["role"] for message in messages]
            raise ConfigError(f"the chat format {self.name!r} cannot continue a conversation with {roles}")
        return whole[closed:]


def _config(family: str) -> Any:
    config = config_from_name(family)
    assert config is not None
    return config


def _call(index: int, call: ParsedToolCall) -> ParsedCall:
    error = ERRORS.get(call.status)
    if call.status == ToolCallParseStatus.INVALID_JSON and isinstance(call.arguments, dict):
        error = None  # An unquoted value of another type than declared: the schema check words that better.
    arguments = call.arguments if error is None else None
    return make_call(index, call.raw, call.name, arguments, error, call.id)


def _broken_llama_call(content: str) -> tuple[ParsedCall, ...]:
    """Llama 3 calls have no markers, so the renderer takes a broken one for an answer."""
    if not (content.startswith("{") and '"name"' in content):
        return ()
    return (make_call(0, content, None, None, ERRORS[ToolCallParseStatus.INVALID_JSON]),)
