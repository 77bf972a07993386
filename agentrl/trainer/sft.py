"""The loop of training on files, transcripts or pairs: steps, validation, checkpoints, the policy at the end.

The order of the data follows from (data.seed, epoch), so a checkpoint's step says which batch comes next. A run with
another order of the data does not resume from it.
"""

from __future__ import annotations

import itertools
import random
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from agentrl.chat import Chat
from agentrl.checkpoint.export import export_policy
from agentrl.checkpoint.manager import CheckpointManager, step_in
from agentrl.checkpoint.recovery import Continuation, check_same_form, choose_checkpoint, remark_on_schedule
from agentrl.checkpoint.remote import ObjectStore
from agentrl.config import TuningConfig, config_to_dict
from agentrl.errors import WorkerDied
from agentrl.observe.display import Display
from agentrl.observe.tracking import Tracker
from agentrl.runtime.executor import Executor
from agentrl.runtime.profiler import profile_of
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Numbers
from agentrl.trainer.best import best_by
from agentrl.trainer.run_folder import RunFolder
from agentrl.trainer.step import due, validation_due
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.groups import TuningGroup

CHECKPOINTS, POLICY = "checkpoints", "policy"


class Sample(Protocol):
    """A row that is learnt."""

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """Token ids, [T]."""
        ...

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Marks the tokens that are learnt, [T]."""
        ...


SampleT = TypeVar("SampleT", bound=Sample)


class SupervisedTrainer(Generic[SampleT]):
    """Trains the model of `group` for `total` steps, from the newest checkpoint or from the start."""

    def __init__(
        self,
        config: TuningConfig,
        executor: Executor,
        group: TuningGroup,
        to_batch: Callable[[Sequence[SampleT]], RaggedBatch],
        chat: Chat,
        train: Sequence[SampleT],
        validation: Sequence[SampleT] | None,
        total: int,
        folder: RunFolder,
        tracker: Tracker,
        checkpoints: CheckpointManager,
        begun_from: Path | None,
        display: Display,
    ) -> None:
        self.config, self.chat, self.display, self.tracker = config, chat, display, tracker
        self.train, self.validation, self.total = train, validation, total
        self.batches = batches(config, train)
        self.folder, self.dir = folder, folder.path
        self.executor, self.policy, self.to_batch = executor, group, to_batch
        self.checkpoints = checkpoints
        self.step = 0
        self.continuation = Continuation(config.trainer, self.executor.restart, checkpoints, begun_from)

    def fit(self) -> Numbers:
        """Train, write the policy, and return the last step's metrics; empty where no step was left.

        An interruption is raised with a note of the checkpoint that the run would resume from.
        """
        try:
            return self._fit()
        except KeyboardInterrupt as interrupt:
            interrupt.add_note(self.continuation.resume_hint())
            raise

    def _fit(self) -> Numbers:
        self.resume()
        metrics: Numbers = {}
        with self.display.stage("train", total=self.total, done=self.step) as stage:
            while True:
                done = self.step
                try:
                    if done == self.total:
                        self.checkpoints.settle()
                        self.export()
                        return metrics
                    metrics = self.train_step()
                    last = {name.partition("/")[2]: value for name, value in metrics.items() if "val/" not in name}
                    stage.advance(1, **{name: last[name] for name in ("loss", "lr") if name in last})
                except WorkerDied as death:
                    self.go_back(death)
                    stage.advance(self.step - done)
                except Exception:
                    with suppress(Exception):  # the error that ended the run is the one to tell
                        self.checkpoints.settle()
                    raise

    def train_step(self) -> Numbers:
        """Take the next step: an update, and validation and a checkpoint where they are due."""
        began = time.perf_counter()
        batch = self.to_batch(next(self.batches))
        self.step += 1
        trainer = self.config.trainer
        self.executor.profile_with(profile_of(trainer, self.dir, self.step, "update"))
        try:
            metrics = self.policy.update(self.executor.keep(batch), step=self.step)
        finally:
            self.executor.profile_with(None)
        seconds = time.perf_counter() - began
        metrics |= {"time/step": seconds, "perf/tokens_per_second": batch.num_tokens / seconds}
        if self.validation is not None and validation_due(trainer, self.step, self.total):
            metrics |= self.policy.mean_loss(self.executor.keep(self.to_batch(self.validation)))
            self.display.validation(self.step, metrics)
        self.tracker.log(metrics, self.step)
        self.checkpoints.settle(wait=False)
        is_best = self.checkpoints.is_best(self.step, metrics)
        if is_best or (trainer.save_freq > 0 and due(trainer.save_freq, self.step, self.total)):
            writers = {POLICY: partial(self.policy.save, background=self.checkpoints.background)}
            self.checkpoints.save(self.step, writers, {"step": self.step, "config": config_to_dict(self.config)})
        return metrics

    def resume(self) -> None:
        """Load the checkpoint that the run resumes from, if there is one, then begin to write into its folder."""
        path = self.continuation.begun_from
        self.load(path)
        self.folder.begin(self.tracker, self.checkpoints, self.step)
        if path is not None:
            self.display.note(f"resumed from {path} (step {self.step})")

    def load(self, path: Path | None) -> None:
        """Restore a checkpoint; None: the start, where new workers are."""
        self.step = 0
        if path is not None:
            self.step = step_in(self.checkpoints.load(path))
            self.policy.load(path / POLICY)
        self.batches = batches(self.config, self.train, self.step)

    def go_back(self, death: WorkerDied) -> None:
        """After a worker died, make new workers and load the last state that this process saved, or began with.

        Raises WorkerDied when the run has resumed often enough.
        """
        death = self.continuation.after(death, self.load)
        self.tracker.truncate_after(self.step)
        self.display.warn(f"{death}; new workers go on after step {self.step}")

    def export(self) -> None:
        """Export the policy in Hugging Face format, whole or not at all. Raises TrainingError when the disk is full."""
        export, store = self.policy.export, self.checkpoints.store
        export_policy(export, self.chat, self.step, self.dir / POLICY, store, self.display)


def build_checkpoints(
    config: TuningConfig, train: Sequence[Sample], store: ObjectStore | None, display: Display, *, validates: bool
) -> CheckpointManager:
    """Make the manager of the run's checkpoints, in its folder and, with a `store`, there."""
    return CheckpointManager(
        Path(config.trainer.default_local_dir) / CHECKPOINTS,
        keep=config.trainer.max_ckpt_to_keep,
        fingerprint={**order_of(config, train), **config.trainer.checkpoint.fingerprint},
        background=config.trainer.checkpoint.async_save,
        store=store,
        best_by=best_by(config.trainer, validates=validates),
        warn=display.warn,
    )


