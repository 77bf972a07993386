"""What every chat format can do; `family` and `template` implement it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from agentrl.chat.codec import Codec
from agentrl.chat.message import AssistantMessage
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message


class Format(Protocol):
    """Messages given here are normalised and guarded (see `Chat`)."""

    name: str
    stop_token_ids: tuple[int, ...]
    """Tokens with which the policy ends its turn."""
    tail: list[int]
    """What a full render puts behind an assistant turn's stop token, e.g. a newline; the policy does not sample it."""
    parses_tools: bool
    guards: bool
    """Whether untrusted text must be guarded; False where the format's own encoder takes text literally."""
    shown: re.Pattern[str] | None
    """Tool calls in decoded text, for people; None: they are found by the tool's name."""
    names_in_call_ids: bool
    """Whether the template writes a call's id in place of its name (`functions.NAME:INDEX`)."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> list[int]:
        """The whole conversation; with `generation`, up to where the policy begins to sample."""
        ...

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        """Ids to append to a transcript that ends with a sampled turn, whole or cut."""
        ...

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None) -> AssistantMessage: ...

    def sampled(self, message: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
        """An assistant message as the policy would sample it, stop token included."""
        ...


class MakeFormat(Protocol):
    """A class that implements `Format` for any tokenizer."""

    def __call__(self, codec: Codec, template_kwargs: dict[str, Any]) -> Format:
        """Raises ConfigError when it does not fit the tokenizer, or a template kwarg is unknown."""
        ...
