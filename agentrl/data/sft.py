"""Transcripts for supervised training: parquet rows of messages as token ids and loss masks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.chat import Chat
from agentrl.chat.check import training_check
from agentrl.config.sections.sft import SFTDataConfig
from agentrl.data.dataset import expand
from agentrl.data.rows import without_nulls
from agentrl.errors import DataError, UserError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

_BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class SFTSample:
    """One transcript: token ids [T] int32 and loss mask [T] bool."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    """True on the tokens of the assistant, which are learnt."""


@dataclass(frozen=True, slots=True)
class Transcripts:
    """Transcripts of a data set, in the order of the files."""

    samples: list[SFTSample]
    too_long: int
    """Number of rows left out because they are longer than data.max_length."""


def load_transcripts(
    files: str | Sequence[str], config: SFTDataConfig, chat: Chat, progress: Callable[[int], object] = lambda rows: None
) -> Transcripts:
    """Read and tokenise every row; 5 bytes a token are kept.

    The messages column holds a list of {role, content, tool_calls, ...}, or that list in JSON text; the tools column,
    which may be absent, the OpenAI schemas of a row's tools in JSON text. `progress` is called with the number of rows
    just done.

    Raises DataError, naming file, row and column, for a row that is no transcript, and with truncation=error for one
    that is longer than data.max_length tokens; and when no transcript is left. Raises ConfigError when the chat format
    would not show, or not learn, what transcripts like the first without and the first with tool calls say.
    """
    reader = _Tokenizer(config, chat)
    samples, too_long = [], 0
    for file in expand(files):
        for number, row in _rows(file, config):
            sample = reader.sample(row, _place(file, number))
            if sample is None:
                too_long += 1
            else:
                samples.append(sample)
            progress(1)
    if not samples:
        raise DataError(f"no transcript in {files}: {too_long} are longer than data.max_length={config.max_length}")
    return Transcripts(samples, too_long)


def check_transcripts(files: str | Sequence[str], config: SFTDataConfig) -> None:
    """Read every row without a tokenizer. Raises DataError, naming file, row and column, for no transcript."""
    reader = _RowReader(config)
    for file in expand(files):
        for number, row in _rows(file, config):
            reader.read(row, _place(file, number))


def _place(file: str, number: int) -> str:
    return f"{file}, row {number} (the first is 0)"


def _rows(file: str, config: SFTDataConfig) -> Iterator[tuple[int, dict[str, Any]]]:
    """Iterate over row numbers and rows, read a batch at a time."""
    if not Path(file).is_file():
        raise DataError(f"data file {file} does not exist or is a folder")
    try:
        parquet = pq.ParquetFile(file)
        names = parquet.schema_arrow.names
        if config.messages_key not in names:
            raise DataError(
                f"{file}: there is no column {config.messages_key!r} with the transcripts; its columns are "
                f"{', '.join(names)}. Name the right one with data.messages_key"
            )
        columns = [name for name in (config.messages_key, config.tools_key) if name in names]
        number = 0
        for batch in parquet.iter_batches(_BATCH_ROWS, columns=columns):
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield number, row
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file}: expected a parquet file, but it cannot be read as one: {error}") from error


class _Tokenizer:
    """Converter of rows to samples."""

    def __init__(self, config: SFTDataConfig, chat: Chat) -> None:
        self._config = config
        self._chat = chat
        self._reader = _RowReader(config)
        self._checked: set[bool] = set()
        """Kinds of transcripts that the chat format is known to write well: without calls (False), and with (True)."""

    def sample(self, row: dict[str, Any], where: str) -> SFTSample | None:
        """Tokenise a row; None for a transcript that is too long and may be skipped."""
        messages, tools = self._reader.read(row, where)
        calls = any(message.get("tool_calls") for message in messages)
        if calls not in self._checked:
            training_check(self._chat, tools, calls=calls)
            self._checked.add(calls)
        try:
            ids, mask = self._chat.render_training(messages, tools)
        except (UserError, ValueError, TypeError, LookupError) as error:
            raise DataError(f"{where}: the transcript cannot be rendered: {error}") from error
        if len(ids) > self._config.max_length:
            if self._config.truncation == "error":
                raise DataError(
                    f"{where}: the transcript is {len(ids)} tokens long, data.max_length is {self._config.max_length}. "
                    "Raise it, or leave such rows out with data.truncation=skip"
                )
            return None
        return SFTSample(np.asarray(ids, dtype=np.int32), np.asarray(mask, dtype=np.bool_))


class _RowReader:
    """Converter of rows to messages and tools; equal tool lists are parsed once."""

    def __init__(self, config: SFTDataConfig) -> None:
        self._config = config
        self._tools: dict[str, list[ToolSchema]] = {}

    def read(self, row: dict[str, Any], where: str) -> tuple[list[Message], list[ToolSchema] | None]:
        """Check a row. Raises DataError."""
        messages = self._messages(row[self._config.messages_key], f"{where}, column {self._config.messages_key}")
        return messages, self._tools_of(row.get(self._config.tools_key), f"{where}, column {self._config.tools_key}")

    def _messages(self, value: object, where: str) -> list[Message]:
        messages = without_nulls(_json(value, where) if isinstance(value, str) else value)
        if not isinstance(messages, list) or not messages:
            raise DataError(f"{where}: expected a list of messages, found {_short(value)}")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise DataError(f"{where}, message {index}: expected {{role, content}}, found {_short(message)}")
            if not (isinstance(message.get("content"), str) or message.get("tool_calls")):
                raise DataError(f"{where}, message {index}: expected text as content, found {_short(message)}")
        return messages

    def _tools_of(self, value: object, where: str) -> list[ToolSchema] | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise DataError(f"{where}: expected OpenAI tool schemas in JSON text, found {_short(value)}")
        if value not in self._tools:
            tools = _json(value, where)
            if not isinstance(tools, list) or not all(_is_schema(tool) for tool in tools):
                raise DataError(
                    f'{where}: expected a list of {{"type": "function", "function": {{"name": ...}}}} in JSON text, '
                    f"found {_short(value)}"
                )
            self._tools[value] = tools
        return self._tools[value]


def _is_schema(tool: object) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function"), dict) and "name" in tool["function"]


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: expected JSON, found {_short(text)} ({error})") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
