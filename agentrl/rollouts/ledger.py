"""The status of every prompt, and the batches of a run in `ledger.jsonl`.

A status is final once, so that prompts can be counted along the surviving line of checkpoints: no prompt is lost, and
no prompt is trained on twice. Memory and checkpoints hold a bounded part: statuses are named from the first open prompt
on, and counted before it. `ledger.jsonl` names them all, a line for each step:

    {"step": 3, "version": 2, "trained": [[4, 7], [9, 10]], "failed": [[8, 9]]}

Ordinals are given as [first, end) in rising order. A line is written when the batch is taken, before the policy is
updated with it. A run that resumes from an earlier step takes the batches of the later lines again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import DataError
from agentrl.rollouts.staleness_scheduler import PromptStatus
from agentrl.system.json_value import JSON, as_list, as_object
from agentrl.system.lines import AppendedLines, keep_steps, read_lines

LEDGER_FILE = "ledger.jsonl"
SHOWN = 10
"""Prompts that a message names at most."""
MOST = 1 << 20
"""Prompts that a batch or a checkpoint can name: a span in a file can be of any length."""


@dataclass(slots=True)
class Ledger:
    """Final statuses of the prompts from ordinal `first` on."""

    first: int = 0
    before: int = 0
    """All prompts before this one have a status."""
    counts: Counter[PromptStatus] = field(default_factory=Counter)
    """Prompts by their statuses."""
    later: dict[int, PromptStatus] = field(default_factory=dict)
    """Statuses of prompts from `before` on."""

    def settle(self, statuses: Mapping[int, PromptStatus]) -> None:
        """Take down final statuses. Raises RuntimeError for a prompt that has one."""
        if again := sorted(one for one in statuses if self.has(one)):
            raise RuntimeError(f"prompts {named(again)} have a status already")
        self.later.update(statuses)
        self.counts.update(statuses.values())
        while self.before in self.later:
            del self.later[self.before]
            self.before += 1

    def has(self, ordinal: int) -> bool:
        """Say whether the prompt has a final status."""
        return ordinal < self.before or ordinal in self.later

    def check(self, begun: Iterable[int], next_ordinal: int) -> None:
        """Check that each prompt before `next_ordinal` either is in `begun` or has a status.

        Raises DataError with the prompts that are in neither or in both.
        """
        open_ones = set(begun)
        twice = [one for one in open_ones if self.has(one)]
        drawn = range(self.before, min(next_ordinal, self.before + MOST))
        lost = [one for one in drawn if one not in open_ones and one not in self.later]
        made_up = [one for one in (*self.later, *open_ones) if one >= next_ordinal]
        whole = self.counts.total() == self.before - self.first + len(self.later)
        for prompts, what in (
            (twice, "have a final status and are to be trained on"),
            (lost, "were drawn and have neither a status nor a place among those that were begun"),
            (made_up, f"were never drawn: the next one is {next_ordinal}"),
            ([] if whole else range(self.first, self.before), f"are not those counted: {dict(self.counts)}"),
        ):
            if prompts:
                raise DataError(
                    f"the ledger in the checkpoint disagrees with its data: prompts {named(prompts)} {what}. Go on "
                    "from an earlier checkpoint (trainer.resume_from_path), or start anew with "
                    "trainer.resume_mode=disable"
                )

    def text(self) -> str:
        """List the number of prompts by status."""
        counts = ", ".join(f"{self.counts[status]} {status}" for status in PromptStatus if self.counts[status])
        return f"{self.counts.total()} prompts, each once: {counts or 'none'}"

    def state(self) -> dict[str, JSON]:
        """Return the ledger as JSON values for `load`."""
        return {
            "first": self.first,
            "before": self.before,
            "counts": {status.value: count for status, count in self.counts.items()},
            "later": spans_by_status(self.later),
        }

    @staticmethod
    def load(state: Mapping[str, JSON]) -> Ledger:
        """Make the ledger that `state()` was taken of. Raises TypeError or ValueError for another form."""
        match state:
            case {"first": int(first), "before": int(before), "counts": dict(counts), "later": dict(later)}:
                numbers = Counter({PromptStatus(name): as_count(number) for name, number in counts.items()})
                return Ledger(first, before, numbers, statuses_in(later))
        raise TypeError(f"expected the state of a ledger, found {state!r:.200}")


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A line of `ledger.jsonl`."""

    step: int
    version: int
    """The policy's before the update."""
    statuses: dict[int, PromptStatus]
    """Status of each of its prompts, in rising order."""


