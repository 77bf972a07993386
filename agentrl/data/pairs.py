"""Pairs of conversations, of which one is preferred: rows of messages as token ids and masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from agentrl.chat import Chat
from agentrl.config.sections.sft import PairDataConfig
from agentrl.data.sft import Row, RowReader, SFTSample, Tokenizer, read_files
from agentrl.errors import DataError
from agentrl.tool import ToolSchema
from agentrl.trajectory import Message

Tokenise = Callable[[Sequence[Message]], tuple[list[int], bool]]
"""Function of a conversation that returns its token ids, and whether some were cut off."""


@dataclass(slots=True)
class Pair:
    """Two conversations in a row: the preferred one, then the other one."""

    ids: npt.NDArray[np.int32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T], True on the assistant's tokens after what both begin with
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
        """Return (chosen, rejected, tools). Raises DataError: no such rows, or both are the same."""
        *prompt, chosen, rejected = (self._rows.messages(row, column, where) for column in self.columns)
        if chosen == rejected:
            raise DataError(f"{where}: chosen and rejected are the same conversation, of which none can be preferred")
        begun = prompt[0] if prompt else []
        return [*begun, *chosen], [*begun, *rejected], self._rows.tools(row, where)


def check_pairs(files: str | Sequence[str], config: PairDataConfig, progress: Callable[[int], object]) -> int:
    """Read every row without a tokenizer; return how many there are. Raises DataError, naming file, row and column."""
    reader = PairReader(config)
    return len(read_files(files, config, reader.columns, reader.read, progress)[0])


def load_pairs(
    files: str | Sequence[str], config: PairDataConfig, chat: Chat, progress: Callable[[int], object]
) -> tuple[list[Pair], int]:
    """Tokenise every row for a policy: (pairs, number of those left out because one of the two is too long).

    Raises DataError as `load_transcripts` does, and where no assistant turn follows what both begin with.
    """
    reader, tokenizer = PairReader(config), Tokenizer(config, chat)

    def read(row: Row, where: str) -> Pair | None:
        """Tokenise a row."""
        chosen, rejected, tools = reader.read(row, where)
        shared = takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False))
        turns = sum(message["role"] == "assistant" for message, _ in shared)
        columns = {f"{where}, column {config.chosen_key}": chosen, f"{where}, column {config.rejected_key}": rejected}
        samples = {place: tokenizer.sample(messages, tools, place) for place, messages in columns.items()}
        found = [_after(sample, turns, place) for place, sample in samples.items() if sample is not None]
        return _pair(found) if len(found) == len(columns) else None

    return read_files(files, config, reader.columns, read, progress)


def load_scored_pairs(
    files: str | Sequence[str], config: PairDataConfig, tokenise: Tokenise, progress: Callable[[int], object]
) -> tuple[list[Pair], int]:
    """Tokenise every row as a reward model reads it: (pairs, number of those left out because one is too long).

    The masks mark each conversation's last token, whose score is the conversation's.
    """
    reader = PairReader(config)

    def conversation(messages: list[Message], where: str) -> SFTSample | None:
        try:
            ids, cut = tokenise(messages)
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        too_long = cut or len(ids) > config.max_length
        if too_long and config.truncation == "error":
            raise DataError(
                f"{where}: a conversation is longer than data.max_length={config.max_length} tokens, or than the model "
                "reads. Raise it, or leave such rows out with data.truncation=skip"
            )
        mask = np.arange(len(ids)) == len(ids) - 1
        return None if too_long else SFTSample(np.asarray(ids, dtype=np.int32), mask)

    def read(row: Row, where: str) -> Pair | None:
        """Tokenise a row."""
        chosen, rejected, _ = reader.read(row, where)
        columns = {config.chosen_key: chosen, config.rejected_key: rejected}
        samples = [conversation(messages, f"{where}, column {key}") for key, messages in columns.items()]
        return None if any(sample is None for sample in samples) else _pair([one for one in samples if one is not None])

    return read_files(files, config, reader.columns, read, progress)


def _pair(samples: Sequence[SFTSample]) -> Pair:
    chosen, rejected = samples
    ids, mask = (np.concatenate([chosen.ids, rejected.ids]), np.concatenate([chosen.mask, rejected.mask]))
    return Pair(ids, mask, len(chosen.ids))


def _after(sample: SFTSample, turns: int, where: str) -> SFTSample:
    """Take the first `turns` assistant turns out of the mask. Raises DataError where no other is left."""
    begins = np.flatnonzero(sample.mask & ~np.concatenate([[False], sample.mask[:-1]]))
    if turns >= len(begins):
        raise DataError(f"{where}: no assistant turn is behind what both conversations begin with")
    mask = sample.mask & (np.arange(len(sample.mask)) >= begins[turns])
    return SFTSample(sample.ids, mask)
