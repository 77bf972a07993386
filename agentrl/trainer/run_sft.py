"""A whole run of training on files, transcripts or preferences: read, check, build, train.

The data's order follows from the config alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Generic, TypeVar

from agentrl.chat import Chat
from agentrl.config import PreferencesConfig, SFTConfig, TuningConfig
from agentrl.config.dated import dated
from agentrl.config.registries import PAIR_LOSSES
from agentrl.config.sections.sft import SFTDataConfig
from agentrl.data.feedback import FEEDBACK, effective_number
from agentrl.data.judged import add_mismatched, balance, check_judged, load_judged
from agentrl.data.pairs import Preference, check_pairs, load_pairs, load_scored_pairs
from agentrl.data.sft import SFTSample, Transcripts, check_transcripts, load_transcripts
from agentrl.errors import DataError
from agentrl.model.folder import check_folder
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.display import Display, note_of_files, warn_of_counts
from agentrl.system.garbage import frozen
from agentrl.system.metrics import Numbers

if TYPE_CHECKING:
    from agentrl.runtime.executor import Executor
    from agentrl.trajectory.batch import RaggedBatch
    from agentrl.workers.groups import TuningGroup

MOST_GOOD = 4 / 3
"""Largest weight of all good conversations, as a part of all bad ones', that is balanced."""
SampleT = TypeVar("SampleT", bound=SFTSample | Preference)


class Job(ABC, Generic[SampleT]):
    """The difference between supervised training and training on preferences."""

    _config: TuningConfig

    def choose(self, device: str, display: Display) -> TuningConfig:
        """Choose a value for each key that is left to the plan, and return the config that holds from then on."""
        from agentrl.plan.choices import choose
        from agentrl.runtime.room import room

        self._config = choose(dated(self._config), device, room(device), display.note)
        return self._config

    @abstractmethod
    def check(self, files: str | list[str], progress: Callable[[int], object]) -> int:
        """Check the rows without a tokenizer, and count them. Raises DataError."""

    @abstractmethod
    def read(self, files: str | list[str], chat: Chat, display: Display, rows: int) -> list[SampleT]:
        """Tokenise so many rows, and report the rows left out. Raises DataError."""

    def judge(self, train: Sequence[SampleT], display: Display) -> None:
        """Report how far the rows to train on are balanced. Raises DataError where they teach nothing."""

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
    """Train on preferences; see `train_on_files`."""
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
    from agentrl.runtime.device import note_precision, note_ranks, resolve_device
    from agentrl.runtime.ray.session import ray_session
    from agentrl.trainer.run import TrainingRun
    from agentrl.trainer.setting import open_setting
    from agentrl.trainer.sft import SupervisedTrainer, batches, order_of, steps_per_epoch
    from agentrl.workers.before_loading import check_tuned
    from agentrl.workers.roles import processes

    device = resolve_device(config.trainer.device, display.warn)
    note_ranks(device, config.trainer, display.warn)
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
    job.judge(train, display)
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


def tell_feedback(
    found: Transcripts[SFTSample], config: SFTDataConfig, files: str | list[str], display: Display
) -> None:
    """Report the use of the rows' feedback, or that it is not used while some of it is bad."""
    heard, column = found.heard, config.feedback_key or FEEDBACK
    if heard is None:
        return
    if not heard.given:
        display.note(f"{files}: the column {column} holds no feedback that is known, and is not read")
        return
    counts = f"feedback of {files} (column {column}): {heard.told()}"
    if config.feedback is not None:
        weights = [sample.weight for sample in found.samples if sample.weight is not None]
        many = f"; the weights are worth {effective_number(weights):.0f} equal ones" if weights else ""
        display.note(f"{counts}; data.feedback={config.feedback} leaves {found.left_out} rows out{many}")
    elif heard.below:
        display.warn(
            f"{counts}. All of them are learnt alike, {heard.below} that are not above {heard.threshold:g} among them. "
            "Leave these out with data.feedback=filter, weigh all with data.feedback=weight or exp_weight, learn from "
            "both sides with python -m agentrl.preferences loss=kto, or keep all with data.feedback=ignore"
        )
    else:
        display.note(f"{counts}. It is not used (data.feedback)")


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
        tell_feedback(transcripts, data, files, display)
        return transcripts.samples

    def open(self, device: str, total: int, display: Display) -> tuple[Executor, TuningGroup]:
        from agentrl.workers.roles import open_sft_workers

        return open_sft_workers(self._config, device, total, display)

    def to_batch(self, samples: Sequence[SFTSample]) -> RaggedBatch:
        from agentrl.workers.sft import to_batch

        return to_batch(samples)


