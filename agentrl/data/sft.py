"""Transcripts for supervised training: parquet rows of messages as token ids and loss masks."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
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
from agentrl.data.feedback import FEEDBACK, Heard, feedback_of, scaled
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
    weight: float | None = None
    """Factor of its loss; None where no transcript has one."""

    @property
    def marks(self) -> bytes:
        """Bytes that say how it is learnt in addition to ids and mask; empty without a weight."""
        return b"" if self.weight is None else repr(self.weight).encode()


@dataclass(slots=True)
class Transcripts(Generic[Made]):
    """Transcripts, pairs or judged conversations of a data set, in the order of the files."""

    samples: list[Made]
    too_long: int
    """Number of rows left out because they are longer than data.max_length."""
    bad: BadRows
    """Rows left out by data.on_bad_row=skip."""
    notes: dict[str, str]
    """By file, in words: how its rows are read, where that was found by its columns, and the columns not read."""
    unlearnt: dict[str, int] = field(default_factory=dict)
    """Number of transcripts in `samples` with content of the row that is not learnt, by kind of content."""
    heard: Heard | None = None
    """The rows' feedback, where it was looked at."""
    left_out: int = 0
    """Number of rows left out because of their feedback, or because they have none."""
    read: int = 0
    """Number of rows that could be read."""

    @property
    def rows(self) -> int:
        """Number of rows of the files."""
        return self.read + self.bad.count


def load_transcripts(
    files: str | Sequence[str], config: SFTDataConfig, chat: Chat, progress: Callable[[int], object] = lambda rows: None
) -> Transcripts[SFTSample]:
    """Read and tokenise every row; 5 bytes a token are kept.

    The format of the rows (`agentrl.data.row_formats`) is found by the columns of each file, unless the config names
    it. `progress` is called with the number of rows just done.

    Raises DataError, naming file, row and column, for a row that is no transcript, and with truncation=error for a
    transcript of more than data.max_length tokens. Raises it, too, when no transcript is left, for feedback that cannot
    be used, and for a file whose columns fit no format or several. Raises ConfigError when the chat format would not
    show, or not learn, content of typical transcripts: the first without and with tool calls.
    """
    tokenizer, weigher = Tokenizer(config, chat), Weigher(config)

    def tokenised(read: ReadRow, weight: float) -> SFTSample | None:
        """Tokenise a row."""
        sample = tokenizer.transcript(read)
        return sample if sample is None or not weigher.weighs else replace(sample, weight=weight)

    found = read_files(files, transcripts_plan(config, weigher, tokenised), progress, config)
    found.unlearnt, found.heard = tokenizer.remarks(), weigher.heard_in(files)
    if weigher.weighs:
        found.samples = with_mean_weight(found.samples)
    return found


def check_transcripts(
    files: str | Sequence[str], config: SFTDataConfig, progress: Callable[[int], object] = lambda rows: None
) -> int:
    """Read every row without a tokenizer, which takes a small part of the time; return how many there are.

    Raises DataError, naming file, row and column, for a row that is no transcript, and when there are no rows.
    """
    weigher = Weigher(config)
    found = read_files(files, transcripts_plan(config, weigher, lambda read, weight: read), progress, config)
    weigher.heard_in(files)
    return found.rows


def transcripts_plan(
    config: SFTDataConfig, weigher: Weigher, read: Callable[[ReadRow, float], Made | None]
) -> Callable[[str, Sequence[str]], Plan[Made]]:
    """Return the function of a file and its columns that chooses how its rows are read.

    read: called with a row and its weight, unless its feedback leaves it out.
    """
    reader = RowReader(config)

    def plan(file: str, names: Sequence[str]) -> Plan[Made]:
        """Choose how the rows of a file are read."""
        reading = reading_of(config, names, file)

        def read_row(row: Row) -> list[Made] | None:
            weight = weigher.weight(row)
            if not weight:
                return []
            made = read(reader.transcript(reading, row), weight)
            return None if made is None else [made]

        return Plan(reading.needed, (*reading.further, *weigher.columns), config.tools_key, read_row, reading.note)

    return plan


