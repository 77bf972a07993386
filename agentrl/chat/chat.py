"""Conversations as token ids, for one tokenizer and one chat format.

Invariant: nothing that was sampled is decoded and encoded again. `bridge` returns ids to append, `parse` reads ids, and
text from users, tools or tool schemas never becomes a control token, even where it spells one. Text of an assistant
becomes no token that begins or ends a turn, unless the caller says that the policy sampled it.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeAlias, cast

from agentrl.chat.codec import Codec, starts_of
from agentrl.chat.coverage import (
    DEVELOPER,
    QUESTION,
    REPLY,
    SYSTEM,
    Coverage,
    knows_developer,
    writes_turns_of,
)
from agentrl.chat.formats.format import Format
from agentrl.chat.formats.growing import GrowingTurn
from agentrl.chat.formats.parsers import THINK, THINK_END
from agentrl.chat.message import AssistantMessage, normalise, with_broken_calls_as_text, with_named_ids
from agentrl.chat.vision import Vision
from agentrl.config.sections.model import PlainModelConfig
from agentrl.errors import ConfigError, DataError
from agentrl.system.json_value import JSON
from agentrl.system.threads import DaemonThreads
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message, PlacedImage
from agentrl.trajectory.picture import Picture, pictures_in

CACHED_PROMPTS = 256
"""Number of first prompts that are remembered: the trajectories of a group render the same one."""
REPLACED = "half a surrogate pair or U+FDD0 in a text, which tokens cannot stand for, and which is written as U+FFFD"
SPELLED = "a control token's spelling in an assistant's text, which is written as ordinary text"
LONG_TURN = 8192
"""Ids of a turn from which on `read` parses in a thread.

Parsing takes 0.3 to 0.9 us an id, so this many take about the 5 ms that the interpreter leaves a thread before another
one may run. With fewer ids the event loop would stand still as long, and pay 0.1 ms for the change of threads."""
Prompt: TypeAlias = "tuple[object, array[int], tuple[str, ...]]"
"""Tools, ids and remarks of a first prompt."""
CACHED_CHARACTERS = 1 << 24
"""Characters of all prompts that are remembered. Agents render long conversations that never come back."""


class Drift(StrEnum):
    """Difference between a transcript and a full render of the same messages.

    It is a metric, not a fault, since training uses the transcript and never the render.
    """

    CLEAN = "clean"
    """The same token ids."""
    REALIGN = "realign"
    """The same text with other token boundaries, as when the policy samples an unusual tokenization."""
    FORK = "fork"
    """Another text. Legitimate where a template rewrites history, e.g. drops earlier turns' reasoning."""


