"""The default chat format: a tokenizer's own Jinja chat template, with a tool-call parser.

Sampled turns are never rendered again. The text between one assistant turn and the next is found by rendering a
stand-in conversation with a marker in its assistant turn, and cutting at that turn's end (`turn_end`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import cast

from jinja2 import TemplateError

from agentrl.chat.codec import GUARD, Codec
from agentrl.chat.formats.frame import Frame, find_frame
from agentrl.chat.formats.growing import Ends, GrowingTurn
from agentrl.chat.formats.parsers import MOST_DIGITS, THINK, THINK_END, CallFormat, CallParser
from agentrl.chat.formats.shape import Shapes
from agentrl.chat.formats.turn_end import (
    TurnEnd,
    UnclearEnd,
    Written,
    common_length,
    cut_at_token,
    declared_end,
    find_turn_end,
    shared_ending,
)
from agentrl.chat.message import AssistantMessage, content_text
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.tool import ToolSchema
from agentrl.trajectory import FunctionCall, Message, ToolCall

MARK = f"Agentrl{GUARD}TurnMark"
"""The end of a stand-in turn. `Codec.encodable` takes the noncharacter out of every text, so no message can hold it."""
MOST_WRITTEN = 1 << 26
"""Characters that a template may write of one conversation."""
MOST_ROLES = 64
"""Roles that an error names."""
ENDLESS = (MemoryError, RecursionError, OverflowError)
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of an assistant message that templates read reasoning from."""
USER: Message = {"role": "user", "content": "AgentrlQuestion"}
REPLY: Message = {"role": "assistant", "content": MARK}
TOOL_ANSWER: Message = {"role": "tool", "content": "AgentrlToolAnswer", "name": "f", "tool_call_id": "call00000"}
SLOT = "AgentrlQuestion"
TRIED: ToolSchema = {
    "type": "function",
    "function": {
        "name": "agentrl_search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}},
    },
}
TRIED_ARGUMENTS: dict[str, JSON] = {"text": "two words", "count": 3}
TRIED_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": TRIED["function"]["name"], "arguments": TRIED_ARGUMENTS},
        }
    ],
}
"""A call by which a format is tried."""
ESCAPED_GUARD = repr(GUARD)[1:-1]
RESERVED = ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "return_dict", "conversation")
ANY_TOOL: ToolSchema = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}, "required": []}},
}


def _bound(codec: Codec) -> None:
    """Have the tokenizer's templates end in an error that write without end: they come with models, as data does."""
    from transformers.utils import chat_template_utils

    for tools in (None, [TRIED]):
        # A tokenizer without a template, or without one for this; what cannot be compiled is told where it is rendered.
        with suppress(ValueError, TemplateError):
            compiled = chat_template_utils._compile_jinja_template(codec.tokenizer.get_chat_template(tools=tools))
            compiled.environment.concat = _joined


def _joined(pieces: Iterable[str]) -> str:
    """Join the parts that a template writes. Raises TemplateError beyond MOST_WRITTEN characters."""
    parts, written = [], 0
    for piece in pieces:
        written += len(piece)
        if written > MOST_WRITTEN:
            raise TemplateError(f"the template writes more than {MOST_WRITTEN:,} characters")
        parts.append(piece)
    return "".join(parts)