class Weigher:
    """Reader of the feedback of transcripts: the weight of each in training."""

    def __init__(self, config: SFTDataConfig) -> None:
        self._config = config
        self._column = config.feedback_key or FEEDBACK
        self._heard = Heard(config.feedback_threshold)
        self.columns = () if config.feedback == "ignore" else (self._column,)
        """Columns to read, where they are there."""
        self.weighs = config.feedback in ("weight", "exp_weight")
        """Transcripts have weights."""

    def weight(self, row: Row) -> float:
        """Return the weight of a row; 0: it is left out. Raises Unfit."""
        config, heard = self._config, self._heard
        if config.feedback == "ignore":
            return 1.0
        try:
            value = feedback_of(row.get(self._column), self._column)
        except Unfit:
            if config.feedback is not None:
                raise
            heard.unread += 1
            return 1.0
        weight = self._weight_of(value)
        heard.add(value)
        return weight

    def _weight_of(self, value: float | None) -> float:
        config, place = self._config, f"column {self._column}"
        if value is None:
            return 1.0 if config.feedback is None or config.without_feedback == "keep" else 0.0
        if config.feedback == "filter":
            return 1.0 if value > config.feedback_threshold else 0.0
        if config.feedback == "weight" and value < 0:
            raise Unfit(
                place,
                "0 or more with data.feedback=weight (data.feedback=filter leaves thumbs down out, and exp_weight "
                "takes negative numbers)",
                value,
            )
        if config.feedback == "exp_weight":
            try:
                return math.exp(value / config.feedback_temperature)
            except OverflowError:
                expected = f"less for data.feedback_temperature={config.feedback_temperature:g}, which may be higher"
                raise Unfit(place, expected, value) from None
        return value if config.feedback == "weight" else 1.0

    def heard_in(self, files: str | Sequence[str]) -> Heard | None:
        """Return the feedback of all rows; None where nothing looked at it, or no row had any.

        Raises DataError where feedback is to be used, and no row to train on has any.
        """
        config, heard = self._config, self._heard
        if heard.given or (config.feedback is None and heard.unread):
            return heard
        if config.feedback in (None, "ignore") or files != config.train_files:
            return None
        raise DataError(
            f"data.feedback={config.feedback}: no row of {files} has feedback in the column {self._column}. Name the "
            "column with data.feedback_key, or leave data.feedback out"
        )


def with_mean_weight(samples: Sequence[SFTSample]) -> list[SFTSample]:
    """Divide the weights of transcripts by their mean over the learnt tokens.

    So the loss over all of them is a weighted mean over tokens, and equal weights are 1.
    """
    weights = scaled([sample.weight or 0.0 for sample in samples])
    weighed = [(sample, weight, int(sample.mask.sum())) for sample, weight in zip(samples, weights, strict=True)]
    mean = math.fsum(weight * tokens for _, weight, tokens in weighed) / sum(tokens for _, _, tokens in weighed)
    return [replace(sample, weight=weight / mean) for sample, weight, _ in weighed]


@dataclass(frozen=True, slots=True)
class Plan(Generic[Made]):
    """How the rows of one file are read."""

    needed: Sequence[str]
    """Columns that each row must have."""
    further: Sequence[str]
    """Columns that are read, too, where they are there."""
    tools: str
    """Column with the tools."""
    read: Callable[[Row], Sequence[Made] | None]
    """Function of a row that returns its samples. Without any, the row is left out by its feedback; None: it is left
    out as too long. Raises DataError for a bad row."""
    note: str = ""
    """The form of the rows in words, where it was found by the columns."""


