"""Preferences: pairs of conversations, one preferred over the other, as token ids and masks.

`agentrl.data.judged` reads conversations that are good or bad by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from agentrl.chat import Chat
from agentrl.chat.message import content_text
from agentrl.config.sections.sft import PairDataConfig
from agentrl.data.bad_rows import BadRow, Overlong, placed
from agentrl.data.feedback import FEEDBACK, LABEL
from agentrl.data.messages import FurtherFields, Unfit, further_with_reasoning, short, told_fields, without_flag
from agentrl.data.row_formats.format import PlainText
from agentrl.data.row_formats.trl import is_text
from agentrl.data.sft import Plan, RowReader, SFTSample, Tokenizer, Transcripts, common_beginning, read_files
from agentrl.data.table import Made, Row
from agentrl.errors import DataError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

PROMPT = "prompt"
"""Column with the beginning of both conversations, where data.prompt_key is not set."""
ASKING = {"system", "developer", "user"}
"""Roles of messages that are no part of an answer."""
Tokenise = Callable[[Sequence[Message]], tuple[list[int], bool]]
"""Function of a conversation that returns its token ids, and whether some were cut off."""


@dataclass(slots=True)
class Preference:
    """One row's conversations one after the other, and which of them were liked.

    A pair is the preferred conversation, then the other one. A judged conversation stands alone, or before a mismatched
    one, which is only compared with (see `agentrl.data.judged`).
    """

    ids: npt.NDArray[np.int32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T], True on the assistant's tokens, in a pair after the common beginning
    lengths: tuple[int, ...]
    """Tokens of each conversation."""
    sides: tuple[int, ...] = (1, -1)
    """By conversation: 1 for the preferred or a good one, -1 for the other or a bad one, 0 for a mismatched one."""
    reference: npt.NDArray[np.float32] | None = None  # [T], log-probs under the reference; None: not yet computed

    @property
    def marks(self) -> bytes:
        """Bytes that say how it is learnt in addition to ids and mask; empty for pairs."""
        return b"" if self.sides == (1, -1) else repr(self.sides).encode()


Side: TypeAlias = "list[Message] | PlainText"
"""One conversation of a pair, with the prompt."""


class PairReader:
    """Converter of rows to both conversations."""

    def __init__(self, config: PairDataConfig) -> None:
        self._config = config
        self._rows = RowReader(config)

    def plan(self, file: str, names: Sequence[str], read: Callable[[Row], Sequence[Made] | None]) -> Plan[Made]:
        """Choose the columns of a file. Raises DataError for conversations that are judged by themselves."""
        config = self._config
        marked = next((name for name in (FEEDBACK, LABEL) if name in names), None)
        if marked is not None and not {config.chosen_key, config.rejected_key} & {*names}:
            raise DataError(
                f"{file}: expected pairs ({config.chosen_key}, {config.rejected_key}), found conversations with a "
                f"column {marked}, which are good or bad by themselves. Set loss=kto for a policy; a reward model "
                "learns from pairs alone"
            )
        begun = (config.prompt_key,) if config.prompt_key else ()
        further = (config.tools_key, *((PROMPT,) if config.prompt_key is None else ()))
        return Plan((*begun, config.chosen_key, config.rejected_key), further, config.tools_key, read)

    def read(self, row: Row) -> tuple[Side, Side, list[ToolSchema] | None]:
        """Return (chosen, rejected, tools), both with the prompt, and both messages or both text.

        Raises DataError: no such rows, both are the same, or they answer different prompts.
        """
        config = self._config
        key = config.prompt_key or PROMPT
        prompt, *both = row.get(key), row[config.chosen_key], row[config.rejected_key]
        places = [f"column {config.chosen_key}", f"column {config.rejected_key}"]
        if all(map(is_text, both)) and (prompt is None or is_text(prompt)):
            chosen, rejected = (PlainText(str(text), str(prompt or "")) for text in both)
            if chosen == rejected:
                raise DataError("chosen and rejected are the same text, of which none can be preferred")
            return chosen, rejected, None
        if None in both and any(map(is_text, both)):
            raise Unfit(places[both.index(None)], "text, as the other one of the pair is, or messages in both", None)
        sides = [self._rows.messages(value, place) for value, place in zip(both, places, strict=True)]
        place = f"column {key}"
        if config.prompt_key:
            begun = self._rows.messages(prompt, place)
            sides = [_behind(begun, side, place) for side, place in zip(sides, places, strict=True)]
        elif prompt is not None:
            begun = [] if is_text(prompt) else self._rows.messages(prompt, place)
            sides = [_begun(side, prompt, begun, place) for side in sides]
        self._check_prompts(sides[0], sides[1])
        tools = self._rows.tools(row.get(config.tools_key))
        # The other one may be rejected for such a turn.
        self._rows.check(sides[0], tools, shared_turns(sides[0], sides[1]), places[0])
        return sides[0], sides[1], tools

    def _check_prompts(self, chosen: list[Message], rejected: list[Message]) -> None:
        difference = next((at for at, both in enumerate(zip(chosen, rejected, strict=False)) if _differ(*both)), None)
        if difference is None and len(chosen) == len(rejected):
            raise DataError("chosen and rejected are the same conversation, of which none can be preferred")
        if difference is not None and ASKING & {chosen[difference]["role"], rejected[difference]["role"]}:
            raise DataError(
                f"expected chosen and rejected to answer the same messages, found message {difference} (the first is "
                f"0) to be {short(chosen[difference])} in one and {short(rejected[difference])} in the other. Give "
                "both the same prompt, or leave the row out"
            )


def _begun(side: list[Message], prompt: object, begun: list[Message], place: str) -> list[Message]:
    """Put messages of the column `prompt` before an answer that does not begin with them yet.

    Raises BadRow for a conversation that is no answer to the prompt and does not begin with it.
    """
    plain = without_flag(side)
    if plain[0]["role"] in ASKING:
        asked = [content_text(one.get("content")).strip() for one in plain if one["role"] == "user"]
        if plain[: len(begun)] == without_flag(begun) if begun else str(prompt).strip() in asked:
            return side
    elif begun:
        return [*begun, *side]
    raise BadRow(
        place,
        "expected the messages before chosen and rejected, or the prompt that both begin with, found "
        f"{short(prompt)} where a conversation begins with {short(side[0])}. Set data.prompt_key=false where chosen "
        "and rejected are whole conversations; else give the prompt as messages",
    )


def _behind(prompt: list[Message], answer: list[Message], place: str) -> list[Message]:
    """Join a prompt and an answer, which may begin with the prompt or with the end of it. Raises BadRow."""
    plain, plain_answer = without_flag(prompt), without_flag(answer)
    most = min(len(prompt), len(answer))
    repeated = next((size for size in range(most, 0, -1) if plain[-size:] == plain_answer[:size]), 0)
    rest = answer[repeated:]
    follows = rest[0]["role"] if rest and prompt else "assistant"
    if follows in ("system", "developer") or (follows == "user" and prompt[-1]["role"] == "user"):
        raise BadRow(
            place,
            "expected an answer to the prompt, or the prompt and an answer, found messages that begin with "
            f"{short(rest[0])}, while the prompt ends with {short(prompt[-1])}. Mend the row, or leave data.prompt_key "
            "out where the conversations are whole",
        )
    return [*prompt, *rest]


def shared_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Count the assistant turns with which both conversations begin."""
    shared = takewhile(lambda both: not _differ(*both), zip(chosen, rejected, strict=False))
    return sum(message["role"] == "assistant" for message, _ in shared)


