"""Parts of a run that are the same for every training: its folder, checkpoints, loggers and first state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from agentrl.chat import Chat
from agentrl.checkpoint.best import BestBy
from agentrl.checkpoint.export import exported_step
from agentrl.checkpoint.manager import CheckpointManager, reading_state, step_in
from agentrl.checkpoint.manifest import CHECKPOINTS
from agentrl.checkpoint.recovery import check_same_form, choose_checkpoint, remark_on_schedule, step_to_export
from agentrl.checkpoint.remote import ObjectStore
from agentrl.config import Config, TuningConfig
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError, NothingLeft
from agentrl.observe.display import Display
from agentrl.observe.tracking import Tracker
from agentrl.runtime.profiler import check_profile_steps
from agentrl.system.json_value import JSON
from agentrl.trainer.budget import Budget
from agentrl.trainer.run_folder import RunFolder

ConfigT = TypeVar("ConfigT", bound=Config | TuningConfig)


@dataclass(frozen=True, slots=True)
class RunSetting(Generic[ConfigT]):
    """Parts of a run next to the models and the data."""

    config: ConfigT
    chat: Chat
    display: Display
    folder: RunFolder
    checkpoints: CheckpointManager
    tracker: Tracker
    total_steps: int
    begun_from: Path | None
    """The checkpoint that the run resumes from; None: it begins at step 0."""
    budget: Budget | None = None


@contextmanager
def open_setting(
    config: ConfigT,
    chat: Chat,
    display: Display,
    steps_per_epoch: int,
    fingerprint: Mapping[str, JSON],
    least_tokens: int,
    resume_data: Callable[[Mapping[str, JSON]], None] | None = None,
) -> Iterator[RunSetting[ConfigT]]:
    """Make the parts of a run, and check what needs no model; close its loggers and its folder at the end.

    Args:
        fingerprint: config keys, with their values, that a checkpoint must share to be loaded.
        least_tokens: tokens that the first step takes at least.
        resume_data: takes the state of the checkpoint that is resumed from; raises DataError where it is of other data.

    Raises UserError: no step is left to train, the checkpoint is of other data or of a model of another form, or a
    folder cannot be used.
    """
    trainer, only_validates, waits = config.trainer, False, dict[str, int]()
    if isinstance(config, Config):
        actor, only_validates = config.actor_rollout_ref.actor, config.trainer.val_only
        keep, keys = config.trainer.max_actor_ckpt_to_keep, actor.checkpoint
        rates = {"actor_rollout_ref.actor.optim": actor.optim, "critic.optim": config.critic.optim}
        waits = {"actor_rollout_ref.actor.optim": config.trainer.critic_warmup}
    else:
        keep, keys, rates = config.trainer.max_ckpt_to_keep, config.trainer.checkpoint, {"optim": config.optim}
    total = trainer.total_training_steps or trainer.total_epochs * steps_per_epoch
    check_profile_steps(trainer, total)
    if not only_validates and (waited := max(waits.values(), default=0)) >= total:
        display.warn(
            f"trainer.critic_warmup={waited}: in all {total} steps of this run the critic alone learns, and policy/ "
            "will be the policy that it begins with. Lower it, or raise trainer.total_training_steps"
        )
    if (budget := None if only_validates else Budget.from_config(trainer)) is not None:
        budget.check(least_tokens)
    store = open_store(trainer, display)
    local, last = Path(trainer.default_local_dir), None if only_validates else total

    def check(path: Path, state: Mapping[str, JSON]) -> None:
        if resume_data is not None:
            resume_data(state)
        check_same_form(path, state, config)

    with ExitStack() as stack:
        folder = stack.enter_context(closing(RunFolder(config, store, display)))
        checkpoints = CheckpointManager(
            local / CHECKPOINTS,
            keep=keep,
            fingerprint={**fingerprint, **keys.fingerprint},
            store=store,
            best_by=best_by(trainer, validates=config.data.val_files is not None),
            background=keys.async_save,
            warn=display.warn,
            owned=folder.is_owned(),
        )
        policy = local / "policy"
        found = choose_checkpoint(trainer, checkpoints, last, policy, display, check)
        if found is not None:
            if budget is not None:
                with reading_state(found[0]):
                    budget.restore(found[1].get("budget"))
            over = checkpoints.best.over or (None if budget is None else budget.over)
            if last and over and exported_step(policy) == step_to_export(trainer, checkpoints, step_in(found[1])):
                raise NothingLeft(
                    f"{found[0]} is of the step after which the run ended: {over}. There is nothing left to train. The "
                    f"policy is in {policy}. For another run name another trainer.experiment_name"
                )
            if last and (remark := remark_on_schedule(found[1], steps_per_epoch, last, rates, waits)):
                display.warn(remark)
        tracker = stack.enter_context(closing(Tracker.from_config(trainer, folder.path, config, display)))
        yield RunSetting(config, chat, display, folder, checkpoints, tracker, total, found and found[0], budget)


def open_store(config: RunConfig, display: Display) -> ObjectStore | None:
    """Open the object store that checkpoints are uploaded to; None without trainer.default_remote_dir.

    Raises ConfigError when nothing can be written there, or when a run that starts from step 0 would mix with an older
    one.
    """
    url = config.default_remote_dir
    if url is None:
        return None
    store = ObjectStore(url, warn=display.warn)
    store.check()
    if config.resume_mode == "disable" and (steps := store.steps()):
        raise ConfigError(
            f"trainer.resume_mode=disable starts anew, and trainer.default_remote_dir={url} holds checkpoints of steps "
            f"{steps}: name another folder, or remove them"
        )
    return store


def best_by(config: RunConfig, *, validates: bool) -> BestBy | None:
    """Read trainer.metric_for_best_model; None without. Raises ConfigError for a metric that no step has."""
    metric = config.metric_for_best_model
    if metric is None:
        return None
    if metric.startswith("val/") and not validates:
        raise ConfigError(f"trainer.metric_for_best_model={metric} is never measured: set data.val_files")
    greater = config.greater_is_better
    greater = not metric.endswith("loss") if greater is None else greater
    return BestBy(metric, greater, config.early_stopping_patience)
