"""The default chat format: a tokenizer's own Jinja chat template, with a tool-call parser.

Sampled turns are never rendered again. What the template writes between one assistant turn and the next is found by
rendering a stand-in conversation with a marker in its assistant turn, and cutting behind that turn's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from agentrl.chat.codec import Codec
from agentrl.chat.message import AssistantMessage
from agentrl.chat.parsers import CALL_FORMATS, THINK, CallParser
from agentrl.chat.shape import Shapes
from agentrl.errors import ConfigError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

MARK = "AgentrlTurnMark"
USER: Message = {"role": "user", "content": "u"}
REPLY: Message = {"role": "assistant", "content": MARK}
RESERVED = ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "return_dict", "conversation")


class TemplateFormat:
    """A tokenizer's own template behind the `Format` protocol."""

    guards = True
    names_in_call_ids = False

    def __init__(self, codec: Codec, parser: str, template_kwargs: dict[str, Any]) -> None:
        """`parser`: a key of CALL_FORMATS. Raises ConfigError when the template cannot hold a plain conversation."""
        self.name = f"template:{parser}"
        self.parses_tools = CALL_FORMATS[parser] is not None
        self._codec = codec
        self._kwargs = template_kwargs
        if reserved := sorted(set(template_kwargs) & set(RESERVED)):
            raise ConfigError(f"chat_template_kwargs: {reserved} are set by agentrl; leave them out")
        self._source = str(codec.tokenizer.chat_template)
        self._shapes = Shapes()
        closing = self._text([USER, REPLY], None, False).partition(MARK)[2]
        self._end = self._end_of_turn(closing)
        self._tail_text = closing.partition(self._end)[2] if self._end else ""
        self.tail = codec.encode(self._tail_text)
        self.stop_token_ids = self._stop_tokens(closing)
        prompt = self._text([USER], None, True).removeprefix(self._text([USER], None, False))
        starts_in_reasoning = prompt.rstrip().endswith(THINK)
        self._parser = CallParser(codec, CALL_FORMATS[parser], starts_in_reasoning=starts_in_reasoning)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> list[int]:
        return self._codec.encode(self._text(messages, tools, generation))

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        between = self._between_ids(messages, tools)
        if ids[-1] not in self.stop_token_ids:
            return [*self._end_ids, *between]
        # Where turns end with the next one's header, the policy has sampled that header already.
        return between[1:] if not self._end and ids[-1] == between[0] else between

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None) -> AssistantMessage:
        sampled = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        return self._parser.parse(sampled, tools)

    def sampled(self, message: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
        prompt, whole = self._text([USER], tools, True), self._text([USER, message], tools, False)
        if not whole.startswith(prompt):
            raise ConfigError(
                f"{self._where()} ends its generation prompt with {_last_line(prompt)!r}, but writes something else "
                f"before an assistant turn. If that opens or closes reasoning, give assistant messages "
                f"reasoning_content to match (or set it by chat_template_kwargs)"
            )
        turn = whole[len(prompt) :]
        if self._end:
            return self._codec.encode(turn[: turn.rindex(self._end) + len(self._end)])
        following = [_answer(call) for call in message.get("tool_calls", ())] or [USER]
        stop = self._between_ids(following, tools)[:1]
        return [*self._codec.encode(turn), *(stop if stop[0] in self.stop_token_ids else self.stop_token_ids[:1])]

    @property
    def _end_ids(self) -> list[int]:
        return [self._codec.added[self._end]] if self._end else []

    def _between_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        """Encoded behind the end-of-turn token, for tokenizers that write a text's first word in another way."""
        return self._codec.encode(self._end + self._between(messages, tools))[len(self._end_ids) :]

    def _between(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """The text from behind an assistant turn's end to where the next one begins."""
        fields = tuple(
            tuple((name, str(value)) for name, value in message.items() if name != "content" and name in self._source)
            for message in messages
        )
        text = self._shapes.fill((fields, id(tools)), tools, messages, lambda m: self._render_between(m, tools))
        return self._render_between(messages, tools) if text is None else text

    def _render_between(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool = True
    ) -> str:
        try:
            turn, text = self._after_stand_in(messages, tools, generation)
        except ConfigError:
            asked = next((index for index, message in enumerate(messages) if message["role"] != "tool"), 0)
            if asked == 0:
                raise
            # Strict templates want an assistant turn between tool answers and a user's: written one after the other.
            answered = self._render_between(messages[:asked], tools, generation=False)
            return answered + self._render_between(messages[asked:], tools, generation).removeprefix(self._tail_text)
        if self._end:
            return text.partition(self._end)[2]
        return text.removeprefix(self._text([USER, turn], tools, False).partition(MARK)[2])

    def _after_stand_in(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool
    ) -> tuple[Message, str]:
        """The first stand-in turn that the template accepts and writes out, and the text behind its mark."""
        refused: ConfigError | None = None
        for turn in _stand_in_turns(messages):
            try:
                _, marked, text = self._text([USER, turn, *messages], tools, generation).partition(MARK)
            except ConfigError as fault:
                refused = refused or fault
                continue
            if marked:
                return turn, text
        raise refused or ConfigError(f"{self._where()} does not write the text of assistant turns")

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> str:
        try:
            text: str = self._codec.tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=generation, tokenize=False, **self._kwargs
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as fault:
            roles = [message.get("role") for message in messages]
            raise ConfigError(f"{self._where()} cannot render a conversation of {roles}: {fault}") from fault
        return text

    def _end_of_turn(self, closing: str) -> str:
        """The last control token that the template closes an assistant turn with; empty when there is none."""
        found = [(closing.rfind(text), text) for text in self._codec.added if text in closing]
        return max(found)[1] if found else ""

    def _stop_tokens(self, closing: str) -> tuple[int, ...]:
        """The end of a turn, else the control tokens that the next turn opens with, and the tokenizer's EOS."""
        eos = self._codec.tokenizer.eos_token_id
        stops = list(self._end_ids)
        if not self._end:
            if closing.strip():
                raise ConfigError(
                    f"{self._where()} ends an assistant turn with {closing!r}, which is not a token of the vocabulary, "
                    f"so the policy could not end its turn: add it to the tokenizer or choose another template"
                )
            first = self._codec.encode(self._render_between([USER], None))[:1]
            stops += [id for id in first if id in self._codec.added_ids]
            stops += self._tool_header()
        return tuple(dict.fromkeys([*stops, *([] if eos is None else [eos])]))

    def _tool_header(self) -> list[int]:
        """The control token that tool answers open with, where the template knows tool answers."""
        try:
            text = self._render_between(
                [{"role": "tool", "content": "t", "name": "f", "tool_call_id": "call00000"}], None
            )
        except ConfigError:
            return []
        return [id for id in self._codec.encode(text)[:1] if id in self._codec.added_ids]

    def _where(self) -> str:
        return f"the chat template of {self._codec.tokenizer.name_or_path or 'the tokenizer'}"


def _stand_in_turns(messages: Sequence[Message]) -> list[Message]:
    """Assistant turns that `messages` may answer, with MARK as the last thing in them: one that made all the calls,
    one that made a single call, and one without any.
    """
    calls = [_asked(index, message) for index, message in enumerate(messages) if message["role"] == "tool"]
    if not calls:
        return [REPLY]
    calls[-1]["function"]["arguments"] = {"x": MARK}
    return [{"role": "assistant", "content": "", "tool_calls": made} for made in (calls, calls[-1:])] + [REPLY]


def _asked(index: int, answer: Message) -> dict[str, Any]:
    """A call that `answer` may answer."""
    function = {"name": answer.get("name") or "f", "arguments": {"x": "y"}}
    return {"id": answer.get("tool_call_id", f"call{index:05d}"), "type": "function", "function": function}


def _answer(call: dict[str, Any]) -> Message:
    return {"role": "tool", "content": "t", "name": call["function"]["name"], "tool_call_id": call.get("id", "")}


def _last_line(text: str) -> str:
    return text.rstrip("\n").rpartition("\n")[2]
