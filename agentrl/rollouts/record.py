"""Records that outlive a process of asynchronous training: the ledger, the journal, and the batches taken again.

A run that resumes from a checkpoint first takes the later batches again, in their order, from the trajectories in the
journal. So the next weights are made from the same weights that sampled these trajectories. Then come prompts that had
ended and were in no batch. Unfinished prompts continue after their recorded answers; only then does sampling begin.
Where a batch cannot be made again (its records are gone, or of another config) the line ends there, and samples of
later weights are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from agentrl.errors import DataError
from agentrl.rollouts.contract import EndedGroup, Log, PromptTask
from agentrl.rollouts.journal import Journal, identity
from agentrl.rollouts.ledger import MOST, Ledger, LedgerFile, RecordedBatch, named
from agentrl.rollouts.staleness_scheduler import Batch, PromptStatus, StalenessScheduler
from agentrl.system.call_journal import Entry, Kind
from agentrl.system.json_value import JSON, as_mapping, as_object
from agentrl.trajectory.sample import Sample


class Record:
    """Ledger and journal of a run in `folder`. `key`, `fsync`: see `Journal`; `note` shows the user a line.

    `outlives_steps`: prompts do. Otherwise a checkpoint, which is made between two steps, says all, and neither is
    written: the ledger is in memory and in checkpoints alone.
    """

    def __init__(
        self,
        folder: Path,
        key: str,
        note: Callable[[str], None],
        *,
        fsync: bool = False,
        outlives_steps: bool = True,
    ) -> None:
        self.ledger = Ledger()
        self.journal = Journal(folder, key, fsync=fsync)
        self.plan: deque[RecordedBatch] = deque()
        """Batches to be taken again."""
        self.found = 0
        """Prompts whose trajectories were taken from the journal."""
        self.turns = 0
        """Turns of prompts that had not ended which were taken from it."""
        self._file = LedgerFile(folder, fsync=fsync)
        self._note = note
        self._is_written = outlives_steps
        self._is_begun = not outlives_steps
        self._begun: dict[int, str] = {}
        """Identities of prompts that were begun before, and are not checked yet."""

    def begin(self) -> None:
        """Forget a run before, unless this one resumes it (`load`); every later call does nothing."""
        if not self._is_begun:
            self._is_begun = True
            self._file.keep_to(0)
            if left := self.journal.begin():
                self._note(
                    f"{left} prompts that a run before had begun are left behind: it has saved no checkpoint "
                    "(trainer.save_freq), so nothing says which weights, data and code they belong to"
                )

    def load(self, state: Mapping[str, JSON], schedule: StalenessScheduler) -> None:
        """Resume the checkpoint with this state and schedule. Raises DataError where they do not agree."""
        if schedule.step == 0:  # no checkpoint: a worker died before the first one
            self.begin()
        self._is_begun, left = True, set(dict(schedule.left))
        found = state.get("ledger")  # none: the run took turns until now
        self.ledger = (
            Ledger(schedule.next_ordinal, schedule.next_ordinal) if found is None else Ledger.load(as_mapping(found))
        )
        self.ledger.check([*(group.ordinal for group in schedule.groups), *dict(schedule.left)], schedule.next_ordinal)
        if not self._is_written:
            return
        removed = self.journal.read()
        if far := [
            one for one in (*self.journal.ended, *self.journal.unfinished) if one >= schedule.next_ordinal + MOST
        ]:
            raise DataError(
                f"{self.journal.folder}: expected prompts of which the next one is {schedule.next_ordinal}, found "
                f"prompts {named(far)}. Remove the folder: what is in no checkpoint is then sampled again"
            )
        self._begun = {
            ordinal: its.prompt
            for ordinal, its in (self.journal.ended | self.journal.unfinished).items()
            if not self.ledger.has(ordinal) and ordinal not in left  # those are not needed again
        }
        self._begun |= {int(ordinal): str(its) for ordinal, its in as_object(state.get("prompts")).items()}
        batches = self._file.read()
        self.plan = deque(batch for batch in batches if batch.step > schedule.step)
        self._check_plan(schedule)
        if removed:
            self._note(f"{removed} prompts of the journal were sampled with another config or version: they begin anew")
        if batches:
            self._file.keep_to(batches[-1].step)
        if self.plan:
            steps = f"{self.plan[0].step} to {self.plan[-1].step}"
            self._note(f"steps {steps} were begun before: their batches are taken again from the journal")

    def _check_plan(self, schedule: StalenessScheduler) -> None:
        """Raise DataError where a planned batch names a prompt with a status, or one far from all that were drawn."""
        planned: set[int] = set()
        for batch in self.plan:
            if again := [one for one in batch.statuses if self.ledger.has(one) or one in planned]:
                raise self._file.broken(
                    f"step {batch.step}: expected prompts that no earlier batch names, found prompts {named(again)}, "
                    "which have a status already"
                )
            planned.update(batch.statuses)
        if far := [one for one in planned if one >= schedule.next_ordinal + MOST]:
            raise self._file.broken(
                f"steps from {self.plan[0].step} on: expected prompts of which the next one is {schedule.next_ordinal}"
                f", found prompts {named(far)}"
            )

    @property
    def end(self) -> int:
        """The first ordinal that nothing is recorded of."""
        planned = (ordinal + 1 for batch in self.plan for ordinal in batch.statuses)
        recorded = (ordinal + 1 for ordinal in (*self.journal.ended, *self.journal.unfinished))
        return max((*planned, *recorded), default=0)

    def prompts(self, schedule: StalenessScheduler, prompt: Callable[[int], Sample]) -> dict[str, JSON]:
        """Return the identities of the prompts that are begun, as a checkpoint holds them."""
        return {str(group.ordinal): identity(prompt(group.ordinal)) for group in schedule.groups}

    def check_prompts(self, prompt: Callable[[int], Sample], end: int) -> None:
        """Check that the rows of prompts before `end` are the rows that were begun, each once.

        Raises DataError with the prompts that are not.
        """
        known = {ordinal: self._begun.pop(ordinal) for ordinal in sorted(self._begun) if ordinal < end}
        others = [one for one, its in known.items() if identity(prompt(one)) != its]
        if others:
            rows = ", ".join(f"{prompt(one).file} row {prompt(one).row}" for one in sorted(others)[:3])
            raise DataError(
                f"the ledger disagrees with the data: prompts {named(others)} were begun with other rows than the data "
                f"have there now ({rows}, the first row is 0). Give the data that the run was made with, or start anew "
                "with trainer.resume_mode=disable"
            )

    def again(self, schedule: StalenessScheduler) -> Batch | None:
        """Take the batch of the schedule's step and version again; None: it must be sampled again.

        Raises DataError for a batch that the groups that are begun cannot make up.
        """
        if not self.plan:
            if self.journal.newest > schedule.version:  # a loss of power took the ledger's last lines
                self.drop(schedule.version)
            return None
        batch, ended = self.plan[0], self.journal.ended
        needed = schedule.trained_of(batch.statuses)
        if (batch.step, batch.version) == (schedule.step + 1, schedule.version) and ended.keys() >= set(needed):
            try:
                taken = schedule.replay(batch.statuses)
            except RuntimeError as error:
                raise self._file.broken(
                    f"step {batch.step}: expected a batch of this run, and {error!s:.300}"
                ) from error
            self.found += len(needed)
            self.plan.popleft()
            return taken
        self._note(f"step {schedule.step + 1} is sampled anew: the journal does not hold its batch as it was taken")
        self.plan.clear()
        self._file.keep_to(schedule.step)
        self.drop(schedule.version)
        return None

    def resumed(self, schedule: StalenessScheduler, ordinal: int) -> StalenessScheduler:
        """Let a prompt that is begun continue where it stood in an earlier process, if there is something of it."""
        its = self.journal.unfinished.get(ordinal)
        if self.plan or its is None or its.oldest is None:
            return schedule
        found = schedule.restore(ordinal, None, its.oldest)
        if found is schedule:  # it would be trained on too late
            self.forget(ordinal)
        else:
            self.turns += sum(entry.versions is not None for entry, _ in its.all())
        return found

    def forget(self, ordinal: int) -> None:
        """Record that a prompt restarts: its earlier entries no longer count."""
        self.journal.answered(ordinal, "", Entry("", Kind.ANEW))

    def has_turns(self, ordinal: int) -> bool:
        """Return True where a turn of an open prompt is recorded, which is trained on if the prompt is."""
        its = self.journal.unfinished.get(ordinal)
        return its is not None and its.oldest is not None

    def log(self, work: PromptTask, on_error: Callable[[Exception], None]) -> Log | None:
        """Make the log of a prompt's answers; None where they are not written. `on_error`: called on a full disk."""
        if not self._is_written:
            return None
        prompt = identity(work.sample)

        def add(entry: Entry) -> None:
            try:
                self.journal.answered(work.ordinal, prompt, entry)
            except Exception as error:  # a full disk ends the run, and not the trajectory that meets it first
                on_error(error)
                raise

        return Log(lambda: self.journal.entries(work.ordinal), add)

    def ended(self, group: EndedGroup) -> None:
        """Take down that a prompt's trajectories have ended. Raises TrainingError on a full disk."""
        if group.record is not None:
            self.journal.add(group.record)

    def taken(self, step: int, version: int, statuses: Mapping[int, PromptStatus], *, again: bool = False) -> None:
        """Take down a batch, before the policy is updated with it. Raises TrainingError on a full disk."""
        if self._is_written and not again:
            self._file.add(RecordedBatch(step, version, dict(statuses)))
        self.ledger.settle(statuses)

    def refuse(self, step: int, ordinals: Iterable[int]) -> None:
        """Take back the batch of `step`, for whose failures the run ends: these prompts restart, as the fault may pass.

        Raises TrainingError on a full disk.
        """
        if self._is_written:
            self._file.keep_to(step - 1)
            for one in ordinals:
                self.forget(one)

    def drop(self, newest: int | None = None) -> None:
        """Drop records that no checkpoint needs, now that one is being saved; `newest`: as in `Journal.keep`."""
        if not self._is_written:
            return
        unseen: dict[int, str] = {}
        if newest is not None:  # a sampler that learns may now draw other rows for them
            unseen, self._begun = self._begun, {}
        self.journal.keep(lambda ordinal: not self.ledger.has(ordinal) and ordinal not in unseen, newest=newest)

    def text(self) -> str | None:
        """Report the number of prompts by status, and the file that lists them; None where it is not written."""
        if not self._is_written:
            return None
        found = f"; {self.found} of them came from the journal" if self.found else ""
        found += f"; {self.turns} turns of others, too" if self.turns else ""
        return f"{self.ledger.text()}{found} ({self._file.path.name} names them by step)"