class LedgerFile:
    """`ledger.jsonl` in a run's folder."""

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        """`fsync`: a batch is on the disk when it was added."""
        self.path, self.fsync = folder / LEDGER_FILE, fsync

    def read(self) -> list[RecordedBatch]:
        """Read all lines, in order; a last line that a kill has cut off is left out. Raises DataError for another."""
        if not self.path.exists():
            return []
        return read_lines(
            self.path,
            _batch,
            lambda number, line, error: self.broken(
                f"line {number}: expected a step's batch, found {line[:80]!r} ({error})"
            ),
        )

    def broken(self, what: str) -> DataError:
        """Make the error for a file; `what` names its fault."""
        return DataError(
            f"{self.path}, {what}. Remove the file: steps after the last checkpoint are then sampled again"
        )

    def add(self, batch: RecordedBatch) -> None:
        """Append a batch. Raises TrainingError on a full disk; earlier lines stay intact."""
        with AppendedLines(self.path) as file:
            file.add([_line(batch)], fsync=self.fsync)

    def keep_to(self, step: int) -> None:
        """Forget the batches of later steps. Raises DataError for a line that cannot be read."""
        self.read()
        keep_steps(self.path, step)


def spans_of(ordinals: Iterable[int]) -> list[JSON]:
    """Write whole numbers as spans [first, end).

    >>> spans_of([3, 4, 5, 8])
    [[3, 6], [8, 9]]
    """
    spans: list[list[int]] = []
    for one in sorted(ordinals):
        if spans and spans[-1][1] == one:
            spans[-1][1] += 1
        else:
            spans.append([one, one + 1])
    return [list[JSON](span) for span in spans]


def spans_by_status(statuses: Mapping[int, PromptStatus]) -> dict[str, JSON]:
    """Write the ordinals of each status as spans."""
    return {status.value: spans_of(one for one, its in statuses.items() if its is status) for status in PromptStatus}


def statuses_in(spans: Mapping[str, JSON]) -> dict[int, PromptStatus]:
    """Read statuses that `spans_by_status` has written. Raises TypeError or ValueError for another form."""
    found: dict[int, PromptStatus] = {}
    room = MOST
    for name, value in spans.items():
        for span in as_list(value):
            match span:
                case [int(first), int(end)] if first < end:
                    room -= end - first
                    if room < 0:
                        raise ValueError(f"expected at most {MOST:,} prompts, found {end - first:,} more in {span}")
                    found |= dict.fromkeys(range(first, end), PromptStatus(name))
                case _:
                    raise TypeError(f"expected [first, end], found {span!r:.100}")
    return found


def as_count(value: JSON) -> int:
    """Return a whole number. Raises TypeError for anything else."""
    if type(value) is not int:
        raise TypeError(f"expected a number of prompts, found {value!r:.100}")
    return value


def named(ordinals: Iterable[int]) -> str:
    """Name prompts in a message, the first ones of many.

    >>> named(range(20, 3000))
    '20, 21, 22, 23, 24, 25, 26, 27, 28, 29 and 2970 more'
    """
    ones = sorted(ordinals)
    rest = f" and {len(ones) - SHOWN} more" if len(ones) > SHOWN else ""
    return ", ".join(map(str, ones[:SHOWN])) + rest


def _line(batch: RecordedBatch) -> str:
    spans = {name: found for name, found in spans_by_status(batch.statuses).items() if found}
    return json.dumps({"step": batch.step, "version": batch.version, **spans})


def _batch(line: JSON) -> RecordedBatch:
    match line:
        case {"step": int(step), "version": int(version)}:
            spans = {name: value for name, value in as_object(line).items() if name not in ("step", "version")}
            return RecordedBatch(step, version, dict(sorted(statuses_in(spans).items())))
    raise TypeError("no batch")