class TemplateFormat:
    """A tokenizer's own template as a `Format`."""

    writes_calls = True
    """The template writes calls as the parser reads them."""
    calls_in_text = False
    """Calls are text of a turn, written by the call format in place of the template."""
    _arguments_as_text = False
    """The template takes the arguments of calls only as a JSON text."""

    def __init__(
        self, codec: Codec, template_kwargs: Mapping[str, JSON], calls: CallFormat | None = None, name: str = "none"
    ) -> None:
        """`calls`: how tool calls are written, which `name` names; None: no tool calls.

        Raises ConfigError when the template cannot hold a plain conversation.
        """
        self.name = f"template:{name}"
        self.parses_tools = calls is not None
        self.names_in_call_ids = calls is not None and calls.names_in_ids
        self.shown = None if calls is None else calls.shown
        self._codec = codec
        self._calls = calls
        self._kwargs = template_kwargs
        if reserved := sorted(set(template_kwargs) & set(RESERVED)):
            raise ConfigError(f"chat_template_kwargs: {reserved} are set by agentrl; leave them out")
        self._reads = lru_cache(maxsize=256)(str(codec.tokenizer.chat_template).__contains__)
        """True for a field of messages that the template names; it cannot write any other."""
        self._shapes = Shapes()
        _bound(codec)
        self._no_tools = self._stand_in_for_no_tools()
        self._find_form_of_arguments()
        self._numbers_calls = calls is not None and calls.numbers_calls
        self.ids_by_turn = self.names_in_call_ids and not self._numbers_calls and self._counts_calls_by_turn()
        prompt = self._text([USER], None, True)
        unasked = self._text([USER], None, False)
        # What stands at the end of every conversation may be a whole generation prompt, or the beginning of one.
        self._standing_prompt = unasked if prompt.startswith(unasked) else ""
        self._find_ends(prompt)
        self.reasoning = (THINK, THINK_END) if calls is None else calls.reasoning
        starts_in_reasoning = prompt.rstrip().endswith(self.reasoning[0].rstrip())
        self._parser = CallParser(codec, calls, starts_in_reasoning=starts_in_reasoning)
        self._frames: dict[bool, Frame | None] = {False: None, True: None}
        """By whether there are tools: a template may ask for another beginning of answers then."""
        if calls is not None and calls.write is not None:
            written = self.written_call()
            found = self.parse(codec.encode(written), [TRIED]).calls
            # The template writes no call, or one in which the format finds its name and an error.
            if not written or any(call.error and call.name == TRIED["function"]["name"] for call in found):
                self.calls_in_text = True
                self._find_ends(prompt)
        plain = self._found_frame(None)
        self._frames = {False: plain, True: self._found_frame([ANY_TOOL]) or plain}

    def _find_ends(self, prompt: str) -> None:
        """Find the ends of turns, and the stop tokens. prompt: the generation prompt after a user's message."""
        self._plain = self._plain_end(prompt)
        self._calling = self._calling_end(prompt, () if self._calls is None else self._calls.markers)
        ends = [end for end in (self._plain, self._calling) if isinstance(end, TurnEnd)]
        self._end_tokens = {end.token for end in ends}
        self.history_ends = {self._codec.added[end.sampled]: end.token for end in ends if end.sampled}
        """The token that the template's history has in place of a stop token that only the last turn has."""
        self._leads = [self._codec.encode(end.lead) for end in ends if end.lead]
        self.tail = self._codec.encode(self._plain.gap + self._plain.final)
        self.stop_token_ids = self._stop_tokens()

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> list[int]:
        return self._codec.encode(self._text(messages, tools, generation))

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        text = self._between(messages, tools)
        lead, token, rest = cut_at_token(self._codec, text)
        if not token:
            return self._codec.encode(text)
        # Encoded after the token, for tokenizers that write a text's first word in another way.
        behind = self._codec.encode(token + rest)[1:]
        if ids[-1] == self._codec.added[token]:
            return behind
        # Another stop token needs no close, but a header that was not sampled is still to be written.
        if ids[-1] in self.stop_token_ids and token in self._end_tokens:
            return behind
        return [*self._codec.encode(lead), self._codec.added[token], *behind]

    def parse(
        self, ids: Sequence[int], tools: Sequence[ToolSchema] | None, *, spoken: bool = False
    ) -> AssistantMessage:
        message = self._parser.parse(self._without_end(ids), tools, spoken=spoken)
        frame = self._frames[bool(tools)]
        return message if frame is None else frame.strip(message)

    def growing(
        self, prompt: Sequence[int], tools: Sequence[ToolSchema] | None, stop: Sequence[str]
    ) -> GrowingTurn | None:
        parser = self._parser
        if parser.marking is None:
            return None
        stops = frozenset(id for id in self.stop_token_ids if not parser.is_marker(id))
        return GrowingTurn(
            self._codec,
            parser.marking,
            Ends(stops, self._leads),
            partial(self.parse, tools=tools, spoken=True),
            prompt_opens_reasoning=parser.opens_reasoning(prompt),
            offers_tools=bool(tools),
            frame=self._frames[bool(tools)],
            stop=stop,
        )

    def _found_frame(self, tools: list[ToolSchema] | None) -> Frame | None:
        """Find the marks of turns that begin as the generation prompt ends, else of turns as conversations have them.

        Some generation prompts close a reasoning that is in no conversation.
        """

        def read(ids: list[int]) -> AssistantMessage:
            """Read a turn without taking marks off."""
            return self._parser.parse(self._without_end(ids), None)

        def in_conversations(turn: Message) -> AssistantMessage:
            """Read a turn from the first token in which it differs from the generation prompt."""
            prompt, whole = self._after_user([], [], tools, True), self._after_user([], [turn], tools, False)
            asked, told = self._units(prompt), self._units(whole)
            return read(self._ended("".join(told[common_length(asked, told) :]), turn, tools))

        frame = find_frame(lambda turn: read(TemplateFormat.sampled(self, turn, tools)))
        return frame or find_frame(in_conversations)

    def _units(self, text: str) -> list[str]:
        """Split a text into control tokens and characters."""
        parts = enumerate(self._codec.split(text))
        return [unit for index, part in parts for unit in ([part] if index % 2 else part)]

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """Take off the stop token, and the control tokens that a template writes directly before it.

        A marker of calls stays, for the parser to see.
        """
        if not ids or ids[-1] not in self.stop_token_ids or self._parser.is_marker(ids[-1]):
            return ids
        for lead in self._leads:
            if list(ids[-1 - len(lead) : -1]) == lead:
                return ids[: -1 - len(lead)]
        return ids[:-1]

    def sampled(self, message: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
        earlier = self._earlier(call.get("id", "") for call in message.get("tool_calls", ()))
        prompt = self._after_user(earlier, [], tools, True)
        whole = self._after_user(earlier, [message], tools, False)
        turn = whole[len(prompt) :] if whole.startswith(prompt) else None
        if turn is None and not prompt.rstrip().endswith(self.reasoning[0].rstrip()):
            # The same header with other blanks.
            header = re.match(r"\s*+".join(["", *map(re.escape, "".join(prompt.split())), ""]), whole)
            turn = whole[header.end() :] if header else None
        if turn is None:
            last_line = prompt.rstrip("\n").rpartition("\n")[2]
            raise ConfigError(
                f"{self._where()} ends its generation prompt with {last_line!r}, but writes something else "
                f"before an assistant turn. If that opens or closes reasoning, give assistant messages "
                f"reasoning_content to match (or set it by chat_template_kwargs)"
            )
        return self._ended(turn, message, tools)

    def _ended(self, turn: str, message: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
        """Encode the text between the generation prompt and the token that ends the turn."""
        end = self._end_of_calls() if message.get("tool_calls") else self._plain
        turn = turn.removesuffix(end.final)
        if closing := end.sampled or end.token:
            text, token, _ = turn.removesuffix(end.gap).rpartition(closing)
            if not token:
                raise ConfigError(f"{self._where()} ends assistant turns with {closing}, but not {turn!r}")
            return self._codec.encode(text + token)
        following = [_answer(call) for call in message.get("tool_calls", ())] or [USER]
        lead, token, _ = cut_at_token(self._codec, self._between(following, tools))
        if token and self._codec.added[token] in self.stop_token_ids:
            return self._codec.encode(turn + lead + token)
        # Nothing is written between turns, so that a token which ends calls only would not end this one.
        return [*self._codec.encode(turn), *(self._codec.ends or self.stop_token_ids)[-1:]]

    def written_call(self) -> str:
        """Write a turn with a made-up call as a policy would sample it; the text after the question where a prompt has
        other text there; empty where the template writes no calls."""
        tools = [TRIED]
        try:
            with suppress(ConfigError):
                text = self._codec.decode(self.sampled(TRIED_CALL, tools))
                return text if TRIED["function"]["name"] in text else ""
            asked, whole = (self._text(messages, tools, False) for messages in ([USER], [USER, TRIED_CALL]))
        except ConfigError:
            return ""
        text = whole[common_length(asked, whole) :]
        return text if TRIED["function"]["name"] in text else ""

    def reads(self, written: str) -> bool:
        """Say whether the text of `written_call` is read as that call."""
        calls = self.parse(self._codec.encode(written), [TRIED]).calls
        return [(call.name, call.arguments) for call in calls] == [(TRIED["function"]["name"], TRIED_ARGUMENTS)]

    def _counts_calls_by_turn(self) -> bool:
        asked = [_asked(index, {**TOOL_ANSWER, "tool_call_id": f"functions.f:{index}"}) for index in (0, 1)]
        turns: list[Message] = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in asked]
        try:
            return "functions.f:1" not in self._text([USER, turns[0], USER, turns[1]], None, False)
        except ConfigError:
            return False

    def _after_user(
        self,
        earlier: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        generation: bool,
    ) -> str:
        """Write `messages` after a user's. The text before them may depend on whether a generation prompt follows."""
        text = self._text([*earlier, USER, *messages], tools, generation)
        return text.split(SLOT, 2 if earlier else 1)[-1]

    def _earlier(self, ids: Iterable[str]) -> list[Message]:
        """Make as many calls and answers as a conversation has before the first of `ids`, where calls are counted."""
        number = next(iter(ids), "").rpartition(":")[2]
        if not (self._numbers_calls and number.isdecimal() and len(number) <= MOST_DIGITS and int(number)):
            return []
        calls = [_asked(0, {**TOOL_ANSWER, "tool_call_id": f"earlier{index}"}) for index in range(int(number))]
        # A strict template takes no user's turn directly after an answer.
        reply: Message = {"role": "assistant", "content": "t"}
        return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *map(_answer, calls), reply]

    def _between(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> str:
        """Write the text from the token that ends an assistant turn to the beginning of the next one."""
        fields = tuple(
            tuple((name, str(value)) for name, value in message.items() if name != "content" and self._reads(name))
            for message in messages
        )
        text = self._shapes.fill((fields, id(tools)), tools, messages, lambda m: self._render_between(m, tools))
        return self._render_between(messages, tools) if text is None else text

    def _render_between(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool = True
    ) -> str:
        try:
            turn, text = self._after_stand_in(messages, tools, generation)
        except ConfigError as fault:
            asked = next((index for index, message in enumerate(messages) if message["role"] != "tool"), 0)
            if asked == 0:
                raise
            return self._apart(messages[:asked], messages[asked:], tools, generation, fault)
        end = self._end_of_calls() if "tool_calls" in turn else self._plain
        if end.token:
            _, token, rest = text.partition(end.token)
            if not token:
                roles = [message["role"] for message in messages]
                raise ConfigError(f"{self._where()} ends assistant turns with {end.token}, but not before {roles}")
            return token + rest
        last = self._text([USER, turn], tools, False).partition(MARK)[2]
        return text[len(shared_ending(self._codec, last, text, self._standing_prompt).rstrip()) :]

    def _apart(
        self,
        answers: Sequence[Message],
        others: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        generation: bool,
        fault: ConfigError,
    ) -> str:
        """Write tool answers and a user's turn one after the other, as a strict template wants a turn between them.

        Raises ConfigError when the end of the one and the beginning of the other cannot be found.
        """
        answered, told = self._answered(answers, tools)
        rest = self._render_between(others, tools, generation)
        if self._plain.token:
            gap, behind = self._plain.gap, rest.removeprefix(self._plain.token)
            # Blanks of the gap that do not stand here are the beginning of a header or of a conversation's end.
            size = common_length(gap, behind)
            return answered.removesuffix(gap[size:]) + behind[size:]
        # Blanks after the last answer's text may be the conversation's end, unless it is known or a token follows.
        said = str(answers[-1]["content"])
        behind = answered.rpartition(said)[2] if said else answered
        if told or not behind[-1:].isspace() or not self._codec.split(rest)[0]:
            joined = self._joined(answered, rest, tools)
            if joined is not None:
                return joined
        raise ConfigError(
            f"{self._where()} refuses {[message['role'] for message in (*answers, *others)]} one behind another, and "
            f"written apart the end of the assistant turn cannot be told from what follows: {rest[:80]!r}. Choose "
            f"another template, or the model's own family"
        ) from fault

    def _answered(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> tuple[str, bool]:
        """Write tool answers without the text that follows them: a generation prompt, or the end of a conversation.

        The second result is False where a conversation ends otherwise after answers than after an assistant turn.
        Then blanks at the end of the answers may belong to the text that follows.
        """
        last, followed = (self._render_between(messages, tools, generation) for generation in (False, True))
        told, ended = last.endswith(self._plain.final), last.removesuffix(self._plain.final)
        if last == followed:
            return ended, told
        shared = shared_ending(self._codec, last, followed, self._standing_prompt)
        # As many blanks as the end of an assistant turn is taken to have: a generation prompt may begin with others.
        return ended if told and ended.rstrip() == shared.rstrip() else shared, told

    def _opens_turn(self, tools: Sequence[ToolSchema] | None) -> bool:
        """Say whether the token before a user's turn is its header, not the end of the assistant's.

        A header opens the generation prompt, too, or stands alone before the first user's text as well.
        """
        asked: Message = {"role": "user", "content": MARK}
        prompt, without = (self._text([asked], tools, generation) for generation in (True, False))
        opening = self._render_between([{"role": "user", "content": SLOT}], tools).partition(SLOT)[0]
        _, token, behind = cut_at_token(self._codec, opening)
        alone = not behind.strip() and prompt.rpartition(MARK)[0].endswith(token + behind)
        return alone or token in prompt[common_length(prompt, without) :]

    def _joined(self, answered: str, rest: str, tools: Sequence[ToolSchema] | None) -> str | None:
        """Join tool answers and `rest`, which begins with the end of an assistant turn or with the next header.

        An end is known by its standing after a tool answer, too. None where it cannot be decided.
        """
        lead, *pieces = self._codec.split(rest)
        if not pieces or lead.strip():
            return answered + rest
        if self._standing_prompt and self._plain.final.startswith(lead + pieces[0]):
            return answered + rest  # It was taken off `answered` with the standing generation prompt.
        end, ends = lead, []
        for token, behind in zip(pieces[::2], pieces[1::2], strict=True):
            blanks = behind[: len(behind) - len(behind.lstrip())]
            end += token + blanks
            ends.append(end)
            if blanks != behind:
                break
        for end in reversed(ends):
            if answered.endswith(end):
                return answered.removesuffix(end) + rest
        return answered + rest if self._opens_turn(tools) else None

    def _after_stand_in(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool
    ) -> tuple[Message, str]:
        """Find the first stand-in turn that the template accepts and writes out, and the text after its mark."""
        refused: ConfigError | None = None
        earlier = self._earlier(message.get("tool_call_id", "") for message in messages)
        for turn in _stand_in_turns(messages):
            try:
                _, marked, text = self._text([*earlier, USER, turn, *messages], tools, generation).partition(MARK)
            except ConfigError as fault:
                refused = refused or fault
                continue
            if marked:
                return turn, text
        raise refused or ConfigError(f"{self._where()} does not write the text of assistant turns")

    def _text(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> str:
        try:
            text: str = self._codec.tokenizer.apply_chat_template(
                [self._in_its_fields(message) for message in messages],
                tools=self._no_tools if tools is None else tools,
                add_generation_prompt=generation,
                tokenize=False,
                **self._kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, *ENDLESS) as fault:
            roles = [message.get("role") for message in messages[:MOST_ROLES]]
            said = fault if str(fault) else f"it takes more memory than there is ({type(fault).__name__})"
            raise ConfigError(f"{self._where()} cannot render a conversation of {roles}: {said}") from fault
        if ESCAPED_GUARD in text:
            given = json.dumps([*messages, tools], ensure_ascii=False, default=str)
            # A template that writes a value as Python does has escaped the guard in it.
            return text if ESCAPED_GUARD in given else text.replace(ESCAPED_GUARD, GUARD)
        return text

    def _in_its_fields(self, message: Message) -> Message:
        """Name the reasoning as the template does, and write arguments, or calls, that it cannot write."""
        if self.calls_in_text and "tool_calls" in message:
            assert self._calls is not None and self._calls.write is not None
            calls = self._calls.write([call["function"] for call in message["tool_calls"]])
            text = content_text(message["content"]).rstrip()
            message = {**message, "content": f"{text}\n{calls}" if text else calls}
            del message["tool_calls"]
        if self._arguments_as_text and "tool_calls" in message:
            message = {**message, "tool_calls": list(map(_with_text_arguments, message["tool_calls"]))}
        if "reasoning_content" not in message or self._reads("reasoning_content"):
            return message
        return cast(Message, {**dict.fromkeys(REASONING_FIELDS, message["reasoning_content"]), **message})

    def _stand_in_for_no_tools(self) -> list[ToolSchema] | None:
        """Find the `tools` of a conversation without any: some templates go through the list without asking for one."""
        candidates: tuple[list[ToolSchema] | None, ...] = (None, [])
        for self._no_tools in candidates:
            with suppress(ConfigError):
                self._text([USER], None, True)
                return self._no_tools
        return None

    def _find_form_of_arguments(self) -> None:
        """Give arguments as a JSON text to a template that takes no object."""
        call: Message = {"role": "assistant", "content": "", "tool_calls": [_asked(0, TOOL_ANSWER)]}
        for self._arguments_as_text in (False, True):
            with suppress(ConfigError):
                self._text([USER, call], None, False)
                return
        self._arguments_as_text = False

    def _plain_end(self, prompt: str) -> TurnEnd:
        """Find the end of turns without calls. Raises ConfigError when a policy could not end them."""
        written = self._written(prompt, REPLY, [USER])
        if written is None:
            raise ConfigError(f"{self._where()} does not write the text of assistant turns")
        with suppress(ConfigError):
            # A token between reasoning and answer ends no turn, either.
            reasoned = self._written(prompt, cast(Message, {**REPLY, **dict.fromkeys(REASONING_FIELDS, "r")}), [USER])
            written = written if reasoned is None else replace(written, turn=reasoned.turn)
        end = self._found_end(written)
        shared = shared_ending(self._codec, written.last, written.followed, self._standing_prompt)
        if not end.token and shared.strip():
            raise ConfigError(
                f"{self._where()} ends an assistant turn with {shared!r}, which is not a token of the vocabulary, "
                f"so the policy could not end its turn: add it to the tokenizer or choose another template"
            )
        return end

    def _calling_end(self, prompt: str, markers: Sequence[str]) -> TurnEnd | ConfigError:
        """Find the end of turns with calls; where the template writes no calls, the end of other turns.

        An error is returned, not raised: it matters only to conversations with calls.
        """
        for count in (2, 1):
            answers: list[Message] = [{**TOOL_ANSWER, "tool_call_id": f"call{index:05d}"} for index in range(count)]
            try:
                written = self._written(prompt, _stand_in_turns(answers)[0], answers)
                if written is not None:
                    return self._found_end(written, markers)
            except ConfigError as fault:
                if isinstance(fault.__cause__, UnclearEnd):
                    return fault
        return self._plain

    def _end_of_calls(self) -> TurnEnd:
        if isinstance(self._calling, ConfigError):
            raise self._calling
        return self._calling

    def _written(self, prompt: str, turn: Message, following: Sequence[Message]) -> Written | None:
        """Have the template write `turn`, which ends in MARK; None where the mark is missing."""
        head, marked, last = self._after_user([], [turn], None, False).partition(MARK)
        _, marked_too, followed = self._text([USER, turn, *following], None, True).partition(MARK)
        if not (marked and marked_too):
            return None
        return Written(head[common_length(prompt.split(SLOT, 1)[-1], head) :], last, followed)

    def _found_end(self, written: Written, markers: Sequence[str] = ()) -> TurnEnd:
        declared = None if self._calls is None else declared_end(self._codec, written, self._calls.ends)
        if declared is not None:
            return declared
        try:
            return find_turn_end(self._codec, written, self._standing_prompt, self._codec.tokenizer.eos_token, markers)
        except UnclearEnd as fault:
            raise ConfigError(
                f"{self._where()} {fault}, so the policy could not end its turn and be answered. Set multi_turn.format "
                f"(format in SFT) to the model's own family, or model.chat_template to a template that ends every "
                f"assistant turn with one control token"
            ) from fault

    def _stop_tokens(self) -> tuple[int, ...]:
        """Find the tokens that end turns of each kind, or that open the next turn; and the model's own ends."""
        stops: list[int] = []
        for end, following in ((self._plain, USER), (self._calling, TOOL_ANSWER)):
            if isinstance(end, TurnEnd) and end.sampled:
                stops.append(self._codec.added[end.sampled])
                continue
            with suppress(ConfigError):
                text = self._render_between([following], None)
                _, token, rest = cut_at_token(self._codec, text)
                # Templates without tool answers write no text for them.
                if token and content_text(following["content"]) in rest:
                    stops.append(self._codec.added[token])
        return tuple(dict.fromkeys([*stops, *self._codec.ends]))

    def _where(self) -> str:
        return f"the chat template of {self._codec.tokenizer.name_or_path or 'the tokenizer'}"


def _stand_in_turns(messages: Sequence[Message]) -> list[Message]:
    """Make assistant turns that `messages` may answer, each with MARK at its end.

    One makes all the calls, one a single call, and one no call: templates differ in which of them they accept.
    """
    calls = [_asked(index, message) for index, message in enumerate(messages) if message["role"] == "tool"]
    if not calls:
        return [REPLY]
    calls[-1]["function"]["arguments"] = {"x": MARK}
    turns: list[Message] = [{"role": "assistant", "content": "", "tool_calls": made} for made in (calls, calls[-1:])]
    return [*turns, REPLY]


def _asked(index: int, answer: Message) -> ToolCall:
    """Make a call that `answer` may answer."""
    function: FunctionCall = {"name": answer.get("name") or "f", "arguments": {"x": "y"}}
    return {"id": answer.get("tool_call_id", f"call{index:05d}"), "type": "function", "function": function}


def _with_text_arguments(call: ToolCall) -> ToolCall:
    function = call["function"]
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _answer(call: ToolCall) -> Message:
    return {"role": "tool", "content": "t", "name": call["function"]["name"], "tool_call_id": call.get("id", "")}
