"""Choice of a file's row format: by name, else by its columns, and never between two that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agentrl.config.registries import ROW_FORMATS
from agentrl.config.sections.sft import PairDataConfig, SFTDataConfig
from agentrl.data.feedback import LABEL
from agentrl.data.messages import Unfit
from agentrl.data.row_formats.format import Conversation, PlainText, Row, RowFormat
from agentrl.errors import ConfigError, DataError
from agentrl.system.user_code import contract_error, user_code

AUTO = "auto"
UNPAIRED = {"completion", "label"}
"""Columns of completions that are marked as good or bad (TRL's form for KTO)."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A row format, for a file whose columns may have other names."""

    name: str
    format: RowFormat
    columns: dict[str, str]
    """The file's names of the format's columns that it has another name for."""
    note: str
    """The reading in words; empty where it goes without saying."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The file's columns that each row must have."""
        return tuple(self.columns.get(name, name) for name in self.format.columns)

    @property
    def further(self) -> tuple[str, ...]:
        """The file's columns that are read, too, where they are there."""
        return tuple(self.columns.get(name, name) for name in self.format.further)

    def read(self, row: Row) -> Conversation | PlainText:
        """Read a row. Raises Unfit."""
        names = (*self.format.columns, *self.format.further)
        named = {name: row.get(self.columns.get(name, name)) for name in names}
        what = f"row format {self.name}"
        with user_code(what, self.format.read, passing=(Unfit,)):
            made: object = self.format.read(named)
        if not isinstance(made, Conversation | PlainText):
            raise contract_error(what, self.format.read, f"it must give Conversation or PlainText, found {made!r:.200}")
        return made


def reading_of(config: SFTDataConfig | PairDataConfig, names: Sequence[str], file: str) -> Reading:
    """Choose how the rows of a file with these columns are read. Raises DataError unless exactly one format fits."""
    columns = {"messages": config.messages_key, "tools": config.tools_key}
    chosen = config.row_format
    if chosen == AUTO and config.messages_key != SFTDataConfig.model_fields["messages_key"].default:
        chosen = "messages"
    if chosen != AUTO:
        return Reading(chosen, _format(chosen), columns, "")
    if set(names) >= UNPAIRED and isinstance(config, SFTDataConfig) and config.feedback_key != LABEL:
        raise DataError(
            f"{file}: its columns completion and label mark completions as good or bad. Learn the good ones alone with "
            "data.feedback_key=label data.feedback=filter, all of them with data.row_format=prompt_completion, or from "
            "both with python -m agentrl.preferences loss=kto"
        )
    fitting = [one for one in _readings(columns) if set(names) >= {*one.needed}]
    if len(fitting) > 1:
        readings = " or ".join(f"data.row_format={one.name} ({', '.join(one.needed)})" for one in fitting)
        raise DataError(
            f"{file}: its columns {', '.join(names)} fit {len(fitting)} row formats, and which one is meant cannot be "
            f"known: set {readings}"
        )
    if not fitting:
        expected = "; ".join(f"{', '.join(one.needed)} ({one.name})" for one in _readings(columns))
        pairs = " Pairs are for python -m agentrl.preferences." if set(names) >= {"chosen", "rejected"} else ""
        raise DataError(
            f"{file}: expected the columns of a row format, which are {expected}; found {', '.join(names)}. Name a "
            f"column of messages with data.messages_key, or a format of yours with data.row_format.{pairs}"
        )
    (reading,) = fitting
    if reading.name == "messages":
        return reading
    note = f"rows are read as {reading.name} ({', '.join(reading.needed)})"
    return Reading(reading.name, reading.format, columns, note)


def _readings(columns: dict[str, str]) -> Iterator[Reading]:
    for name in ROW_FORMATS.names():
        if name != AUTO:
            yield Reading(name, _format(name), columns, "")


def _format(name: str) -> RowFormat:
    found = ROW_FORMATS.get(name)
    if not isinstance(found, RowFormat):
        raise ConfigError(
            f"data.row_format={name}: expected a RowFormat (agentrl.data.row_formats.format), found {found!r:.200}"
        )
    return found
