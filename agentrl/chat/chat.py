"""A conversation as token ids, for one tokenizer and one chat format.

Invariant: nothing that was sampled is decoded and encoded again. `bridge` returns ids to append, `parse` reads ids,
and text that comes from users, tools or tool schemas never becomes a control token, whatever it spells.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from agentrl.chat.codec import Codec
from agentrl.chat.drift import Drift
from agentrl.chat.format import Format
from agentrl.chat.message import AssistantMessage, normalise, with_named_ids
from agentrl.errors import ConfigError, DataError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

CACHED_PROMPTS = 256
"""First prompts remembered: the trajectories of a group render the same one."""


class Chat:
    """Renders, bridges and parses. Tool lists are taken to be immutable."""

    def __init__(self, codec: Codec, format: Format) -> None:
        self.tokenizer: Any = codec.tokenizer
        self.format = format
        self.stop_token_ids: tuple[int, ...] = format.stop_token_ids
        self._codec = codec
        self._prompts: OrderedDict[tuple[str, int], tuple[object, list[int]]] = OrderedDict()
        self._tools_by_id: dict[int, tuple[object, list[ToolSchema]]] = {}
        self._tools_by_text: dict[str, list[ToolSchema]] = {}

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        format: str = "auto",
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> Chat:
        """Load the tokenizer at `path` and choose its format.

        Args:
            format: `auto`, a family of the `renderers` package, or `template:PARSER` (see `agentrl.chat.load`).
            chat_template: a Jinja file that replaces the tokenizer's own template.
            chat_template_kwargs: variables of the template, or fields of the family's renderer config.

        Raises ConfigError when any of them is missing, unknown or does not fit the others.
        """
        from agentrl.chat.load import load_tokenizer, make_format

        codec = Codec(load_tokenizer(path, chat_template, trust_remote_code=trust_remote_code))
        made = make_format(codec, format, chat_template_kwargs or {}, own_template=chat_template is not None)
        return cls(codec, made)

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included; every id is smaller."""
        return len(self.tokenizer)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> list[int]:
        """The first prompt: the conversation, and the generation prompt that the policy goes on from."""
        canonical = self._canonical(tools)
        key = (json.dumps(list(messages), ensure_ascii=False, default=str), id(canonical))
        if key in self._prompts:
            self._prompts.move_to_end(key)
        else:
            ids = self.format.render(self._prepare(messages), canonical, True)
            self._prompts[key] = (canonical, ids)
            if len(self._prompts) > CACHED_PROMPTS:
                self._prompts.popitem(last=False)
        return list(self._prompts[key][1])

    def bridge(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> list[int]:
        """What to append to the transcript `ids`, which ends with a sampled turn, so that it holds `messages` (tool
        answers, user turns) and a new generation prompt. A turn that was cut before its stop token is closed first.
        """
        if not ids:
            raise ValueError("bridge: the transcript is empty; render the first prompt")
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("bridge: expected tool, user or system messages; assistant turns are sampled")
        return self.format.bridge(ids, self._prepare(messages), self._canonical(tools))

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None = None) -> AssistantMessage:
        """Read one sampled turn. Never raises for what the policy wrote: broken calls are kept with their error."""
        return self.format.parse(ids, tools)

    def encode(self, text: str) -> list[int]:
        """Plain text: whatever it spells, no control token."""
        return self._codec.encode(self._codec.guard(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text, control tokens included."""
        return self._codec.decode(ids)

    def render_training(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids and loss mask of a finished conversation, for supervised training.

        The mask is 1 on what the policy would sample: text, reasoning and calls of assistant turns and the tokens that
        end them. The ids are those of `render`, sampled turns and `bridge` in turn, and end with the last trained one.

        Raises DataError when there is no assistant turn, or one without a message before it.
        """
        prepared, canonical = self._prepare(messages), self._canonical(tools)
        ids: list[int] = []
        mask: list[int] = []
        begin = 0
        for index, message in enumerate(prepared):
            if message["role"] != "assistant":
                continue
            if index == begin:
                raise DataError(f"message {index} is an assistant turn with nothing before it to answer")
            if ids:
                context = self.format.bridge(ids, prepared[begin:index], canonical)
            else:
                context = self.format.render(prepared[:index], canonical, True)
            sampled = self.format.sampled(message, canonical)
            ids += [*context, *sampled]
            mask += [0] * len(context) + [1] * len(sampled)
            begin = index + 1
        if not ids:
            raise DataError("there is no assistant turn to learn from")
        return ids, mask

    def drift(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None
    ) -> Drift:
        """The transcript `ids` against a full re-render of `messages`. Whether the last turn is closed is no drift."""
        finished = messages[-1]["role"] == "assistant"
        try:
            rendered = self.format.render(self._prepare(messages), self._canonical(tools), not finished)
        except (ConfigError, ValueError):
            return Drift.FORK  # E.g. a malformed call, which a template cannot write.
        sampled = list(ids)
        if finished:
            sampled, rendered = self._without_end(sampled), self._without_end(rendered)
        if sampled == rendered:
            return Drift.CLEAN
        return Drift.REALIGN if self.decode(sampled) == self.decode(rendered) else Drift.FORK

    def _without_end(self, ids: list[int]) -> list[int]:
        """Without the last turn's stop token and what a full render puts behind it."""
        tail = self.format.tail
        end = len(ids) - len(tail) if tail and ids[-len(tail) :] == tail else len(ids)
        for stop in (end, len(ids)):
            if stop and ids[stop - 1] in self.stop_token_ids:
                return ids[: stop - 1]
        return ids

    def _prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Normalised, with untrusted text guarded. Only the text of assistant turns may spell control tokens."""
        prepared = normalise(messages)
        if self.format.names_in_call_ids:
            prepared = with_named_ids(prepared)
        return [
            {key: self._made_safe(message["role"], key, value) for key, value in message.items()}
            for message in prepared
        ]

    def _made_safe(self, role: str, key: str, value: Any) -> Any:
        if isinstance(value, str) and (role == "assistant" or not self.format.guards):
            return self._codec.encodable(value)
        return self._guard(value) if self.format.guards else value

    def _guard(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._codec.guard(value)
        if isinstance(value, dict):
            return {self._codec.guard(str(key)): self._guard(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guard(item) for item in value]
        return value

    def _canonical(self, tools: Sequence[ToolSchema] | None) -> list[ToolSchema] | None:
        """The guarded copy of a tool list; the same object for the same content, so that formats may cache by it."""
        if not tools:
            return None
        known = self._tools_by_id.get(id(tools))
        if known is None or known[0] is not tools:
            text = json.dumps(list(tools))
            guarded = self._guard(tools) if self.format.guards else list(tools)
            if len(self._tools_by_id) > CACHED_PROMPTS:
                self._tools_by_id.clear()
                self._tools_by_text.clear()
            known = self._tools_by_id[id(tools)] = (tools, self._tools_by_text.setdefault(text, guarded))
        return known[1]