def _differ(one: Message, other: Message) -> bool:
    return without_flag([one]) != without_flag([other])


def check_pairs(files: str | Sequence[str], config: PairDataConfig, progress: Callable[[int], object]) -> int:
    """Read every row without a tokenizer; return how many there are. Raises DataError, naming file, row and column."""
    reader = PairReader(config)
    return read_files(
        files, lambda file, names: reader.plan(file, names, lambda row: [reader.read(row)]), progress, config
    ).rows


def load_pairs(
    files: str | Sequence[str],
    config: PairDataConfig,
    chat: Chat,
    progress: Callable[[int], object],
) -> Transcripts[Preference]:
    """Tokenise every row for a policy; a pair is left out where one of the two is too long.

    Raises DataError as `load_transcripts` does, and where no assistant turn follows the common beginning.
    """
    reader, tokenizer = PairReader(config), Tokenizer(config, chat)
    read = pair_reading(config, reader, tokenizer)

    def read_row(row: Row) -> list[Preference] | None:
        pair = read(row)
        return None if pair is None else [pair]

    found = read_files(files, lambda file, names: reader.plan(file, names, read_row), progress, config)
    found.unlearnt = tokenizer.remarks()
    return found


def pair_reading(
    config: PairDataConfig, reader: PairReader, tokenizer: Tokenizer
) -> Callable[[Row], Preference | None]:
    """Return the function that tokenises a row of a pair for a policy; None: one of the two is too long."""

    def read(row: Row) -> Preference | None:
        """Tokenise a row."""
        chosen, rejected, tools = reader.read(row)
        if isinstance(chosen, PlainText) or isinstance(rejected, PlainText):
            return _text_pair(tokenizer, [one for one in (chosen, rejected) if isinstance(one, PlainText)])
        turns = shared_turns(chosen, rejected)
        samples = []
        for column, messages in {config.chosen_key: chosen, config.rejected_key: rejected}.items():
            with placed(f"column {column}"):
                if sum(message["role"] == "assistant" for message in messages) == turns:
                    raise DataError("no assistant turn is behind what both conversations begin with")
                samples.append(tokenizer.sample(messages, tools, shown=turns, rejected=messages is rejected))
        return None if any(sample is None for sample in samples) else _pair([one for one in samples if one is not None])

    return read