class Chat:
    """Renders, bridges and parses conversations. Tool lists must not be changed after they were given."""

    def __init__(self, codec: Codec, format: Format, vision: Vision | None = None) -> None:
        """`vision`: None for a model that takes no images."""
        self.tokenizer: Any = codec.tokenizer
        self.vision = vision
        self._image_token = None if vision is None else codec.tokenizer.convert_ids_to_tokens(vision.image_token_id)
        self.format = format
        self.stop_token_ids: tuple[int, ...] = format.stop_token_ids
        self._codec = codec
        self.remarks: Counter[str] = Counter()
        """Number of rendered conversations by kind of text that the template changes, or leaves out on purpose."""
        self._coverage = Coverage(f"the chat format {format.name!r} of the tokenizer at {codec.tokenizer.name_or_path}")
        self._prompts: OrderedDict[tuple[str, int, frozenset[str]], Prompt] = OrderedDict()
        self._tools_by_id: dict[int, tuple[object, list[ToolSchema]]] = {}
        self._tools_by_text: dict[str, list[ToolSchema]] = {}
        self._written_turns: dict[str, bool] = {}
        self._threads = DaemonThreads("parsing of turns")

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        format: str = "auto",
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, JSON] | None = None,
        chat_template_date: str | None = None,
        trust_remote_code: bool = False,
    ) -> Chat:
        """Load the tokenizer at `path` and choose its format.

        Args:
            format: `auto`, a family of the `renderers` package, or `template:PARSER` (see `agentrl.chat.load`).
            chat_template: a Jinja file that replaces the tokenizer's own template.
            chat_template_kwargs: variables of the template, or fields of the family's renderer config.
            chat_template_date: see `load_tokenizer`; not for families, whose renderers have a date of their own.

        Raises ConfigError when any of them is missing, unknown or does not fit the others.
        """
        from agentrl.chat.load import load_tokenizer, make_format

        codec = Codec(load_tokenizer(path, chat_template, trust_remote_code=trust_remote_code, date=chat_template_date))
        vision = Vision.from_path(path, trust_remote_code=trust_remote_code)
        # Families' renderers write text only.
        own_template = chat_template is not None or (vision is not None and format == "auto")
        return cls(codec, make_format(codec, format, chat_template_kwargs or {}, own_template=own_template), vision)

    @classmethod
    def of_model(cls, model: PlainModelConfig, format: str) -> Chat:
        """Load the chat of the model that a config names, as `from_pretrained` does."""
        return cls.from_pretrained(
            model.path,
            format=format,
            chat_template=model.chat_template,
            chat_template_kwargs=model.chat_template_kwargs,
            chat_template_date=model.chat_template_date,
            trust_remote_code=model.trust_remote_code,
        )

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, added tokens included; every id is smaller."""
        return len(self.tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        *,
        sampled: Collection[str] = (),
    ) -> list[int]:
        """Render the first prompt: the conversation, and the generation prompt that the policy continues.

        Each image has as many image tokens as it needs; `images` says which image is where. `sampled`: texts of
        assistants that the policy sampled, in which spellings of control tokens stand for them. Raises DataError for a
        message that the template leaves out.
        """
        canonical = self._canonical(tools)
        own = frozenset(text for text in self._spelling(messages) if text in sampled)
        key = (_as_json(messages), id(canonical), own)
        known = self._prompts.pop(key, None)  # One step, and put back as the newest: another thread may render, too.
        if known is None:
            pictures = self._pictures(messages)
            prepared, ids = self._written(self.prepared(messages, own), canonical)
            ids = self._expanded(ids, pictures)
            remarks = (*self._check_prompt(messages, prepared, canonical), *_replaced(self._codec, key[0]))
            remarks += (SPELLED,) if len(self._spelling(messages)) > len(own) else ()
            known = (canonical, array("i", ids), remarks)
        if len(key[0]) <= CACHED_CHARACTERS:
            self._remember(key, known)
        self.remarks.update(known[2])
        return known[1].tolist()

    def _remember(self, key: tuple[str, int, frozenset[str]], prompt: Prompt) -> None:
        """Keep a prompt, and forget the oldest that there is no room for."""
        self._prompts[key] = prompt
        known = list(self._prompts)  # at once, as another thread may render
        excess = sum(len(text) for text, _, _ in known) - CACHED_CHARACTERS
        for at, other in enumerate(known):
            if excess <= 0 and len(known) - at <= CACHED_PROMPTS:
                return
            self._prompts.pop(other, None)
            excess -= len(other[0])

    def _written(self, prepared: list[Message], tools: list[ToolSchema] | None) -> tuple[list[Message], list[int]]:
        """Render messages, and return them as they are written: where a template refuses them for a broken call of the
        policy's, the call is text of its turn."""
        try:
            return prepared, self.format.render(prepared, tools, True)
        except ConfigError:
            plain = with_broken_calls_as_text(prepared)
            if plain == prepared:
                raise
            return plain, self.format.render(plain, tools, True)

    def most_characters(self, tokens: int) -> int | None:
        """Number of characters, blanks left out, that a text of `tokens` tokens has at most; None: any number."""
        longest = self._codec.longest_token
        return None if longest is None else tokens * longest

    def bridge(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        *,
        first: int = 0,
    ) -> list[int]:
        """Make the ids to append to the transcript `ids`, which ends with a sampled turn.

        With them it holds `messages` (tool answers, user turns) and a new generation prompt. A turn that was cut before
        its stop token is closed first. Raises DataError for a message that the template leaves out; the first of
        `messages` is called number `first` of its conversation.
        """
        if not ids:
            raise ValueError("bridge: the transcript is empty; render the first prompt")
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("bridge: expected tool, user or system messages; assistant turns are sampled")
        pictures, prepared, canonical = self._pictures(messages), self.prepared(messages), self._canonical(tools)
        bridge = self._expanded(self.format.bridge(ids, prepared, canonical), pictures)
        self._check_bridge(ids, messages, prepared, canonical, first)
        return bridge

    def begin_turn(self, text: str, tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """Make the ids that begin a turn with `text` after a generation prompt, so that the policy continues it.

        Raises ValueError where the template writes the beginning of a turn otherwise than its whole.
        """
        (turn,) = self.prepared([{"role": "assistant", "content": text}])
        try:
            ids = self.format.sampled(turn, self._canonical(tools))
        except ConfigError as error:
            raise ValueError(f"no turn of the policy begins with {text[:40]!r} here ({error})") from error
        before, found, _ = self.decode(ids).rpartition(text)
        while found and len(self.decode(ids)) > len(before) + len(text):
            ids.pop()  # What ends a turn: a few tokens.
        if not found or self.decode(ids) != before + text:
            raise ValueError(f"the template does not begin a turn as {text[:40]!r} for the policy to go on")
        return ids

    def _check_prompt(
        self, messages: Sequence[Message], prepared: Sequence[Message], tools: list[ToolSchema] | None
    ) -> tuple[str, ...]:
        def write(probe: list[Message]) -> str:
            return self.decode(self.format.render(probe, tools, True))

        return self._coverage.check(messages, prepared, write, ("prompt", bool(tools)))

    def _check_bridge(
        self,
        ids: Sequence[int],
        messages: Sequence[Message],
        prepared: Sequence[Message],
        tools: list[ToolSchema] | None,
        first: int = 0,
    ) -> tuple[str, ...]:
        def write(probe: list[Message]) -> str:
            return self.decode(self.format.bridge(ids, probe, tools))

        return self._coverage.check(messages, prepared, write, ("bridge", bool(tools)), first)

    def images(self, ids: Sequence[int], messages: Sequence[Message]) -> list[PlacedImage]:
        """Prepare the images of `messages` for the model, each with its place in `ids`, which render or bridge made.

        Raises DataError for a damaged image.
        """
        pictures = list(pictures_in(messages))
        return self.vision.place(ids, pictures) if self.vision is not None and pictures else []

    def _pictures(self, messages: Sequence[Message]) -> list[Picture]:
        pictures = list(pictures_in(messages))
        if pictures and self.vision is None:
            raise DataError(f"a message has an image, and the model of {self.tokenizer.name_or_path} takes none")
        return pictures

    def _expanded(self, ids: list[int], pictures: list[Picture]) -> list[int]:
        if self.vision is None or not pictures:
            return ids
        return self.vision.expand(ids, pictures, f"the chat template of {self.tokenizer.name_or_path}")

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> AssistantMessage:
        """Read one sampled turn. Never raises for the policy's text: broken calls are kept with their error."""
        return self.format.parse(ids, tools)

    async def read(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> AssistantMessage:
        """Read one sampled turn as `parse` does; a long turn in a thread, so that the event loop keeps running."""
        if len(ids) < LONG_TURN:
            return self.parse(ids, tools)
        return await self._threads.run(self.parse, ids, tools)

    def growing(
        self, prompt: Sequence[int], tools: Sequence[ToolSchema] | None = None, *, stop: Sequence[str] = ()
    ) -> GrowingTurn | None:
        """Begin to read a turn while it is sampled; see `Format.growing`. A user's format may not know how."""
        begin = getattr(self.format, "growing", None)
        return None if begin is None else begin(prompt, tools, stop)

    def encode(self, text: str) -> list[int]:
        """Encode plain text, in which no spelling becomes a control token."""
        return self._codec.encode(self._codec.guard(text))

    def encode_markup(self, text: str) -> list[int]:
        """Encode text in which the spellings of control tokens stand for the tokens."""
        return self._codec.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, control tokens included."""
        return self._codec.decode(ids)

    def shown(self, ids: Sequence[int]) -> str:
        """Decode ids for people: a run of image tokens is written as one token and its length."""
        if self.vision is None:
            return self.decode(ids)
        parts, image_token = [], self.vision.image_token_id
        for is_image, run in itertools.groupby(ids, lambda id: id == image_token):
            members = list(run)
            parts.append(f"{self._image_token}*{len(members)}" if is_image else self.decode(members))
        return "".join(parts)

    @property
    def media_token_ids(self) -> tuple[int, ...]:
        """Tokens that stand for media only. A policy that samples one has ended its turn in a malformed way."""
        return () if self.vision is None else self.vision.media_token_ids

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> tuple[list[int], list[int]]:
        """Make the ids and the loss mask of a finished conversation, for supervised training.

        The mask is 1 on tokens that the policy would sample: text, reasoning and calls of assistant turns, and the
        tokens that end them. As in a rollout, the ids come from `render`, sampled turns and `bridge` in turn. They end
        with the last trained token. The turns are not parsed as a rollout would parse them (see `read_back`).

        Raises DataError when there is no assistant turn, one without a message before it, an image, or a message that
        the template leaves out.
        """
        if any(pictures_in(messages)):
            raise DataError("a message has an image, and supervised training is on text only")
        prepared, canonical = self.prepared(messages), self._canonical(tools)
        ids: list[int] = []
        mask: list[int] = []
        remarks = {*_replaced(self._codec, _as_json(messages)), *([SPELLED] if self._spelling(messages) else ())}
        begin = 0
        for index, message in enumerate(prepared):
            if message["role"] != "assistant":
                continue
            if index == begin:
                raise DataError(f"message {index} is an assistant turn with nothing before it to answer")
            asked = messages[begin:index], prepared[begin:index]
            if ids:
                context = self.format.bridge(ids, asked[1], canonical)
                remarks.update(self._check_bridge(ids, *asked, canonical, begin))
            else:
                context = self.format.render(asked[1], canonical, True)
                remarks.update(self._check_prompt(*asked, canonical))
            sampled = self.format.sampled(message, canonical)
            ids += [*context, *sampled]
            mask += [0] * len(context) + [1] * len(sampled)
            begin = index + 1
        if not ids:
            raise DataError("there is no assistant turn to learn from")
        self.remarks.update(remarks)
        return ids, mask

    def drift(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> Drift:
        """Compare the transcript `ids` with a full render of `messages`. An unclosed last turn is no drift."""
        finished = messages[-1]["role"] == "assistant"
        try:
            rendered = self.format.render(self.prepared(messages), self._canonical(tools), not finished)
            rendered = self._expanded(rendered, self._pictures(messages))
        except (ConfigError, ValueError):
            return Drift.FORK  # the template refuses, e.g. a malformed call
        sampled = list(ids)
        if finished:
            sampled, rendered = self._without_end(sampled), self._without_end(rendered)
        if sampled == rendered:
            return Drift.CLEAN
        return Drift.REALIGN if self.decode(sampled) == self.decode(rendered) else Drift.FORK

    def _without_end(self, ids: list[int]) -> list[int]:
        """Cut off the last turn's stop token and the text that a full render puts after it."""
        tail = self.format.tail
        end = len(ids) - len(tail) if tail and ids[-len(tail) :] == tail else len(ids)
        for stop in (end, len(ids)):
            if stop and ids[stop - 1] in self.stop_token_ids:
                return ids[: stop - 1]
        return ids

    def prepared(self, messages: Sequence[Message], sampled: Collection[str] = ()) -> list[Message]:
        """Normalise messages and guard untrusted text.

        The text of an assistant may spell control tokens where it is among `sampled`. Otherwise it may spell control
        tokens that do not begin or end a turn: rows write reasoning and calls so. A developer's message is a system
        message where the template has no branch for it. `encode_markup` reads the template's text of them.
        """
        prepared = normalise(messages)
        if any(message["role"] == DEVELOPER for message in prepared) and not self._knows_developer:
            prepared = [{**one, "role": SYSTEM} if one["role"] == DEVELOPER else one for one in prepared]
        if self.format.names_in_call_ids:
            prepared = with_named_ids(prepared, by_turn=self.format.ids_by_turn)
        safe = [
            {key: self._made_safe(message["role"], value, sampled) for key, value in message.items()}
            for message in prepared
        ]
        return cast(list[Message], safe)

    @cached_property
    def _knows_developer(self) -> bool:
        return knows_developer(lambda probe: self.decode(self.format.render(probe, None, True)))

    def writes_turns_of(self, role: str) -> bool:
        """Say whether the template writes messages of `system` or `developer` at their place in the middle."""
        if role == DEVELOPER and not self._knows_developer:
            role = SYSTEM
        known = self._written_turns.get(role)
        if known is None:

            def write(messages: list[Message]) -> str:
                return self.decode(self.format.render(messages, None, True))

            def write_after(messages: list[Message]) -> str:
                ids = self.format.render([QUESTION], None, True)
                try:
                    sampled = self.format.sampled(REPLY, None)
                except ConfigError:  # Its generation prompt opens reasoning.
                    sampled = self.format.sampled({**REPLY, "reasoning_content": "AgentrlThought"}, None)
                return self.decode(self.format.bridge([*ids, *sampled], messages, None))

            known = self._written_turns[role] = writes_turns_of(role, write, write_after)
        return known

    @cached_property
    def _turn_tokens(self) -> frozenset[str]:
        """Control tokens that no foreign text of an assistant becomes. They are special in the tokenizer, end a turn,
        or stand around a turn in the template, but for the marks of reasoning."""
        tokens, marks = {*self._codec.special, *map(self._codec.decode_one, self.stop_token_ids)}, {THINK, THINK_END}
        for reasoning in getattr(self.format, "reasoning", ()):
            marks |= {*self._codec.split(reasoning)[1::2]} - self._codec.special
        asked, answer = Message(role="user", content="a"), Message(role="assistant", content="a")
        for turns in ([asked], [asked, answer, asked]):
            for generation in (False, True):
                with suppress(ConfigError, ValueError):
                    tokens |= {*self._codec.split(self.decode(self.format.render(turns, None, generation)))[1::2]}
        return frozenset((tokens & self._codec.added.keys()) - marks)

    @cached_property
    def _turn_starts(self) -> re.Pattern[str]:
        return starts_of(self._turn_tokens)

    def spelled_by_tokens(self, texts: Iterable[str], ids: Sequence[int]) -> set[str]:
        """Choose the texts of the sampled turn `ids` that spell tokens of a turn, where these tokens were sampled.

        Where the policy spelled such a token by others, it would forge a turn when its text is rendered.
        """
        spelling = {text for text in texts if self._codec.guard(text, self._turn_starts) != text}
        if not spelling:
            return spelling
        own = {self._codec.added[token] for token in self._turn_tokens}
        spelled = [token for token in self._codec.split(self.decode(ids))[1::2] if token in self._turn_tokens]
        return spelling if len(spelled) == sum(id in own for id in ids) else set()

    def _spelling(self, messages: Sequence[Message]) -> list[str]:
        """List the texts of assistants that spell a control token of a turn."""
        texts = (
            message.get(field)
            for message in messages
            if message["role"] == "assistant"
            for field in ("content", "reasoning_content")
        )
        return [text for text in texts if isinstance(text, str) and self._codec.guard(text, self._turn_starts) != text]

    def _made_safe(self, role: str, value: object, sampled: Collection[str]) -> object:
        if not isinstance(value, str):
            return self._codec.guard_values(value)
        if role != "assistant":
            return self._codec.guard(value)
        text = self._codec.encodable(value) if value in sampled else self._codec.guard(value, self._turn_starts)
        return text.replace(self._image_token, self._codec.guard(self._image_token)) if self._image_token else text

    def _canonical(self, tools: Sequence[ToolSchema] | None) -> list[ToolSchema] | None:
        """Return the guarded copy of a tool list: the same object for equal lists, so that formats may cache by id."""
        if not tools:
            return None
        known = self._tools_by_id.get(id(tools))
        if known is None or known[0] is not tools:
            text = json.dumps(list(tools))
            guarded = list(self._codec.guard_values(tools))
            if len(self._tools_by_id) > CACHED_PROMPTS:
                self._tools_by_id.clear()
                self._tools_by_text.clear()
            # The list is kept with its copy: while it lives, no other list is given its id.
            known = self._tools_by_id[id(tools)] = (tools, self._tools_by_text.setdefault(text, guarded))
        return known[1]


def write_again(
    chat: Chat, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, after: Sequence[int] = ()
) -> list[int]:
    """Make the ids of messages without images as `Chat.render` does, or as `Chat.bridge` does after a transcript.

    Nothing is remembered, and nothing that was remembered is read.
    """
    prepared, canonical = chat.prepared(messages), chat._canonical(tools)
    if after:
        return chat.format.bridge(after, prepared, canonical)
    return chat._written(prepared, canonical)[1]


def _replaced(codec: Codec, text: str) -> tuple[str, ...]:
    """Name what of messages has no form in tokens, and is replaced. text: theirs, with other signs between."""
    return (REPLACED,) if codec.encodable(text) != text else ()


def _as_json(messages: Sequence[Message]) -> str:
    return json.dumps(list(messages), ensure_ascii=False, default=str)
