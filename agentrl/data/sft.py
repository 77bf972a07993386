"""Transcripts for supervised training: parquet rows of messages as token ids and loss masks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Generic, TypeAlias, TypeGuard, cast

import numpy as np
import numpy.typing as npt

from agentrl.chat import Chat
from agentrl.chat.check import training_check
from agentrl.chat.message import content_text, parse_json
from agentrl.chat.read_back import check_read_back, letters, reasoning_marks, turns_of
from agentrl.config.sections.sft import SFTDataConfig, TuningDataConfig
from agentrl.data.bad_rows import BadRows, Overlong, placed
from agentrl.data.messages import (
    FurtherFields,
    Unfit,
    calls_in_text,
    has_images,
    read_messages,
    told_fields,
    with_one_flag,
    with_wrapped_tools,
    without_flag,
    without_nulls,
)
from agentrl.data.row_formats.choose import Reading, reading_of
from agentrl.data.row_formats.format import PlainText
from agentrl.data.sources import expand
from agentrl.data.table import Made, Row, open_table
from agentrl.data.teachable import check_teachable
from agentrl.errors import DataError, UserError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

NAMES_COLUMN = "data.messages_key, or for pairs data.chosen_key, data.rejected_key and data.prompt_key"
ReadRow: TypeAlias = "PlainText | tuple[list[Message], list[ToolSchema] | None, int]"
"""Text of a row; or its messages, its tools, and the number of its assistant turns at the beginning that are shown."""


@dataclass(frozen=True, slots=True)
class SFTSample:
    """One transcript: token ids [T] int32 and loss mask [T] bool."""

    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]
    """True on the tokens of the assistant, which are learnt."""


@dataclass(slots=True)
class Transcripts(Generic[Made]):
    """Transcripts or pairs of a data set, in the order of the files."""

    samples: list[Made]
    too_long: int
    """Number of rows left out because they are longer than data.max_length."""
    bad: BadRows
    """Rows left out by data.on_bad_row=skip."""
    notes: dict[str, str]
    """By file, in words: how its rows are read, where that was found by its columns, and the columns not read."""
    unlearnt: dict[str, int] = field(default_factory=dict)
    """Number of transcripts in `samples` with content of the row that is not learnt, by kind of content."""

    @property
    def rows(self) -> int:
        """Number of rows of the files."""
        return len(self.samples) + self.too_long + self.bad.count


def load_transcripts(
    files: str | Sequence[str], config: SFTDataConfig, chat: Chat, progress: Callable[[int], object] = lambda rows: None
) -> Transcripts[SFTSample]:
    """Read and tokenise every row; 5 bytes a token are kept.

    The format of the rows (`agentrl.data.row_formats`) is found by the columns of each file, unless the config names
    it. `progress` is called with the number of rows just done.

    Raises DataError, naming file, row and column, for a row that is no transcript, and with truncation=error for a
    transcript of more than data.max_length tokens. Raises it, too, when no transcript is left, and for a file whose
    columns fit no format or several. Raises ConfigError when the chat format would not show, or not learn, content of
    typical transcripts: the first without and with tool calls.
    """
    reader, tokenizer = RowReader(config), Tokenizer(config, chat)

    def plan(file: str, names: Sequence[str]) -> Plan[SFTSample]:
        """Choose how the rows of a file are read."""
        reading = reading_of(config, names, file)

        def read(row: Row) -> SFTSample | None:
            """Tokenise a row."""
            return tokenizer.transcript(reader.transcript(reading, row))

        return Plan(reading.needed, reading.further, config.tools_key, read, reading.note)

    found = read_files(files, plan, progress, config)
    found.unlearnt = tokenizer.remarks()
    return found


def check_transcripts(
    files: str | Sequence[str], config: SFTDataConfig, progress: Callable[[int], object] = lambda rows: None
) -> int:
    """Read every row without a tokenizer, which takes a small part of the time; return how many there are.

    Raises DataError, naming file, row and column, for a row that is no transcript, and when there are no rows.
    """
    reader = RowReader(config)

    def plan(file: str, names: Sequence[str]) -> Plan[object]:
        """Choose how the rows of a file are read."""
        reading = reading_of(config, names, file)
        return Plan(
            reading.needed, reading.further, config.tools_key, lambda row: reader.transcript(reading, row), reading.note
        )

    return read_files(files, plan, progress, config).rows


@dataclass(frozen=True, slots=True)
class Plan(Generic[Made]):
    """How the rows of one file are read."""

    needed: Sequence[str]
    """Columns that each row must have."""
    further: Sequence[str]
    """Columns that are read, too, where they are there."""
    tools: str
    """Column with the tools."""
    read: Callable[[Row], Made | None]
    """Function of a row; None: the row is left out as too long. Raises DataError for a bad row."""
    note: str = ""
    """The form of the rows in words, where it was found by the columns."""


def read_files(
    files: str | Sequence[str],
    plan: Callable[[str, Sequence[str]], Plan[Made]],
    progress: Callable[[int], object],
    config: TuningDataConfig,
) -> Transcripts[Made]:
    """Read the rows of all files.

    plan: called with each file and its columns, in JSON files the members of its first row. Raises DataError when
    nothing is left.
    """
    found: Transcripts[Made] = Transcripts([], 0, BadRows(config.on_bad_row), {})
    for file in expand(files):
        table = open_table(file)
        # Without a row, or with no JSON object among them, there is no form to find.
        chosen: Plan[Made] = plan(file, table.names) if table.names else Plan((), (), "", lambda row: None)
        needed = dict.fromkeys(chosen.needed, NAMES_COLUMN)
        for _, one in table.read(chosen.further, chosen.read, found.bad, needed=needed, tools=chosen.tools):
            if one is None:
                found.too_long += 1
            else:
                found.samples.append(one)
            progress(1)
        if note := "; ".join(filter(None, [chosen.note, table.unread])):
            found.notes[file] = note
    if not found.samples:
        longer = f"all {found.too_long} are longer than max_length={config.max_length}" if found.too_long else ""
        why = "; ".join(filter(None, [longer, found.bad.told()])) or "there are no rows"
        raise DataError(f"no transcript in {files}: {why}")
    return found


class Tokenizer:
    """Converter of messages to samples."""

    def __init__(self, config: TuningDataConfig, chat: Chat) -> None:
        self._config = config
        self._chat = chat
        self._unlearnt: Counter[str] = Counter()
        self._further = FurtherFields()
        self._checked: set[bool] = set()
        """Kinds of transcripts that the chat format is known to write well: without calls (False), and with (True)."""

    def transcript(self, read: ReadRow) -> SFTSample | None:
        """Tokenise a row; None for a transcript that is too long and may be skipped. Raises DataError."""
        if isinstance(read, PlainText):
            return self.text(read)
        messages, tools, shown = read
        return self.sample(messages, tools, shown=shown)

    def text(self, plain: PlainText) -> SFTSample | None:
        """Tokenise a text as it is, as `transcript` does.

        The whole text is tokenised, with the tokenizer's begin token where it writes one, and its end token. Learnt are
        the tokens from the first difference to the prompt's own ids, so that no letter of the learnt text is left out.
        """
        ids, prompt = self._text_ids(plain.prompt + plain.text), self._text_ids(plain.prompt)
        if (end := self._chat.tokenizer.eos_token_id) is not None and ids[-1:] != [end]:
            ids.append(end)
        if self._too_long(len(ids)):
            return None
        shown = common_beginning(ids, prompt) if plain.prompt else len(self._begin)
        if plain.prompt and shown < len(prompt):
            self._unlearnt["a token that begins in the prompt and ends in the completion, and is learnt"] += 1
        return SFTSample(np.asarray(ids, dtype=np.int32), np.arange(len(ids)) >= shown)

    def _text_ids(self, text: str) -> list[int]:
        ids = self._chat.encode_markup(text)
        return ids if ids[: len(self._begin)] == self._begin else [*self._begin, *ids]

    @cached_property
    def _begin(self) -> list[int]:
        """The begin token, where the tokenizer writes it before a text."""
        begin = self._chat.tokenizer.bos_token_id
        return [begin] if begin is not None and self._chat.tokenizer.encode("")[:1] == [begin] else []

    def _too_long(self, tokens: int) -> bool:
        """Check for a transcript that is left out. Raises DataError with truncation=error."""
        if tokens <= self._config.max_length:
            return False
        if self._config.truncation == "error":
            problem = f"the transcript is {tokens} tokens long, data.max_length is {self._config.max_length}"
            raise Overlong("", f"{problem}. Raise it, or leave such rows out with data.truncation=skip")
        return True

    def sample(
        self,
        messages: list[Message],
        tools: list[ToolSchema] | None,
        *,
        shown: int = 0,
        rejected: bool = False,
    ) -> SFTSample | None:
        """Tokenise a transcript; None for a transcript that is too long and may be skipped.

        Raises DataError. The first `shown` turns of the assistant are not learnt, and neither are
        turns with `weight` 0 (see `with_one_flag`). `rejected`: of a pair, this is the
        conversation that is not preferred.
        """
        calls = any(message.get("tool_calls") for message in messages)
        if calls not in self._checked:
            training_check(self._chat, tools, calls=calls)
            self._checked.add(calls)
        plain = without_flag(messages)
        try:
            ids, mask = self._chat.render_training(plain, tools)
        except (UserError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise DataError(f"the transcript cannot be rendered: {error}") from error
        taught = [number >= shown and turn.get("weight") != 0 for number, turn in enumerate(filter(_says, messages))]
        if not any(taught):
            raise DataError(
                "every assistant turn that could be learnt is marked as not to be (weight, train or loss is 0 or "
                "false). Leave the row out, or mark a turn of it"
            )
        if self._too_long(len(ids)):
            return None
        marks = iter(taught)
        marked = [cast(Message, {**one, "weight": int(next(marks))} if _says(one) else one) for one in messages]
        turns = turns_of(ids, mask)
        mistaken = rejected or self._config.on_bad_row == "learn"
        check_read_back(self._chat, marked, turns, tools, mistaken=mistaken)
        self._further.note(plain)
        self._unlearnt.update(unlearnt(self._chat, marked, turns))
        learnt = np.asarray(mask, dtype=np.bool_)
        begins = learnt & ~np.concatenate([[False], learnt[:-1]])  # each run of learnt tokens is a turn
        kept = learnt & np.asarray(taught, dtype=np.bool_)[np.maximum(np.cumsum(begins) - 1, 0)]
        return SFTSample(np.asarray(ids, dtype=np.int32), kept)

    def remarks(self) -> dict[str, int]:
        """Return the number of transcripts with content of the row that is not learnt, by kind of content."""
        known = self._chat.remarks.copy()
        unread = self._further.unread(lambda messages: self._chat.render_training(messages)[0])
        self._chat.remarks = known  # Writing them without a field is no reading.
        return {**self._unlearnt, **told_fields(unread)}


class RowReader:
    """Converter of rows to messages and tools; equal tool lists are parsed once."""

    def __init__(self, config: TuningDataConfig) -> None:
        self._config = config
        self._tools: dict[str, list[ToolSchema]] = {}

    def transcript(self, reading: Reading, row: Row) -> ReadRow:
        """Read a row by its format. Raises DataError."""
        made = reading.read(row)
        if isinstance(made, PlainText):
            return made
        place = f"column {reading.needed[0]}" if len(reading.needed) == 1 else ""
        messages = self.messages(made.messages, place)
        shown = sum(message["role"] == "assistant" for message in messages[: made.shown])
        if made.shown and shown == sum(message["role"] == "assistant" for message in messages):
            raise DataError("no assistant turn is in the completion, so nothing of the row can be learnt")
        tools = self.tools(made.tools)
        self.check(messages, tools, shown, place)
        return messages, tools, shown

    def check(self, messages: list[Message], tools: list[ToolSchema] | None, shown: int, place: str) -> None:
        """Check that what is learnt is worth it; the first `shown` turns of the assistant are not. Raises Unfit."""
        if self._config.on_bad_row != "learn":
            with placed(place):
                check_teachable(messages, tools, shown)

    def messages(self, value: object, place: str) -> list[Message]:
        """Read messages, in which `weight` is the only allowed field about learning. Raises Unfit."""
        with placed(place):
            messages = with_one_flag(read_messages(value))
            if has_images(messages):
                raise Unfit("", "messages without images: supervised training is on text only", value)
        return messages

    def tools(self, value: object) -> list[ToolSchema] | None:
        """Read the row's tools. Raises Unfit."""
        place = f"column {self._config.tools_key}"
        if value is None or value == "":
            return None
        if isinstance(value, list):
            value = json.dumps(without_nulls(value))
        if not isinstance(value, str):
            raise Unfit(place, "a list of OpenAI tool schemas, or it in JSON text", value)
        if value not in self._tools:
            try:
                tools = with_wrapped_tools(parse_json(value))
            except ValueError as error:
                raise Unfit(place, f"JSON ({error})", value) from error
            schemas = [tool for tool in tools if _is_schema(tool)] if isinstance(tools, list) else []
            if not isinstance(tools, list) or len(schemas) < len(tools):
                expected = 'a list of {"type": "function", "function": {"name": ...}} in JSON text'
                raise Unfit(place, expected, value)
            self._tools[value] = schemas
        return self._tools[value] or None


