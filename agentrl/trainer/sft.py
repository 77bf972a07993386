"""The loop of training on files, transcripts or preferences: steps, validation, checkpoints, the policy at the end.

The order of the data follows from (data.seed, epoch), so a checkpoint's step says which batch comes next. A run with
another order of the data does not resume from it.
"""

from __future__ import annotations

import itertools
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from agentrl.checks.runner import Alarms
from agentrl.config import TuningConfig
from agentrl.data.pairs import Preference
from agentrl.data.sft import SFTSample
from agentrl.runtime.executor import Executor
from agentrl.system.json_value import JSON
from agentrl.trainer.observer import StepDone
from agentrl.trainer.run import Training, validation_due
from agentrl.trainer.setting import RunSetting
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.groups import TuningGroup

SampleT = TypeVar("SampleT", bound=SFTSample | Preference)


class SupervisedTrainer(Training[TuningConfig], Generic[SampleT]):
    """Training of one model on rows of files."""

    def __init__(
        self,
        setting: RunSetting[TuningConfig],
        executor: Executor,
        group: TuningGroup,
        to_batch: Callable[[Sequence[SampleT]], RaggedBatch],
        train: Sequence[SampleT],
        validation: Sequence[SampleT] | None,
    ) -> None:
        super().__init__(setting, executor, {"policy": group}, group.export)
        self.policy, self.to_batch, self.train, self.validation = group, to_batch, train, validation
        self.batches = batches(self.config, train)
        self.alarms = Alarms(self.config.trainer.checks, self.dir, self.display.warn)
        self.evaluated: Counter[str] = Counter()

    def take_step(self, *, validates: bool) -> StepDone:
        """Take an optimizer step."""
        began = time.perf_counter()
        batch = self.to_batch(next(self.batches))
        with self.timed("update", shown=False):
            metrics = self.policy.update(self.executor.keep(batch), step=self.step)
        reports = [one.report for one in self.policy.checked()]
        self.evaluated.update(sum((report.evaluated for report in reports), Counter()))
        findings = [finding for report in reports for finding in report.findings]
        alarms, reaction = self.alarms.raise_for(self.step, findings)
        for report in reports:
            metrics |= report.numbers
        seconds = time.perf_counter() - began
        metrics |= {"time/step": seconds, "perf/tokens_per_second": batch.num_tokens / seconds}
        named = [(name.partition("/")[2], value) for name, value in metrics.items()]
        shown = {name: value for name, value in named if name in ("loss", "lr")}
        step = StepDone(number=self.step, metrics=metrics, shown=shown, tokens=batch.num_tokens, reaction=reaction)
        step.alarm = "; ".join(alarm.text() for alarm in alarms) or None
        if (budget := self.setting.budget) is not None:
            budget.spend(step, self.display, self.config.trainer.save_freq)
        if validates or (step.stop is not None and validation_due(self.config.trainer, self.step, self.step)):
            metrics |= self.validate_first().metrics
        self.setting.tracker.log(metrics, self.step)
        return step

    def validate_first(self) -> StepDone:
        if self.validation is not None:
            self.validated = self.policy.mean_loss(self.executor.keep(self.to_batch(self.validation)))
            self.display.validation(self.step, self.validated)
            if self.step == 0:
                self.setting.tracker.log(self.validated, 0)
        return StepDone(number=self.step, metrics=self.validated)

    def restore(self, state: Mapping[str, JSON]) -> None:
        super().restore(state)
        self.alarms.forget_after(self.step)
        self.batches = batches(self.config, self.train, self.step)

    def tell_end(self) -> None:
        rows, steps = len(self.train), self.step
        taken = min(rows, steps * self.config.data.train_batch_size)
        share = f"{taken} of {rows}" if taken < rows else str(rows)
        self.display.note(f"{self.dir / 'policy'}: trained on {share} rows in {steps} steps")
        if (text := self.alarms.text()) is not None:
            self.display.warn(text)


def order_of(config: TuningConfig, samples: Sequence[SFTSample | Preference]) -> dict[str, JSON]:
    """Fingerprint of the order of the data: the values that decide which transcripts each step takes, by config key."""
    checksum = 0
    for sample in samples:
        checksum = zlib.crc32(sample.mask.tobytes(), zlib.crc32(sample.ids.tobytes(), checksum))
        checksum = zlib.crc32(sample.marks, checksum)
    return {
        "data.train_files": f"{len(samples)} transcripts with checksum {checksum:08x}",
        "data.train_batch_size": config.data.train_batch_size,
        "data.shuffle": config.data.shuffle,
        "data.seed": config.data.seed,
    }


def steps_per_epoch(config: TuningConfig, samples: Sequence[SFTSample | Preference]) -> int:
    """Count the batches of an epoch; the last may be smaller, so that no transcript is left out."""
    return -(-len(samples) // config.data.train_batch_size)


def first_epoch(config: TuningConfig, samples: Sequence[SampleT]) -> Iterator[list[SampleT]]:
    """Yield the batches of the first epoch."""
    return itertools.islice(batches(config, samples), steps_per_epoch(config, samples))


def batches(config: TuningConfig, samples: Sequence[SampleT], done: int = 0) -> Iterator[list[SampleT]]:
    """Yield the batches after the first `done`, epoch after epoch.

    Each epoch is shuffled again by (data.seed, epoch), or all are in the order of the files.
    """
    size = config.data.train_batch_size
    first, within = divmod(done, steps_per_epoch(config, samples))
    for epoch in itertools.count(first):
        order = list(range(len(samples)))
        if config.data.shuffle:
            random.Random(f"{config.data.seed}/{epoch}").shuffle(order)
        for start in range(within * size, len(order), size):
            yield [samples[index] for index in order[start : start + size]]
        within = 0