def find_resume_point(
    config: TuningConfig, checkpoints: CheckpointManager, total: int, per_epoch: int, display: Display
) -> Path | None:
    """Choose the checkpoint to resume from, if there is one, and check as much of it as needs no model.

    Raises UserError: no step is left to train, or the checkpoint is of other data or of a model of another form.
    """
    policy = Path(config.trainer.default_local_dir) / POLICY
    found = choose_checkpoint(config.trainer, checkpoints, total, policy, display)
    if found is None:
        return None
    path, state = found
    check_same_form(path, state, config)
    if remark := remark_on_schedule(state, per_epoch, total, {"optim": config.optim}):
        display.warn(remark)
    return path


def order_of(config: TuningConfig, samples: Sequence[Sample]) -> dict[str, JSON]:
    """Fingerprint of the order of the data: the values that decide which transcripts each step takes, by config key."""
    checksum = 0
    for sample in samples:
        checksum = zlib.crc32(sample.mask.tobytes(), zlib.crc32(sample.ids.tobytes(), checksum))
    return {
        "data.train_files": f"{len(samples)} transcripts with checksum {checksum:08x}",
        "data.train_batch_size": config.data.train_batch_size,
        "data.shuffle": config.data.shuffle,
        "data.seed": config.data.seed,
    }


def steps_per_epoch(config: TuningConfig, samples: Sequence[Sample]) -> int:
    """Count the batches of an epoch; the last may be smaller, so that no transcript is left out."""
    return -(-len(samples) // config.data.train_batch_size)


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
