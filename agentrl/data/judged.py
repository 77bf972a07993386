"""Conversations that are good or bad by themselves, as token ids and masks; pairs are taken apart to one of each.

A loss such as KTO's compares with mismatched conversations: the prompt of one row with the answer of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np

from agentrl.chat import Chat
from agentrl.config.sections.sft import PairDataConfig
from agentrl.data.bad_rows import BadRow
from agentrl.data.feedback import FEEDBACK, LABEL, feedback_of
from agentrl.data.messages import EMPTY
from agentrl.data.pairs import PairReader, Preference, pair_reading
from agentrl.data.row_formats.choose import reading_of
from agentrl.data.sft import Plan, ReadRow, RowReader, SFTSample, Tokenizer, Transcripts, read_files
from agentrl.data.table import Made, Row
from agentrl.errors import DataError


class JudgedReader:
    """Converter of rows to judged conversations."""

    def __init__(self, config: PairDataConfig) -> None:
        self._config = config
        self._rows = RowReader(config)
        self.pairs = PairReader(config)
        self._columns = (config.feedback_key,) if config.feedback_key else (FEEDBACK, LABEL)

    def plan(
        self,
        file: str,
        names: Sequence[str],
        of_pair: Callable[[Row], Sequence[Made] | None],
        of_one: Callable[[ReadRow, bool], Made | None],
    ) -> Plan[Made]:
        """Choose how the rows of a file are read: as pairs by their columns, or as conversations.

        of_pair: called with a row. of_one: called with a row's conversation, and whether it is good.
        Raises DataError for columns of both.
        """
        config = self._config
        marked = [name for name in (*self._columns, config.messages_key, "completion") if name in names]
        if {config.chosen_key, config.rejected_key} <= {*names}:
            if marked:
                raise DataError(
                    f"{file}: expected pairs ({config.chosen_key}, {config.rejected_key}), or conversations with a "
                    f"column {' or '.join(self._columns)}, found columns of both ({', '.join(marked)}). Put them into "
                    "files of their own, or drop the columns of one"
                )
            return self.pairs.plan(file, names, of_pair)
        reading = reading_of(config, names, file)

        def read(row: Row) -> list[Made] | None:
            value = self._feedback(row)
            if value is None:
                return []
            good = value > config.feedback_threshold
            made = of_one(self._rows.transcript(reading, row, mistaken=not good), good)
            return None if made is None else [made]

        return Plan(reading.needed, (*reading.further, *self._columns), config.tools_key, read, reading.note)

    def _feedback(self, row: Row) -> float | None:
        filled = [name for name in self._columns if row.get(name) not in EMPTY]
        if len(filled) > 1:
            raise BadRow(
                "",
                f"expected one column that says whether the conversation is good, found {' and '.join(filled)}. Name "
                "the right one with data.feedback_key",
            )
        return feedback_of(row[filled[0]], filled[0]) if filled else None


def check_judged(files: str | Sequence[str], config: PairDataConfig, progress: Callable[[int], object]) -> int:
    """Read every row without a tokenizer; return how many there are. Raises DataError, naming file, row and column."""
    reader = JudgedReader(config)

    def plan(file: str, names: Sequence[str]) -> Plan[object]:
        return reader.plan(file, names, lambda row: [reader.pairs.read(row)], lambda read, good: read)

    return read_files(files, plan, progress, config).rows


def load_judged(
    files: str | Sequence[str], config: PairDataConfig, chat: Chat, progress: Callable[[int], object]
) -> Transcripts[Preference]:
    """Tokenise every row for a policy: a conversation that is good or bad, or the two of a pair.

    The bad ones of pairs come last, so that a pair's two are no neighbours. Raises DataError as `load_pairs` does.
    """
    reader, tokenizer = JudgedReader(config), Tokenizer(config, chat)
    read_pair, bad = pair_reading(config, reader.pairs, tokenizer), list[Preference]()

    def of_pair(row: Row) -> list[Preference] | None:
        pair = read_pair(row)
        if pair is None:
            return None
        at = pair.lengths[0]
        bad.append(judged(SFTSample(pair.ids[at:], pair.mask[at:]), good=False))
        return [judged(SFTSample(pair.ids[:at], pair.mask[:at]), good=True)]

    def of_one(read: ReadRow, good: bool) -> Preference | None:
        sample = tokenizer.transcript(read, rejected=not good)
        return None if sample is None else judged(sample, good)

    found = read_files(files, lambda file, names: reader.plan(file, names, of_pair, of_one), progress, config)
    found.samples += bad
    found.unlearnt = tokenizer.remarks()
    return found


def judged(sample: SFTSample, good: bool) -> Preference:
    """Make a row of one conversation."""
    return Preference(sample.ids, sample.mask, (len(sample.ids),), (1 if good else -1,))


def add_mismatched(batches: Iterable[Sequence[Preference]], max_length: int) -> None:
    """Put a mismatched conversation after each judged one: its prompt with the answer of the row before it.

    The first of a batch gets the last one's answer, so that a batch's mismatched answers are its own answers. A batch
    of one row gets the answer of the row before that batch. The prompt ends before the first token that is learnt. What
    is longer than max_length is cut, as only log-probs are needed.
    """
    before: SFTSample | None = None
    for batch in batches:
        own = [SFTSample(one.ids, one.mask) for one in batch]
        others = [own[-1], *own[:-1]] if len(batch) > 1 or before is None else [before]
        before = own[-1]
        for row, one, other in zip(batch, own, others, strict=True):
            prompt, answer = int(one.mask.argmax()), int(other.mask.argmax())
            ids = np.concatenate([one.ids[:prompt], other.ids[answer:]])[:max_length]
            mask = np.concatenate([one.mask[:prompt], other.mask[answer:]])[:max_length]
            row.ids, row.mask = np.concatenate([one.ids, ids]), np.concatenate([one.mask, mask])
            row.lengths, row.sides = (len(one.ids), len(ids)), (row.sides[0], 0)


def balance(samples: Iterable[Preference]) -> tuple[int, int]:
    """Count good and bad conversations."""
    sides = list(chain.from_iterable(sample.sides for sample in samples))
    return sides.count(1), sides.count(-1)