def read_files(
    files: str | Sequence[str],
    plan: Callable[[str, Sequence[str]], Plan[Made]],
    progress: Callable[[int], object],
    config: TuningDataConfig,
) -> Transcripts[Made]:
    """Read the rows of all files.

    plan: called with each file and its columns, in JSON files the members of its first row that has any. Raises
    DataError when nothing is left.
    """

    def refuse(row: Row) -> None:
        raise Unfit("", "a row with columns", row)

    found: Transcripts[Made] = Transcripts([], 0, BadRows(config.on_bad_row), {})
    for file in expand(files):
        table = open_table(file)
        # Without a row that has columns there is no form to find.
        chosen: Plan[Made] = plan(file, table.names) if table.names else Plan((), (), "", refuse)
        needed = dict.fromkeys(chosen.needed, NAMES_COLUMN)
        for _, made in table.read(chosen.further, chosen.read, found.bad, needed=needed, tools=chosen.tools):
            found.read += 1
            found.too_long += made is None
            found.left_out += made is not None and not made
            found.samples += made or ()
            progress(1)
        if note := "; ".join(filter(None, [chosen.note, table.unread])):
            found.notes[file] = note
    if not found.samples:
        count = f"all {found.read}" if found.too_long == found.read else f"{found.too_long} rows"
        longer = f"{count} are longer than max_length={config.max_length}" if found.too_long else ""
        left_out = "rows are left out by their feedback, or have none in the column that data.feedback_key names"
        judged = f"{found.left_out} {left_out}" if found.left_out else ""
        why = "; ".join(filter(None, [longer, judged, found.bad.told()])) or "there are no rows"
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

    def transcript(self, read: ReadRow, *, rejected: bool = False) -> SFTSample | None:
        """Tokenise a row; None for a transcript that is too long and may be skipped. rejected: see `sample`.

        Raises DataError.
        """
        if isinstance(read, PlainText):
            return self.text(read)
        messages, tools, shown = read
        return self.sample(messages, tools, shown=shown, rejected=rejected)

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
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Unfit("", "text", text[error.start : error.end]) from None  # half a surrogate pair
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
        conversation that is not preferred, or by itself it is a bad one.
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
    """Converter of rows to messages and tools."""

    def __init__(self, config: TuningDataConfig) -> None:
        self._config = config

    def transcript(self, reading: Reading, row: Row, *, mistaken: bool = False) -> ReadRow:
        """Read a row by its format. mistaken: what it teaches may be wrong. Raises DataError."""
        made = reading.read(row)
        if isinstance(made, PlainText):
            return made
        place = f"column {reading.needed[0]}" if len(reading.needed) == 1 else ""
        messages = self.messages(made.messages, place)
        shown = sum(message["role"] == "assistant" for message in messages[: made.shown])
        if made.shown and shown == sum(message["role"] == "assistant" for message in messages):
            raise DataError("no assistant turn is in the completion, so nothing of the row can be learnt")
        tools = self.tools(made.tools)
        if not mistaken:
            self.check(messages, tools, shown, place)
        return messages, tools, shown

    def check(self, messages: list[Message], tools: list[ToolSchema] | None, shown: int, place: str) -> None:
        """Check that each turn after the first `shown` ones of the assistant teaches something. Raises Unfit."""
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
        if value is None or value == "":
            return None
        with placed(f"column {self._config.tools_key}"):
            try:
                text = json.dumps(without_nulls(value)) if isinstance(value, list) else value
            except TypeError:  # bytes, dates
                text = None
            if not isinstance(text, str):
                raise Unfit("", "a list of OpenAI tool schemas, or it in JSON text", value)
            return parsed_tools(text) or None


@lru_cache(1024)  # most rows of many data sets have the same ones, and in others each has its own
def parsed_tools(text: str) -> list[ToolSchema]:
    """Read tools in JSON text. Raises Unfit."""
    try:
        tools = with_wrapped_tools(parse_json(text))
    except ValueError as error:
        raise Unfit("", f"JSON ({error})", text) from error
    schemas = [tool for tool in tools if _is_schema(tool)] if isinstance(tools, list) else []
    if not isinstance(tools, list) or len(schemas) < len(tools):
        raise Unfit("", 'a list of {"type": "function", "function": {"name": ...}} in JSON text', text)
    return schemas


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
