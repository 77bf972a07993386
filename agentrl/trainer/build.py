"""Build and check everything that a training is made of from its config, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager

from agentrl.config import Config
from agentrl.data.loader import Loader, make_loader
from agentrl.errors import ConfigError
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.display import Display
from agentrl.plan.choices import choose
from agentrl.plan.memory import check_room
from agentrl.rollouts.async_source import AsyncSource, settings_of
from agentrl.rollouts.build import open_rollouts, send_first_weights
from agentrl.rollouts.context import (
    fit_prompts,
    load_chat,
    show_first_prompts,
)
from agentrl.rollouts.contract import RolloutRunner
from agentrl.runtime.device import note_precision, note_ranks, resolve_device
from agentrl.runtime.ray.session import ray_session
from agentrl.runtime.room import room
from agentrl.system.garbage import frozen
from agentrl.system.json_value import JSON, as_mapping
from agentrl.trainer.expert import open_expert
from agentrl.trainer.inputs import Inputs
from agentrl.trainer.observer import StepObserver
from agentrl.trainer.run import TrainingRun
from agentrl.trainer.setting import open_setting
from agentrl.trainer.step import Trainer
from agentrl.trainer.teachers import check_teachers
from agentrl.workers.before_loading import check_models, download_models
from agentrl.workers.roles import open_workers, processes


@contextmanager
def build(
    config: Config,
    inputs: Inputs,
    display: Display,
    kind: type[Trainer] = Trainer,
    observers: Sequence[StepObserver] = (),
) -> Iterator[TrainingRun[Config]]:
    """Check and make everything, cheapest checks first; free it at the end. `kind`: the class of the training loop.

    The observers are the user's. Raises UserError before the first step for every setting that cannot work.
    """
    device = resolve_device(config.trainer.device, display.warn)
    note_ranks(device, config.trainer, display.warn)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    note_precision(device, model, "actor_rollout_ref.model", display.note)
    config = choose(config, device, room(device), display.note)
    check_room(config, device, room(device), display.warn)
    chat, context = load_chat(config), inputs.context
    context.bind(chat)
    check_teachers(config, chat)
    check_models(config, device)
    expert = open_expert(config.expert, config.trainer.seed, chat, display, config.data.on_bad_row)
    display.reading = context.reading(chat)
    fit_prompts([inputs.train, *filter(None, [inputs.validation])], config, chat, context, display)
    loader = make_loader(inputs.train, config.data)
    show_first_prompts(chat, context, display)
    fingerprint: dict[str, JSON] = {"algorithm.adv_estimator": config.algorithm.adv_estimator}
    with ExitStack() as stack:
        stack.enter_context(bars_as_stages(display))
        least_tokens = config.data.train_batch_size * rollout.n * inputs.train.shortest

        def resume_data(state: Mapping[str, JSON]) -> None:
            loader.load_state_dict(as_mapping(state["loader"]))

        opened = open_setting(config, chat, display, loader.steps_per_epoch, fingerprint, least_tokens, resume_data)
        setting = stack.enter_context(opened)
        total_steps = setting.total_steps
        if total_steps >= loader.steps_per_epoch and (left := loader.passed_over):
            display.note(f"an epoch takes whole batches: it passes over {left} of {len(inputs.train)} rows")
        if config.uses_ray:
            stack.enter_context(ray_session(config.ray_init, processes(config)))
        download_models(config, display)
        with display.stage("load models", total=None):
            workers = open_workers(config, device, total_steps, display)
        stack.callback(workers.executor.close)
        reward = config.reward_model
        if any(
            one.server_urls is None and there
            for one, there in ((rollout, rollout.serves), (reward.rollout, reward.generates))
        ):
            setting.folder.clear()  # the servers' logs are in it
        run_dir = setting.folder.path
        running = open_rollouts(config, device, chat, context, run_dir, display, lambda: workers.executor.nodes)
        rollouts = stack.enter_context(running)
        if rollout.server_urls is not None or model.lora_adapter_path is not None:
            send_first_weights(config, rollouts, workers.policy.weights(), display)
        source = stack.enter_context(open_source(config, loader, rollouts, total_steps))
        trainer = kind(setting, source, workers, validation=inputs.validation, expert=expert, observers=observers)
        stack.enter_context(frozen())
        yield stack.enter_context(closing(TrainingRun(trainer)))


@contextmanager
def open_source(config: Config, loader: Loader, rollouts: RolloutRunner, total_steps: int) -> Iterator[AsyncSource]:
    """Make the source of trajectories that the config asks for; at the end, cancel the prompts that it has begun."""
    bound = config.async_training.max_staleness
    if bound and loader.learns and config.algorithm.filter_groups.refill:
        raise ConfigError(
            f"data.sampler.name={config.data.sampler.name} learns from each step. With async_training.max_staleness="
            f"{bound} it sees no group that algorithm.filter_groups.refill=true replaces: set refill=false, "
            "max_staleness=0, or another sampler"
        )
    with closing(AsyncSource(config, loader, rollouts, settings_of(config, total_steps))) as source:
        yield source