class PreferencesJob(Job[Preference]):
    """Training on pairs, or on conversations that are good or bad by themselves."""

    _config: PreferencesConfig

    def __init__(self, config: PreferencesConfig) -> None:
        self._config = config
        self._rows = config.rows

    def check(self, files: str | list[str], progress: Callable[[int], object]) -> int:
        return (check_pairs if self._rows == "pairs" else check_judged)(files, self._config.data, progress)

    def read(self, files: str | list[str], chat: Chat, display: Display, rows: int) -> list[Preference]:
        data, model = self._config.data, self._config.model
        what = "pairs" if self._rows == "pairs" else "rows"
        with display.stage(f"read {what}", total=rows) as stage:
            if self._rows != "pairs":
                found = load_judged(files, data, chat, stage.advance)
            elif self._config.trains == "policy":
                found = load_pairs(files, data, chat, stage.advance)
            else:
                from agentrl.reward.model_input import ModelInput

                reading = ModelInput(
                    model.path,
                    None,
                    chat_template=model.chat_template,
                    trust_remote_code=model.trust_remote_code,
                    date=model.chat_template_date,
                )
                found = load_scored_pairs(files, data, reading.ids, stage.advance)
        each = 2 if self._rows == "pairs" else 1
        tell(found, f"of the {each * (len(found.samples) + found.too_long)} conversations of {files}", display)
        if found.too_long:
            display.warn(f"{found.too_long} {what} are longer than data.max_length={data.max_length} and left out")
        if found.left_out:
            display.warn(f"{found.left_out} rows of {files} say neither good nor bad, and are left out")
        if self._rows == "mismatched":
            from agentrl.trainer.sft import first_epoch

            add_mismatched(first_epoch(self._config, found.samples), data.max_length)
        return found.samples

    def judge(self, train: Sequence[Preference], display: Display) -> None:
        """Report the numbers of good and bad rows, and the factors that balance them (arXiv:2402.01306, eq. 8)."""
        if self._rows == "pairs":
            return
        config = self._config
        good, bad = balance(train)
        if not good or not bad:
            raise DataError(
                f"{config.data.train_files}: expected good and bad conversations, found {good} good and {bad} bad. "
                f"{config.loss} learns what sets them apart: move data.feedback_threshold="
                f"{config.data.feedback_threshold:g}, or learn the good ones with python -m agentrl.sft"
            )
        display.note(f"{good} good and {bad} bad conversations to learn from")
        if not PAIR_LOSSES.is_built_in(config.loss):
            return
        desirable, undesirable = (
            float(config.loss_options.get(name, 1)) for name in ("desirable_weight", "undesirable_weight")
        )
        if good * desirable < bad * undesirable or good * desirable > MOST_GOOD * bad * undesirable:
            of_bad, of_good = good * desirable / bad, bad * undesirable / good
            display.warn(
                f"good rows weigh {good * desirable:g} and bad ones {bad * undesirable:g} in all; 1 to 1 up to 4 to 3 "
                "is balanced (arXiv:2402.01306, eq. 8). Set loss_options.undesirable_weight to "
                f"{of_bad / MOST_GOOD:.3g} up to {of_bad:.3g}, or loss_options.desirable_weight to {of_good:.3g} up "
                f"to {of_good * MOST_GOOD:.3g}"
            )

    def open(self, device: str, total: int, display: Display) -> tuple[Executor, TuningGroup]:
        from agentrl.workers.roles import open_preference_workers

        return open_preference_workers(self._config, device, total, display)

    def to_batch(self, samples: Sequence[Preference]) -> RaggedBatch:
        from agentrl.workers.preferences import to_batch

        return to_batch(samples)

    def prepare(self, executor: Executor, group: TuningGroup, samples: Sequence[Preference], display: Display) -> None:
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
                parts = batch.ref_logprobs.split([len(row.ids) for row in chunk])
                for row, part in zip(chunk, parts, strict=True):
                    row.reference = part.numpy().copy()
                stage.advance(len(chunk))
