"""Contract of a row format: the columns that it reads, and the transcript that it makes of a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of a row, which the model's chat template writes."""

    messages: object
    """A list of messages, or that list in JSON text (see `agentrl.data.messages.read_messages`)."""
    tools: object = None
    """Tools as OpenAI's schemas or as functions alone: a list, or that list in JSON text."""
    shown: int = 0
    """Number of messages at the beginning whose assistant turns are not learnt."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """Text of a row, for which no chat template is used. Spellings of control tokens in it are the tokens."""

    text: str
    """Text that is learnt, with the tokenizer's end token after it."""
    prompt: str = ""
    """Text before it, which is not learnt."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One way to write a transcript in columns.

    A file has this format if it has all of `columns`. `read` makes a transcript of a row, which holds `columns` and
    `further`; it raises `agentrl.data.messages.Unfit` for a row that it cannot read.
    """

    columns: tuple[str, ...]
    read: Callable[[Row], Conversation | PlainText]
    further: tuple[str, ...] = ()
    """Columns that are read, too, where a file has them."""
