"""Build and check everything that a training is made of from its config, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from agentrl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController
from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.recovery import check_same_form, choose_checkpoint, remark_on_schedule
from agentrl.checkpoint.remote import ObjectStore
from agentrl.config import Config
from agentrl.config.sections.trainer import RunConfig
from agentrl.data.loader import Loader, make_loader
from agentrl.errors import ConfigError
from agentrl.observe.display import Display
from agentrl.observe.tracking import Tracker
from agentrl.rollouts.async_source import AsyncSource, settings_of
from agentrl.rollouts.build import open_rollouts, send_first_weights
from agentrl.rollouts.context import (
    fit_prompts,
    load_chat,
    show_first_prompts,
)
from agentrl.rollouts.runner import RolloutRunner
from agentrl.rollouts.source import TrajectorySource
from agentrl.runtime.device import resolve_device
from agentrl.runtime.profiler import check_profile_steps
from agentrl.runtime.ray.session import ray_session
from agentrl.system.json_value import as_mapping
from agentrl.trainer.best import best_by
from agentrl.trainer.expert import open_expert
from agentrl.trainer.inputs import Inputs
from agentrl.trainer.observer import StepObserver
from agentrl.trainer.run_folder import RunFolder
from agentrl.trainer.step import Trainer
from agentrl.trainer.teachers import check_teachers
from agentrl.workers.roles import open_workers, processes


@contextmanager
def build(
    config: Config,
    inputs: Inputs,
    display: Display,
    kind: type[Trainer] = Trainer,
    observers: Sequence[StepObserver] = (),
) -> Iterator[Trainer]:
    """Check and make everything, cheapest checks first; free it at the end. `kind`: the class of the training loop.

    The observers are the user's.

    Raises UserError before the first step for every setting that cannot work.
    """
    device = resolve_device(config.trainer.device, display.warn)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    chat, context = load_chat(config), inputs.context
    context.bind(chat)
    check_teachers(config, chat)
    expert = open_expert(config.expert, config.trainer.seed, chat, display)
    display.reading = context.reading(chat)
    fit_prompts([inputs.train, *filter(None, [inputs.validation])], config, chat, context, display)
    loader = make_loader(inputs.train, config.data)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * loader.steps_per_epoch
    if total_steps >= loader.steps_per_epoch and loader.passed_over:
        display.note(f"an epoch takes whole batches: it passes over {loader.passed_over} of {len(inputs.train)} rows")
    check_profile_steps(config.trainer, total_steps)
    show_first_prompts(chat, context, display)
    store = open_store(config.trainer, display)
<<<<<<< HEAD
=======
    folder = RunFolder(config, store, display)
    run_dir = folder.path
    checkpoints = build_checkpoints(config, store, display)
    begun_from = find_resume_point(config, checkpoints, loader, total_steps, display)

    tracker = Tracker.of(config.trainer, run_dir, config, display)
>>>>>>> w-r
    with ExitStack() as stack:
        folder = stack.enter_context(closing(RunFolder(config, store, display)))
        checkpoints = build_checkpoints(config, store, display)
        begun_from = find_beginning(config, checkpoints, loader, total_steps, display)
        tracker = stack.enter_context(closing(Tracker.of(config.trainer, folder.path, config, display)))
        if config.uses_ray:
            stack.enter_context(ray_session(config.ray_init, processes(config)))
        with display.stage("load models", total=None):
            workers = open_workers(config, device, total_steps)
        stack.callback(workers.executor.close)
        reward = config.reward_model
        if any(
            one.server_urls is None and there
            for one, there in ((rollout, rollout.name == "sglang"), (reward.rollout, reward.generates))
        ):
            folder.clear()  # the servers' logs are in it
        opened = open_rollouts(config, device, chat, context, folder.path, display, lambda: workers.executor.nodes)
        rollouts = stack.enter_context(opened)
        if rollout.server_urls is not None or model.lora_adapter_path is not None:
            send_first_weights(config, rollouts, workers.policy.weights(), display)
        yield kind(
            config,
            source=stack.enter_context(open_source(config, loader, rollouts, total_steps)),
            workers=workers,
            kl_controller=build_kl_controller(config),
            checkpoints=checkpoints,
            tracker=tracker,
            folder=folder,
            chat=chat,
            validation=inputs.validation,
            total_steps=total_steps,
            begun_from=begun_from,
            display=display,
            expert=expert,
            observers=observers,
        )


@contextmanager
def open_source(
    config: Config, loader: Loader, rollouts: RolloutRunner, total_steps: int
) -> Iterator[TrajectorySource]:
    """Make the source of trajectories that the config asks for; at the end, cancel the prompts that it has begun."""
    bound = config.async_training.max_staleness
    if bound and loader.learns:
        raise ConfigError(
            f"data.sampler.name={config.data.sampler.name} learns from each step, and with "
            f"async_training.max_staleness={bound} prompts are drawn before: take 0, or another sampler"
        )
    with closing(AsyncSource(config, loader, rollouts, settings_of(config, total_steps))) as source:
        yield source


def find_resume_point(
    config: Config, checkpoints: CheckpointManager, loader: Loader, total_steps: int, display: Display
) -> Path | None:
    """Choose the checkpoint to resume from, if there is one, and check as much of it as needs no model.

    Raises UserError: no step is left to train, or the checkpoint is of other data or of a model of another form.
    """
    policy = Path(config.trainer.default_local_dir) / "policy"
    last = None if config.trainer.val_only else total_steps
    found = choose_checkpoint(config.trainer, checkpoints, last, policy, display)
    if found is None:
        return None
    path, state = found
    check_same_form(path, state, config)
    rates = {"actor_rollout_ref.actor.optim": config.actor_rollout_ref.actor.optim, "critic.optim": config.critic.optim}
    if last is not None and (remark := remark_on_schedule(state, loader.steps_per_epoch, total_steps, rates)):
        display.warn(remark)
    loader.load_state_dict(as_mapping(state["loader"]))
    return path


def build_checkpoints(config: Config, store: ObjectStore | None, display: Display) -> CheckpointManager:
    """Make the manager of the run's checkpoints, in its folder and, with a `store`, there."""
    return CheckpointManager(
        Path(config.trainer.default_local_dir) / "checkpoints",
        keep=config.trainer.max_actor_ckpt_to_keep,
        fingerprint={
            "algorithm.adv_estimator": config.algorithm.adv_estimator,
            **config.actor_rollout_ref.actor.checkpoint.fingerprint,
        },
        store=store,
        best_by=best_by(config.trainer, validates=config.data.val_files is not None),
        background=config.actor_rollout_ref.actor.checkpoint.async_save,
        warn=display.warn,
    )


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


def build_kl_controller(config: Config) -> KLController | None:
    """Make the controller of the KL coefficient of the reward; None without KL in the reward."""
    ctrl = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward:
        return None
    if ctrl.type == "fixed":
        return FixedKLController(ctrl.kl_coef)
    return AdaptiveKLController(ctrl.kl_coef, target=ctrl.target_kl, horizon=ctrl.horizon)
