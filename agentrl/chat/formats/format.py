"""The interface of chat formats; `family` and `template` implement it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

from agentrl.chat.formats.growing import GrowingTurn
from agentrl.chat.message import AssistantMessage
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message


class Format(Protocol):
    """A way to write conversations. All messages given to it are normalised and guarded (see `Chat`).

    A class of formats is called as `Class(codec, template_kwargs)`. It raises ConfigError when it does not fit the
    tokenizer, or a template kwarg is unknown.
    """

    name: str
    stop_token_ids: tuple[int, ...]
    """Tokens with which the policy ends its turn."""
    tail: list[int]
    """Ids that a full render adds after an assistant turn's stop token, e.g. a newline; never sampled by the policy."""
    parses_tools: bool
    """False when `parse` finds no tool calls."""
    shown: re.Pattern[str] | None
    """Pattern of tool calls in decoded text, for the display; None: they are found by the tool's name."""
    names_in_call_ids: bool
    """True when the template writes a call's id in place of its name (`functions.NAME:INDEX`)."""
    ids_by_turn: bool
    """True when those ids count the calls of one turn, not of the conversation."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation: bool) -> list[int]:
        """Render a conversation; with `generation`, up to the place where the policy begins to sample."""

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        """Make the ids to append to a transcript that ends with a sampled turn, whole or cut."""

    def parse(self, ids: Sequence[int], tools: Sequence[ToolSchema] | None) -> AssistantMessage:
        """Read one sampled turn. Never raises for the policy's text."""

    def growing(
        self, prompt: Sequence[int], tools: Sequence[ToolSchema] | None, stop: Sequence[str]
    ) -> GrowingTurn | None:
        """Begin to read a turn while it is sampled after `prompt`; None: it is only read when it has ended.

        `stop`: texts that end the turn's text; it is cut before the first one.
        """

    def sampled(self, message: Message, tools: Sequence[ToolSchema] | None) -> list[int]:
        """Write an assistant message as the policy would sample it, stop token included."""
