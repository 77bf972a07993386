"""Pairs of conversations, one preferred over the other: rows of messages as token ids and masks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from agentrl.chat import Chat
from agentrl.config.sections.sft import PairDataConfig
from agentrl.data.messages import FurtherFields, further_with_reasoning, short, told_fields, without_flag
from agentrl.data.sft import Row, RowReader, SFTSample, Tokenizer, read_files
from agentrl.errors import DataError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

ASKING = {"system", "developer", "user"}
"""Roles of messages that are no part of an answer."""
Tokenise = Callable[[Sequence[Message]], tuple[list[int], bool]]
"""Function of a conversation that returns its token ids, and whether some were cut off."""


@dataclass(slots=True)
class Pair:
    """Two conversations in a row: the preferred one, then the other one."""

    ids: npt.NDArray[np.int32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T], True on the assistant's tokens after the common beginning
    rejected_at: int
    """Number of tokens before the other conversation."""
    reference: npt.NDArray[np.float32] | None = None  # [T], log-probs under the reference; None: not yet computed


class PairReader:
    """Converter of rows to the messages of both conversations."""

    def __init__(self, config: PairDataConfig) -> None:
        self._config = config
        self._rows = RowReader(config)
        begun_by = () if config.prompt_key is None else (config.prompt_key,)
        self.columns = (*begun_by, config.chosen_key, config.rejected_key)

    def read(self, row: Row, where: str) -> tuple[list[Message], list[Message], list[ToolSchema] | None]:
        """Return (chosen, rejected, tools), both with the prompt.

        Raises DataError: no such rows, both are the same, or they answer different prompts.
        """
        *prompt, chosen, rejected = (self._rows.messages(row, column, where) for column in self.columns)
        begun = prompt[0] if prompt else []
        chosen = _behind(begun, chosen, f"{where}, column {self._config.chosen_key}")
        rejected = _behind(begun, rejected, f"{where}, column {self._config.rejected_key}")
        difference = next((at for at, both in enumerate(zip(chosen, rejected, strict=False)) if _differ(*both)), None)
        if difference is None and len(chosen) == len(rejected):
            raise DataError(f"{where}: chosen and rejected are the same conversation, of which none can be preferred")
        if difference is not None and ASKING & {chosen[difference]["role"], rejected[difference]["role"]}:
            raise DataError(
                f"{where}: expected chosen and rejected to answer the same messages, found message {difference} (the "
                f"first is 0) to be {short(chosen[difference])} in one and {short(rejected[difference])} in the "
                "other. Give both the same prompt, or leave the row out"
            )
        return chosen, rejected, self._rows.tools(row, where)


def _behind(prompt: list[Message], answer: list[Message], where: str) -> list[Message]:
    """Join a prompt and an answer, which may begin with the prompt or with the end of it. Raises DataError."""
    plain, plain_answer = without_flag(prompt), without_flag(answer)
    most = min(len(prompt), len(answer))
    repeated = next((size for size in range(most, 0, -1) if plain[-size:] == plain_answer[:size]), 0)
    rest = answer[repeated:]
    follows = rest[0]["role"] if rest and prompt else "assistant"
    if follows in ("system", "developer") or (follows == "user" and prompt[-1]["role"] == "user"):
        raise DataError(
            f"{where}: expected an answer to the prompt, or the prompt and an answer, found messages that begin with "
            f"{short(rest[0])}, while the prompt ends with {short(prompt[-1])}. Mend the row, or leave data.prompt_key "
            "out where the conversations are whole"
        )
    return [*prompt, *rest]


def _differ(one: Message, other: Message) -> bool:
    return without_flag([one]) != without_flag([other])


def check_pairs(files: str | Sequence[str], config: PairDataConfig, progress: Callable[[int], object]) -> int:
    """Read every row without a tokenizer; return how many there are. Raises DataError, naming file, row and column."""
    reader = PairReader(config)
    return len(read_files(files, config, reader.columns, reader.read, progress)[0])


def load_pairs(
    files: str | Sequence[str],
    config: PairDataConfig,
    chat: Chat,
    progress: Callable[[int], object],
    remarks: Counter[str] | None = None,
) -> tuple[list[Pair], int]:
    """Tokenise every row for a policy: (pairs, number of pairs left out because one of the two is too long).

    `remarks` receives the kinds of content that are not learnt, with their numbers (see `Transcripts.unlearnt`). Raises
    DataError as `load_transcripts` does, and where no assistant turn follows the common beginning.
    """
    reader, tokenizer = PairReader(config), Tokenizer(config, chat)
    remarks = Counter() if remarks is None else remarks

    def read(row: Row, where: str) -> Pair | None:
        """Tokenise a row."""
        chosen, rejected, tools = reader.read(row, where)
        shared = takewhile(lambda both: not _differ(*both), zip(chosen, rejected, strict=False))
        turns = sum(message["role"] == "assistant" for message, _ in shared)
        columns = {f"{where}, column {config.chosen_key}": chosen, f"{where}, column {config.rejected_key}": rejected}
        for place, messages in columns.items():
            if sum(message["role"] == "assistant" for message in messages) == turns:
                raise DataError(f"{place}: no assistant turn is behind what both conversations begin with")
        samples = [tokenizer.sample(messages, tools, place, shown=turns) for place, messages in columns.items()]
        return None if any(sample is None for sample in samples) else _pair([one for one in samples if one is not None])

    made = read_files(files, config, reader.columns, read, progress)
    remarks.update(tokenizer.remarks())
    return made


def load_scored_pairs(
    files: str | Sequence[str],
    config: PairDataConfig,
    tokenise: Tokenise,
    progress: Callable[[int], object],
    remarks: Counter[str] | None = None,
) -> tuple[list[Pair], int]:
    """Tokenise every row as a reward model reads it: (pairs, number of pairs left out because one is too long).

    The masks mark each conversation's last token, whose score is the conversation's. `remarks`: as in `load_pairs`.
    """
    reader, further = PairReader(config), FurtherFields(further_with_reasoning)
    remarks = Counter() if remarks is None else remarks

    def conversation(messages: list[Message], where: str) -> SFTSample | None:
        plain = without_flag(messages)
        try:
            ids, cut = tokenise(plain)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        too_long = cut or len(ids) > config.max_length
        if too_long and config.truncation == "error":
            raise DataError(
                f"{where}: a conversation is longer than data.max_length={config.max_length} tokens, or than the model "
                "reads. Raise it, or leave such rows out with data.truncation=skip"
            )
        further.note(plain)
        if plain != messages:
            remarks["weight, train or loss in messages: a reward model learns to score whole conversations"] += 1
        mask = np.arange(len(ids)) == len(ids) - 1
        return None if too_long else SFTSample(np.asarray(ids, dtype=np.int32), mask)

    def read(row: Row, where: str) -> Pair | None:
        """Tokenise a row."""
        chosen, rejected, _ = reader.read(row, where)
        columns = {config.chosen_key: chosen, config.rejected_key: rejected}
        samples = [conversation(messages, f"{where}, column {key}") for key, messages in columns.items()]
        return None if any(sample is None for sample in samples) else _pair([one for one in samples if one is not None])

    made = read_files(files, config, reader.columns, read, progress)
    remarks.update(told_fields(further.unread(lambda messages: tokenise(messages)[0])))
    return made


def _pair(samples: Sequence[SFTSample]) -> Pair:
    chosen, rejected = samples
    ids, mask = (np.concatenate([chosen.ids, rejected.ids]), np.concatenate([chosen.mask, rejected.mask]))
    return Pair(ids, mask, len(chosen.ids))
