"""Chat formats of known model families, by the `renderers` package.

Renderers return whole token sequences and scan the turn before. A bridge depends only on how that turn ended.
So renderers get a stand-in turn of a few tokens instead of the transcript, and a turn's cost does not grow with it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from renderers import RenderedTokens, create_renderer  # type: ignore[import-untyped]
from renderers.base import merge_chat_template_kwargs  # type: ignore[import-untyped]
from renderers.configs import config_from_name  # type: ignore[import-untyped]

from agentrl.chat.codec import Codec, OffsetTokenizer, RendererTokenizer
from agentrl.chat.formats.growing import Ends, GrowingTurn
from agentrl.chat.formats.parsers import CallFormat, CallParser
from agentrl.chat.formats.shape import Shapes
from agentrl.chat.formats.turn_end import common_length
from agentrl.chat.message import AssistantMessage
from agentrl.config.registries import CALL_FORMATS
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import FunctionCall, Message, ToolCall

NEED_OFFSETS = ("deepseek-v4", "hy3", "laguna-xs-2.1", "laguna-s-2.1", "prime-qwen3")
USER: Message = {"role": "user", "content": "u"}
REPLY: Message = {"role": "assistant", "content": "a"}


class FamilyFormat:
    """One family's renderer as a `Format`."""

    parses_tools = True

    def __init__(self, codec: Codec, family: str, template_kwargs: Mapping[str, JSON]) -> None:
        """Raises ConfigError when the tokenizer lacks the family's control tokens or a template kwarg is unknown."""
        self.name = family
        self._codec = codec
        try:
            config = merge_chat_template_kwargs(_config(family), template_kwargs)
            # A transcript is never re-rendered, so a bridge may never be refused for reasoning that it keeps.
            config = config.model_copy(update={"thinking_retention": "all"})
            adapter = OffsetTokenizer if family in NEED_OFFSETS else RendererTokenizer
            self._renderer: Any = create_renderer(adapter(codec), config)
        except (AssertionError, ValueError, OSError, RuntimeError) as fault:
            raise ConfigError(
                f"the chat format {family!r} does not fit the tokenizer at {codec.tokenizer.name_or_path}: {fault}. "
                f"Choose the model's own family in multi_turn.format, or `auto`"
            ) from fault
        self._renderer.effective_thinking_retention = "all"
        self._stops = frozenset(self._renderer.get_stop_token_ids())
        self.stop_token_ids = tuple(dict.fromkeys([*self._renderer.get_stop_token_ids(), *codec.ends]))
        self._prompt = self._generation_prompt()
        reply, self.tail = self._reply_and_tail()
        self._closes = reply[-1] in self._stops
        self._close = reply[-1] if self._closes else self.stop_token_ids[0]
        self._open_reply = reply[:-1] if self._closes else reply
        shared = _shared_format(family)
        self.names_in_call_ids, self.ids_by_turn = shared.names_in_ids, False
        self.shown, self.reasoning = shared.shown, shared.reasoning
        starts_in_reasoning = codec.decode(self._prompt).rstrip().endswith(shared.reasoning[0].rstrip())
        self._parser = CallParser(codec, shared, starts_in_reasoning=starts_in_reasoning)
        self._shapes = Shapes()
        self._bridges = True
        # Some renderers' bridges lose the newline after a turn. Compared with a full render once, here.
        self._bridges = self._bridge_rendered(self._close, [USER], None) == self._difference(self._close, [USER], None)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> list[int]:
        ids: list[int] = self._rendered(messages, tools, generation).token_ids
        return ids

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        if ids[-1] in self.stop_token_ids:
            return self._bridge_closed(ids[-1] if ids[-1] in self._stops else self._close, messages, tools)
        if self._bridges:  # It knows how to close reasoning that was cut.
            prompt, sampled = self._last_turn(ids)
            known = [*prompt, *sampled]
            bridged = self._renderer.bridge_to_next_turn(prompt, sampled, messages, tools=tools)
            if bridged is not None and bridged.token_ids[: len(known)] == known:
                return list(bridged.token_ids[len(known) :])
        return [self._close, *self._bridge_closed(self._close, messages, tools)]

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema] | None, *, spoken: bool = False
    ) -> AssistantMessage:
        said = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        message = self._parser.parse(said, tools, spoken=spoken)
        # Templates put line breaks around an answer, and take them off again.
        return replace(message, text=message.text.strip("\n"))

    def growing(
        self, prompt: Sequence[int], tools: Sequence[ToolSchema] | None, stop: Sequence[str]
    ) -> GrowingTurn | None:
        parser = self._parser
        if parser.marking is None:
            return None
        return GrowingTurn(
            self._codec,
            parser.marking,
            Ends(frozenset(self.stop_token_ids)),
            partial(self.parse, tools=tools, spoken=True),
            prompt_opens_reasoning=parser.opens_reasoning(prompt),
            offers_tools=bool(tools),
            strips_lines=True,
            stop=stop,
        )

    def sampled(self, message: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
        prompt = self.render([USER], tools, True)
        rendered = self._rendered([USER, message], tools)
        whole = list(rendered.token_ids[: _last_sampled(rendered) + 1])
        begin = common_length(prompt, whole)
        # A token may join the end of the generation prompt with the start of the turn.
        rest, end, text = self._codec.decode(prompt[begin:]), begin, ""
        while not text.startswith(rest) and end < len(whole):
            end += 1
            text = self._codec.decode(whole[begin:end])
        if not text.startswith(rest):
            raise ConfigError(
                f"the chat format {self.name!r} writes {self._codec.decode(whole[begin:])[:80]!r} where its generation "
                f"prompt ends with {rest!r}: give assistant messages reasoning_content exactly when the format thinks "
                f"(chat_template_kwargs, e.g. enable_thinking)"
            )
        turn = [*self._codec.encode(text[len(rest) :]), *whole[end:]]
        return turn if turn and turn[-1] in self._stops else [*turn, self._stop_after(message, tools)]

    def _rendered(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool = False
    ) -> RenderedTokens:
        try:
            return self._renderer.render(list(messages), tools=tools, add_generation_prompt=generation)
        except (ValueError, TypeError, KeyError, AttributeError) as fault:
            roles = [message["role"] for message in messages]
            raise ConfigError(
                f"the chat format {self.name!r} cannot render a conversation of {roles}: {fault}"
            ) from fault

    def _generation_prompt(self) -> list[int]:
        """Ids that a render adds for the policy to continue."""
        without, with_prompt = self.render([USER], None, False), self.render([USER], None, True)
        shared = len(without) if with_prompt[: len(without)] == without else 0
        return with_prompt[shared:]

    def _reply_and_tail(self) -> tuple[list[int], list[int]]:
        """Make a short reply as the policy would sample it, and the ids after it in a full render."""
        rendered = self._rendered([USER, REPLY], None)
        mask = rendered.sampled_mask
        reply = [id for id, is_sampled in zip(rendered.token_ids, mask, strict=True) if is_sampled]
        return reply, list(rendered.token_ids[_last_sampled(rendered) + 1 :])

    def _stop_after(self, message: Message, tools: Sequence[ToolSchema] | None) -> int:
        """Find the token that ends a turn where that is the header of the next one."""
        following = [_answer(call) for call in message.get("tool_calls", ())] or [USER]
        rendered = self._rendered([USER, message, *following], tools)
        header: int = rendered.token_ids[_last_sampled(rendered)]
        return header if header in self._stops else self._close

    def _last_turn(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split off the last generation prompt and the ids sampled after it. Reads no further back than that turn."""
        size = len(self._prompt)
        for index in range(len(ids) - 1, -1, -1):
            if ids[index] == self._prompt[0] and list(ids[index : index + size]) == self._prompt:
                return self._prompt, list(ids[index + size :])
            if ids[index] in self._stops:
                return [ids[index]], list(ids[index + 1 :])
        return self._prompt, list(ids)

    def _bridge_closed(self, stop: int, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        fields = tuple(tuple((name, str(v)) for name, v in m.items() if name != "content") for m in messages)
        text = self._shapes.fill((stop, fields, id(tools)), tools, messages, lambda m: self._between(stop, m, tools))
        return self._codec.encode(text) if text is not None else self._bridge_rendered(stop, messages, tools)

    def _between(self, stop: int, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """Write a bridge as text. Empty, so that no shape is learnt, where the text does not encode to the same ids."""
        ids = self._bridge_rendered(stop, messages, tools)
        text = self._codec.decode(ids)
        return text if self._codec.encode(text) == ids else ""

    def _bridge_rendered(self, stop: int, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        reply = [*self._open_reply, stop]
        bridged = self._renderer.bridge_to_next_turn([stop], reply, messages, tools=tools) if self._bridges else None
        if bridged is None:
            return self._difference(stop, messages, tools)
        return list(bridged.token_ids[1 + len(reply) :])

    def _difference(self, stop: int, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        """Make a bridge from a full render after a stand-in turn, where the renderer's own is refused or wrong."""
        calls = [_asked(message) for message in messages if message["role"] == "tool"]
        # Gemma 4 writes the text of a turn with calls after their answers.
        turn: Message = {**REPLY, "content": "", "tool_calls": calls} if calls else REPLY
        rendered = self._rendered([USER, turn, *messages], tools, True)
        last = _last_sampled(rendered, before=2)
        ids: list[int] = rendered.token_ids[last:]
        # Where the next header ends a turn and the policy ended it otherwise, the header is still to be written.
        header = ids[0] in self._stops and ids[0] != stop and not (self._closes and ids[0] == self._close)
        return ids if header else ids[1:]


def _shared_format(family: str) -> CallFormat:
    """Find the call format that claims the family. Raises ConfigError where no format does."""
    for format in map(CALL_FORMATS.get, CALL_FORMATS.names()):
        if isinstance(format, CallFormat) and family in format.families:
            return format
    raise ConfigError(f"multi_turn.format={family}: agentrl reads no calls of this family. Choose template:CALLS")


def _asked(answer: Message) -> ToolCall:
    """Make a call that `answer` may answer."""
    function: FunctionCall = {"name": answer.get("name", "f"), "arguments": {}}
    return {"id": answer.get("tool_call_id", ""), "type": "function", "function": function}


def _answer(call: ToolCall) -> Message:
    return {"role": "tool", "content": "t", "name": call["function"]["name"], "tool_call_id": call.get("id", "")}


def _config(family: str) -> Any:
    config = config_from_name(family)
    assert config is not None
    return config


def _last_sampled(rendered: RenderedTokens, before: int = sys.maxsize) -> int:
    """Index of the last token that the policy would sample, up to the first one of message number `before`."""
    end = next((at for at, message in enumerate(rendered.message_indices) if message >= before), None)
    return max(at for at, is_sampled in enumerate(rendered.sampled_mask[:end]) if is_sampled)