def load_scored_pairs(
    files: str | Sequence[str],
    config: PairDataConfig,
    tokenise: Tokenise,
    progress: Callable[[int], object],
) -> Transcripts[Preference]:
    """Tokenise every row as a reward model reads it; a pair is left out where one of the two is too long.

    The masks mark each conversation's last token, whose score is the conversation's.
    """
    reader, further, remarks = PairReader(config), FurtherFields(further_with_reasoning), Counter[str]()

    def conversation(messages: list[Message]) -> SFTSample | None:
        plain = without_flag(messages)
        try:
            ids, cut = tokenise(plain)
        except ValueError as error:
            raise DataError(str(error)) from error
        too_long = cut or len(ids) > config.max_length
        if too_long and config.truncation == "error":
            problem = (
                f"a conversation is longer than data.max_length={config.max_length} tokens, or than the model reads"
            )
            raise Overlong("", f"{problem}. Raise it, or leave such rows out with data.truncation=skip")
        further.note(plain)
        if plain != messages:
            remarks["weight, train or loss in messages: a reward model learns to score whole conversations"] += 1
        mask = np.arange(len(ids)) == len(ids) - 1
        return None if too_long else SFTSample(np.asarray(ids, dtype=np.int32), mask)

    def read(row: Row) -> list[Preference] | None:
        """Tokenise a row."""
        chosen, rejected, _ = reader.read(row)
        if isinstance(chosen, PlainText) or isinstance(rejected, PlainText):
            raise DataError(
                f"expected messages as {config.chosen_key} and {config.rejected_key}, found text: a reward model reads "
                "conversations by its chat template"
            )
        columns = {config.chosen_key: chosen, config.rejected_key: rejected}
        samples = []
        for column, messages in columns.items():
            with placed(f"column {column}"):
                samples.append(conversation(messages))
        whole = [one for one in samples if one is not None]
        return None if len(whole) < len(samples) else [_pair(whole)]

    found = read_files(files, lambda file, names: reader.plan(file, names, read), progress, config)
    found.unlearnt = {**remarks, **told_fields(further.unread(lambda messages: tokenise(messages)[0]))}
    return found


def _text_pair(tokenizer: Tokenizer, sides: Sequence[PlainText]) -> Preference | None:
    """Tokenise two texts; learnt is the rest after the prompt, or without one after the common beginning."""
    made = [tokenizer.text(side) for side in sides]
    samples = [one for one in made if one is not None]
    if len(samples) < len(made):
        return None
    if not sides[0].prompt:
        shared = common_beginning(*(sample.ids.tolist() for sample in samples))
        samples = [SFTSample(one.ids, one.mask & (np.arange(len(one.ids)) >= shared)) for one in samples]
    return _pair(samples)


def _pair(samples: Sequence[SFTSample]) -> Preference:
    chosen, rejected = samples
    ids, mask = (np.concatenate([chosen.ids, rejected.ids]), np.concatenate([chosen.mask, rejected.mask]))
    return Preference(ids, mask, (len(chosen.ids), len(rejected.ids)))