def common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal ids at the beginning."""
    return next(
        (at for at, both in enumerate(zip(one, other, strict=False)) if both[0] != both[1]), min(len(one), len(other))
    )


def _is_schema(tool: object) -> TypeGuard[ToolSchema]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def unlearnt(chat: Chat, messages: Sequence[Message], turns: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield the kinds of content that a transcript has and its learnt tokens lack.

    turns: the tokens of the assistant's turns. Templates leave out content that they have no place for: text next to
    calls, reasoning, what stands before a mark in a text. Blanks, and turns with `weight` 0, are not compared.
    """
    if any(message["role"] != "assistant" and message.get("weight") for message in messages):
        yield "a message marked to be learnt (weight, train or loss) that is not the assistant's, and is only shown"
    if calls_in_text(messages):
        yield "a tool's answer behind an assistant turn without tool_calls (calls in its text are learnt as text)"
    taught = ((one, turn) for one, turn in zip(filter(_says, messages), turns, strict=True) if one.get("weight") != 0)
    lost = (_lost(message, letters(chat.decode(turn)), reasoning_marks(chat)) for message, turn in taught)
    yield from dict.fromkeys(chain.from_iterable(lost))


def _says(message: Message) -> bool:
    return message["role"] == "assistant"


def _lost(turn: Message, text: str, marks: Sequence[str]) -> Iterator[str]:
    """Yield the kinds of content that an assistant turn has and its learnt text lacks."""
    said = letters(content_text(turn.get("content")))
    for mark in marks:  # the prompt may have begun the reasoning
        said, text = said.replace(mark, ""), text.replace(mark, "")
    calls = turn.get("tool_calls")
    if said not in text and calls:
        yield "text beside tool calls, which the chat template does not write"
    elif said not in text:
        yield "text of which the chat template writes only a part"
    elif calls and said and text.find(said) > text.find(letters(calls[0]["function"]["name"])):
        yield "text beside tool calls, which the chat template writes behind the calls, and which is learnt there"
    if letters(turn.get("reasoning_content", "")) not in text:
        yield "reasoning_content, which the chat template does not write"
