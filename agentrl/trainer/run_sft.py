"""A whole run of training on files, transcripts or pairs: read, check, build, train. The data's order follows from the
config alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

from agentrl.chat import Chat
from agentrl.config import PreferencesConfig, SFTConfig, TuningConfig
from agentrl.data.pairs import Pair, check_pairs, load_pairs, load_scored_pairs
from agentrl.data.sft import SFTSample, Transcripts, check_transcripts, load_transcripts
from agentrl.model.folder import check_folder
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.display import Display, note_of_files, warn_of_counts
from agentrl.system.garbage import frozen
from agentrl.system.metrics import Numbers

if TYPE_CHECKING:
    from agentrl.runtime.executor import Executor
    from agentrl.trajectory.batch import RaggedBatch
    from agentrl.workers.groups import TuningGroup

SampleT = TypeVar("SampleT", bound=SFTSample | Pair)


class Job(ABC, Generic[SampleT]):
    """The difference between supervised training and training on preferences."""

    _config: TuningConfig

    def choose(self, device: str, display: Display) -> TuningConfig:
        """Choose a value for each key that is left to the plan, and return the config that holds from then on."""
        from agentrl.plan.choices import choose
        from agentrl.runtime.room import room

        self._config = choose(self._config, device, room(device), display.note)
        return self._config

    @abstractmethod
    def check(self, files: str | list[str], progress: Callable[[int], object]) -> int:
        """Check the rows without a tokenizer, and count them. Raises DataError."""

    @abstractmethod
    def read(self, files: str | list[str], chat: Chat, display: Display, rows: int) -> list[SampleT]:
        """Tokenise so many rows, and report the rows left out. Raises DataError."""

    @abstractmethod
    def open(self, device: str, total: int, display: Display) -> tuple[Executor, TuningGroup]:
        """Make the workers."""

    @abstractmethod
    def to_batch(self, samples: Sequence[SampleT]) -> RaggedBatch:
        """Make a batch of rows."""

    def prepare(self, executor: Executor, group: TuningGroup, samples: Sequence[SampleT], display: Display) -> None:
        """Compute the log-probs of the rows by the model that the run starts from, before it learns."""


def train_sft(config: SFTConfig, display: Display) -> Numbers:
    """Train on transcripts; see `train_on_files`."""
    return train_on_files(config, SupervisedJob(config), display)


def train_preferences(config: PreferencesConfig, display: Display) -> Numbers:
    """Train on pairs; see `train_on_files`."""
    return train_on_files(config, PreferencesJob(config), display)


def train_on_files(config: TuningConfig, job: Job[SampleT], display: Display) -> Numbers:
    """Read, train, validate, and write `<trainer.default_local_dir>/policy` in Hugging Face format.

    An older run in that directory is resumed if it left checkpoints, and replaced if not. Returns the metrics of the
    last step, and val/loss with validation data. Raises UserError.
    """
    check_folder("model.path", config.model.path)
    # The rows are read twice, so that a mistake in the last row is found before torch is imported and before all
    # earlier rows are tokenised.
    train_rows, val_rows = (check(files, job, display) for files in (config.data.train_files, config.data.val_files))
    from agentrl.model.download import download_weights
    from agentrl.runtime.device import note_precision, resolve_device
    from agentrl.runtime.ray.session import ray_session
    from agentrl.trainer.run import TrainingRun
    from agentrl.trainer.setting import open_setting
    from agentrl.trainer.sft import SupervisedTrainer, batches, order_of, steps_per_epoch
    from agentrl.workers.before_loading import check_tuned
    from agentrl.workers.roles import processes

    device = resolve_device(config.trainer.device, display.warn)
    note_precision(device, config.model, "model", display.note)
    config = job.choose(device, display)
    chat = Chat.of_model(config.model, config.format)
    check_tuned(config)
    train, validation = _read_rows(config, job, chat, display, train_rows, val_rows)
    with ExitStack() as stack:
        stack.enter_context(bars_as_stages(display))
        least_tokens = sum(len(sample.ids) for sample in next(batches(config, train)))
        opened = open_setting(
            config, chat, display, steps_per_epoch(config, train), order_of(config, train), least_tokens
        )
        setting = stack.enter_context(opened)
        if config.uses_ray:
            stack.enter_context(ray_session(config.ray_init, processes(config)))
        if config.trainer.nnodes == 1:  # else each machine downloads its own
            download_weights(config.model.path, display)
        with display.stage("load model"):
            executor, group = job.open(device, setting.total_steps, display)
        stack.callback(executor.close)
        job.prepare(executor, group, [*train, *(validation or [])], display)
        training = SupervisedTrainer(setting, executor, group, job.to_batch, train, validation)
        stack.enter_context(frozen())
        last = deque(TrainingRun(training), maxlen=1)
    return last[0] if last else {}


def _read_rows(
    config: TuningConfig, job: Job[SampleT], chat: Chat, display: Display, train_rows: int, val_rows: int
) -> tuple[list[SampleT], list[SampleT] | None]:
    """Read the rows to train on and, where there are files, to validate on; warn of rows that the template changes."""
    train, validation = job.read(config.data.train_files, chat, display, train_rows), None
    if config.data.val_files is not None:
        validation = job.read(config.data.val_files, chat, display, val_rows)
    warn_of_counts(display, chat.remarks, "conversations")
    return train, validation


def tell(found: Transcripts[SampleT], of: str, display: Display) -> None:
    """Report what of the rows is not read, not used or not learnt. of: the transcripts, after their number."""
    note_of_files(display, found.notes)
    if found.bad.count:
        display.warn(found.bad.told())
    warn_of_counts(display, found.unlearnt, of)


def check(files: str | list[str] | None, job: Job[SampleT], display: Display) -> int:
    """Check the rows of `files`; return their number, 0 without files."""
    if files is None:
        return 0
    with display.stage("check rows") as stage:
        return job.check(files, stage.advance)


class SupervisedJob(Job[SFTSample]):
    """Training on transcripts."""

    _config: SFTConfig

    def __init__(self, config: SFTConfig) -> None:
        self._config = config

    def check(self, files: str | list[str], progress: Callable[[int], object]) -> int:
        return check_transcripts(files, self._config.data, progress)

    def read(self, files: str | list[str], chat: Chat, display: Display, rows: int) -> list[SFTSample]:
        data = self._config.data
        with display.stage("read transcripts", total=rows) as stage:
            transcripts = load_transcripts(files, data, chat, stage.advance)
        if transcripts.too_long:
            display.warn(
                f"{transcripts.too_long} transcripts are longer than data.max_length={data.max_length} and left out"
            )
        tell(transcripts, f"of {len(transcripts.samples)} transcripts of {files}", display)
        return transcripts.samples

    def open(self, device: str, total: int, display: Display) -> tuple[Executor, TuningGroup]:
        from agentrl.workers.roles import open_sft_workers

        return open_sft_workers(self._config, device, total, display)

    def to_batch(self, samples: Sequence[SFTSample]) -> RaggedBatch:
        from agentrl.workers.sft import to_batch

        return to_batch(samples)


class PreferencesJob(Job[Pair]):
    """Training on pairs."""

    _config: PreferencesConfig

    def __init__(self, config: PreferencesConfig) -> None:
        self._config = config

    def check(self, files: str | list[str], progress: Callable[[int], object]) -> int:
        return check_pairs(files, self._config.data, progress)

    def read(self, files: str | list[str], chat: Chat, display: Display, rows: int) -> list[Pair]:
        data, model = self._config.data, self._config.model
        with display.stage("read pairs", total=rows) as stage:
            if self._config.trains == "policy":
                found = load_pairs(files, data, chat, stage.advance)
            else:
                from agentrl.reward.model_input import ModelInput

                reading = ModelInput(
                    model.path, None, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code
                )
                found = load_scored_pairs(files, data, reading.ids, stage.advance)
        tell(found, f"of the {2 * (len(found.samples) + found.too_long)} conversations of {files}", display)
        if found.too_long:
            display.warn(f"{found.too_long} pairs are longer than data.max_length={data.max_length} and left out")
        return found.samples

    def open(self, device: str, total: int, display: Display) -> tuple[Executor, TuningGroup]:
        from agentrl.workers.roles import open_preference_workers

        return open_preference_workers(self._config, device, total, display)

    def to_batch(self, samples: Sequence[Pair]) -> RaggedBatch:
        from agentrl.workers.preferences import to_batch

        return to_batch(samples)

    def prepare(self, executor: Executor, group: TuningGroup, samples: Sequence[Pair], display: Display) -> None:
        """Compute the log-probs under the reference: of the model as it is loaded, before any checkpoint is."""
        if self._config.trains != "policy":
            return
        from agentrl.workers.groups import PreferenceGroup

        assert isinstance(group, PreferenceGroup)
        with display.stage("reference", total=len(samples)) as stage:
            size = self._config.data.train_batch_size
            for chunk in (samples[start : start + size] for start in range(0, len(samples), size)):
                batch = group.scores(executor.keep(self.to_batch(chunk))).load()
                assert batch.ref_logprobs is not None
                ends = batch.offsets[2::2].tolist()
                for pair, begin, end in zip(chunk, [0, *ends], ends, strict=False):
                    pair.reference = batch.ref_logprobs[begin:end].numpy().copy()
                stage.advance(len(chunk))
