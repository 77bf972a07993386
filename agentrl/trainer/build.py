"""Everything a run is made of, built and checked from its config before the first step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.agent_loop import AgentLoop, LoopContext, LoopLimits, Scheduler, agent_names, load_agent_loops
from agentrl.agent_loop.registry import instantiate
from agentrl.algorithms.kl import AdaptiveKLController, FixedKLController, KLController
from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.remote import ObjectStore
from agentrl.config import Config
from agentrl.config.needs import uses_ray
from agentrl.config.offline import GenerateConfig
from agentrl.config.schema import RunConfig
from agentrl.data.dataset import ParquetDataset
from agentrl.data.loader import Loader
from agentrl.engines.contract import EngineError, RolloutEngine
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights import Weights
from agentrl.errors import ConfigError, DataError, TrainingError
from agentrl.interaction import Interaction, load_interactions
from agentrl.interaction.recorded import OnCassette
from agentrl.model.packed import load_model
from agentrl.observe.display import Display
from agentrl.observe.tracking import Tracker
from agentrl.openai_api.agent_loop import AgentOptions, OpenAIProxyLoop
from agentrl.reward import RewardManager
from agentrl.reward.model_input import ModelInput
from agentrl.rollouts.local import Audience, Rollouts
from agentrl.runtime.device import resolve_device
from agentrl.runtime.executor import Executor, open_executor
from agentrl.runtime.placement import processes
from agentrl.runtime.profiler import check_profile_steps
from agentrl.runtime.ray.session import ray_session
from agentrl.system.cassette import Cassette
from agentrl.system.user_code import answer_of, user_code
from agentrl.tool import ToolSchema
from agentrl.tool.toolset import ToolSet
from agentrl.trainer.run_folder import RunFolder
from agentrl.trajectory import Message
from agentrl.trajectory.picture import pictures_in
from agentrl.trajectory.sample import Sample
from agentrl.workers import WorkerGroup
from agentrl.workers.roles import reference_of

if TYPE_CHECKING:
    from agentrl.rollouts.ray import RayRollouts

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Parts:
    """What the training loop works with."""

    config: Config
    display: Display
    folder: RunFolder
    chat: Chat
    loader: Loader
    val_data: ParquetDataset | None
    rollouts: Rollouts | RayRollouts
    executor: Executor
    policy: WorkerGroup
    reference: WorkerGroup | None
    critic: WorkerGroup | None
    reward_model: WorkerGroup | None
    kl_controller: KLController | None
    checkpoints: CheckpointManager
    tracker: Tracker
    total_steps: int

    @property
    def dir(self) -> Path:
        """The run's folder."""
        return self.folder.path

    def val_samples(self) -> list[Sample]:
        """All validation rows."""
        return [self.val_data[index] for index in range(len(self.val_data))] if self.val_data is not None else []


@contextmanager
def build(config: Config, display: Display) -> Iterator[Parts]:
    """Check and make everything, cheapest checks first; free it at the end.

    Raises UserError before the first step for whatever cannot work.
    """
    device = resolve_device(config.trainer.device, display.warn)
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    chat = load_chat(config)
    display.decode = chat.shown
    context_parts = build_tools(config, chat)
    train_data, val_data = build_data(config, chat, context_parts, display)
    loader = Loader(train_data, config.data.train_batch_size, shuffle=config.data.shuffle, seed=config.data.seed)
    total_steps = config.trainer.total_training_steps or config.trainer.total_epochs * loader.steps_per_epoch
    check_profile_steps(config.trainer, total_steps)
    show_first_prompts(chat, context_parts, display)
    store = open_store(config.trainer, display)
    folder = RunFolder(config, store, display)
    run_dir = folder.path

    tracker = Tracker(
        config.trainer.logger, run_dir, config, config.trainer.project_name, config.trainer.experiment_name, display
    )
    with ExitStack() as stack:
        stack.callback(tracker.close)
        if uses_ray(config):
            stack.enter_context(ray_session(config.ray_init, processes(config)))
        with display.stage("load models", total=None):
            executor = open_executor(config, device, total_steps)
        stack.callback(executor.close)
        policy = executor.groups["policy"]
        if rollout.name == "sglang" and rollout.server_urls is None:
            folder.clear()  # the servers' logs are in it
        opened = open_rollouts(config, device, chat, context_parts, run_dir, display, executor.nodes)
        rollouts = stack.enter_context(opened)
        if rollout.server_urls is not None or model.lora_adapter_path is not None:
            send_first_weights(config, rollouts, policy.run("weights"), display)
        yield Parts(
            config=config,
            display=display,
            folder=folder,
            chat=chat,
            loader=loader,
            val_data=val_data,
            rollouts=rollouts,
            executor=executor,
            policy=policy,
            reference=reference_of(config, executor.groups),
            critic=executor.groups.get("critic"),
            reward_model=executor.groups.get("reward_model"),
            kl_controller=build_kl_controller(config),
            checkpoints=build_checkpoints(config, run_dir, store, display),
            tracker=tracker,
            total_steps=total_steps,
        )


def build_checkpoints(config: Config, run_dir: Path, store: ObjectStore | None, display: Display) -> CheckpointManager:
    """The run's checkpoints, in `run_dir` and, with a `store`, there."""
    return CheckpointManager(
        run_dir / "checkpoints",
        keep=config.trainer.max_actor_ckpt_to_keep,
        fingerprint={"algorithm.adv_estimator": config.algorithm.adv_estimator},
        store=store,
        background=config.actor_rollout_ref.actor.checkpoint.async_save,
        warn=display.warn,
    )


def load_chat(config: Config) -> Chat:
    """Tokenizer, template and parser of the model. Raises ConfigError."""
    model = config.actor_rollout_ref.model
    return Chat.from_pretrained(
        model.path,
        format=config.actor_rollout_ref.rollout.multi_turn.format,
        chat_template=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
        trust_remote_code=model.trust_remote_code,
    )


@contextmanager
def open_rollouts(
    config: Config,
    device: str,
    chat: Chat,
    context: ContextParts,
    run_dir: Path,
    display: Display,
    nodes: Sequence[str] = (),
) -> Iterator[Rollouts | RayRollouts]:
    """Rollouts in this process, or under Ray, which must be up, in workers of their own: on `nodes`, or where
    `rollout.nnodes` has its devices. Closed at the end. Raises UserError.
    """
    if not uses_ray(config):
        with open_local_rollouts(config, device, chat, context, run_dir, display) as rollouts:
            yield rollouts
        return
    from agentrl.rollouts.ray import RayRollouts

    separate = config.actor_rollout_ref.rollout.nnodes > 0
    with closing(RayRollouts(config, device, run_dir, display, None if separate else nodes)) as workers:
        yield workers


@contextmanager
def open_local_rollouts(
    config: Config,
    device: str,
    chat: Chat,
    context: ContextParts,
    run_dir: Path,
    audience: Audience,
    share: tuple[int, int] = (1, 1),
) -> Iterator[Rollouts]:
    """Start the engine, reach what tools and interactions need, and close all of it at the end. Raises UserError."""
    agent = config.actor_rollout_ref.rollout.agent
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        engine = build_engine(config, device, chat, run_dir, runner, audience)
        stack.callback(lambda: runner.run(engine.close()))
        stack.callback(lambda: runner.run(context.close()))
        with audience.stage("reach tools"):
            runner.run(context.start(run_name(config)))
        scheduler = Scheduler(
            context=LoopContext(engine, chat, context.tools, context.interactions, LoopLimits.of(config)),
            loops=context.loops,
            reward=context.reward,
            max_concurrent=agent.max_concurrent,
            trajectory_timeout=agent.trajectory_timeout,
            max_retries=agent.max_retries,
            on_code_error=agent.on_code_error,
            warn=audience.warn,
        )
        context.tools.warn = audience.warn
        stack.callback(lambda: runner.run(scheduler.close()))
        reading = reward_model_input(config)
        yield Rollouts(config, scheduler, engine, runner, audience, run_dir / "trajectories", share, reading)


def uses_reward_model(config: Config) -> bool:
    """Nothing is trained on what only generates, and its scores are the scorers'."""
    return config.reward_model.enable and not isinstance(config, GenerateConfig)


def reward_model_input(config: Config) -> ModelInput | None:
    """What makes the reward model's input, if there is one. Raises ConfigError."""
    if not uses_reward_model(config):
        return None
    scoring = config.reward_model
    assert scoring.model.path is not None
    return ModelInput(scoring.model.path, scoring.max_length, trust_remote_code=scoring.model.trust_remote_code)


def send_first_weights(config: Config, rollouts: Rollouts | RayRollouts, weights: Weights, display: Display) -> None:
    """For an engine that has not the weights we start from. Raises TrainingError."""
    try:
        with display.stage("send weights"):
            rollouts.sync_weights(weights, 0)
    except TrainingError as error:
        if config.actor_rollout_ref.rollout.server_urls is None:
            raise
        raise TrainingError(
            f"{error}\nThe servers of actor_rollout_ref.rollout.server_urls must serve "
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}; weights of another size end a server"
        ) from error


def build_engine(
    config: Config, device: str, chat: Chat, run_dir: Path, runner: asyncio.Runner, audience: Audience
) -> RolloutEngine:
    """The engine that `rollout.name` asks for. Raises UserError with what kept it from starting."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    max_model_len = LoopLimits.of(config).max_model_len
    if rollout.name == "embedded":
        with audience.stage("load engine"):
            return EmbeddedEngine(
                load_model(model.path, dtype=model.dtype, device=device, trust_remote_code=model.trust_remote_code),
                max_num_seqs=rollout.max_num_seqs,
                max_model_len=max_model_len,
                stop_decode=chat.decode,
            )
    from agentrl.engines.sglang.start import start_engine

    if rollout.free_cache_engine and device == "cpu":
        raise ConfigError(
            "actor_rollout_ref.rollout.free_cache_engine=true frees memory of a GPU, and this machine has none"
        )
    verb = "start" if rollout.server_urls is None else "reach"
    with audience.stage(f"{verb} SGLang servers"):
        starting = start_engine(config, device, max_model_len, run_dir, notify=audience.warn, progress=audience.note)
        try:
            return runner.run(starting)
        except EngineError as error:
            raise TrainingError(str(error)) from error


def open_store(config: RunConfig, display: Display) -> ObjectStore | None:
    """Where checkpoints are uploaded to.

    Raises ConfigError when nothing can be written there, or when a run that starts anew would mix with an older one.
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


@dataclass(frozen=True, slots=True)
class ContextParts:
    """What rows name: loops, tools, interactions and scorers."""

    loops: dict[str, AgentLoop]
    tools: ToolSet
    interactions: dict[str, Interaction]
    reward: RewardManager | None
    """None: nothing is scored."""
    examples: dict[str, Sample] = field(default_factory=dict)
    """The first row that was met of each loop."""

    async def start(self, run: str) -> None:
        """Reach what tools and interactions need, unless their answers are replayed. Raises ConfigError."""
        await self.tools.start(run)
        for interaction in self.interactions.values():
            await answer_of(f"interaction {interaction.name}", interaction.start, partial(interaction.start, run))
        if self.reward is not None:
            await self.reward.start(run)

    async def close(self) -> None:
        """Free what tools, interactions and scorers hold, also where one of them fails to."""
        closing = [self.tools.close(), *(interaction.close() for interaction in self.interactions.values())]
        if self.reward is not None:
            closing.append(self.reward.close())
        for ended in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(ended, BaseException):
                logger.warning("close: %s: %s", type(ended).__name__, ended)


def run_name(config: Config) -> str:
    """By which servers know the run."""
    return config.tools.client_id or f"{config.trainer.project_name}/{config.trainer.experiment_name}"


def build_tools(config: Config, chat: Chat, *, scored: bool = True) -> ContextParts:
    """Load what the YAML files name, and the scorers where trajectories are to be scored."""
    turns, agent = config.actor_rollout_ref.rollout.multi_turn, config.actor_rollout_ref.rollout.agent
    if agent.agent_loop_config_path is not None:
        load_agent_loops(agent.agent_loop_config_path)
    cassette = None
    if config.tools.cassette is not None and config.tools.cassette_path is not None:
        cassette = Cassette(config.tools.cassette_path, config.tools.cassette)
    tools = ToolSet.from_yaml(
        turns.tool_config_path,
        timeout=turns.tool_timeout,
        max_response_tokens=turns.max_tool_response_length,
        truncate_side=turns.tool_response_truncate_side,
        cassette=cassette,
    )
    tools.limit_run(config.tools.max_concurrent, config.tools.max_rate)
    tools.bind(chat.encode, chat.decode, chat.vision.tokens_of if chat.vision is not None else None)
    interactions = load_interactions(turns.interaction_config_path)
    if cassette is not None:
        interactions = {name: OnCassette(interaction, cassette) for name, interaction in interactions.items()}
    reward = None
    if scored:
        beside_model = uses_reward_model(config)
        reward = RewardManager(config.reward_model, config.custom_reward_function, beside_model=beside_model)
    loops = instantiate(agent_names())
    proxied = agent.openai_proxy
    loops["openai_proxy"] = OpenAIProxyLoop(AgentOptions(proxied.target, proxied.command, proxied.pass_env))
    return ContextParts(loops, tools, interactions, reward)


def build_data(
    config: Config, chat: Chat, context: ContextParts, display: Display
) -> tuple[ParquetDataset, ParquetDataset | None]:
    """Training and validation data, every name in them checked, overlong prompts left out."""
    train = open_data(config, config.data.train_files, config.data.train_max_samples, chat, context, display)
    if config.data.val_files is None:
        return train, None
    return train, open_data(config, config.data.val_files, config.data.val_max_samples, chat, context, display)


def open_data(
    config: Config,
    files: str | list[str],
    max_samples: int | None,
    chat: Chat,
    context: ContextParts,
    display: Display,
) -> ParquetDataset:
    """Open, check names, and leave out (or refuse) prompts that are too long."""
    data = ParquetDataset(
        files,
        prompt_key=config.data.prompt_key,
        image_key=config.data.image_key,
        default_agent_loop=config.actor_rollout_ref.rollout.agent.default_agent_loop,
        max_samples=max_samples,
        on_bad_row=config.data.on_bad_row,
    )
    sources = data.check(
        agent_names=list(context.loops),
        tool_names=context.tools.names,
        interaction_names=list(context.interactions),
    )
    if context.reward is not None:
        context.reward.check(sources)

    def length(sample: Sample) -> int:
        check_interaction(sample, context)
        check_images(sample, context)
        context.examples.setdefault(sample.agent_name, sample)
        return len(chat.render(*first_prompt(sample, context)))

    with display.stage("check prompts", total=len(data)) as stage:
        dropped = data.filter_overlong(
            length,
            config.data.max_prompt_length,
            refuse=not config.data.filter_overlong_prompts,
            progress=stage.advance,
        )
    if dropped:
        display.note(
            f"{dropped} prompts longer than data.max_prompt_length={config.data.max_prompt_length} are left out"
        )
    return data


def check_interaction(sample: Sample, context: ContextParts) -> None:
    """Raises DataError for an interaction that the row's loop would not ask, or arguments that it does not take."""
    kwargs = dict(sample.interaction_kwargs)
    if not kwargs:
        return
    if not context.loops[sample.agent_name].takes_interactions:
        taking = ", ".join(name for name, loop in context.loops.items() if loop.takes_interactions)
        raise DataError(
            f"it has interaction_kwargs, and agent_name={sample.agent_name} asks no interaction; {taking} does "
            "(a loop of your own says so by takes_interactions = True)"
        )
    interaction = context.interactions[kwargs.pop("name")]
    with user_code(f"interaction {interaction.name}", interaction.check_row, passing=(ValueError,)):
        interaction.check_row(kwargs)


def check_images(sample: Sample, context: ContextParts) -> None:
    """Raises DataError for images under a loop that does not show them."""
    if not context.loops[sample.agent_name].takes_images and any(pictures_in(sample.prompt)):
        raise DataError(f"it has images, and agent_name={sample.agent_name} shows none")


def first_prompt(sample: Sample, context: ContextParts) -> tuple[list[Message], list[ToolSchema]]:
    """What the row's loop begins with."""
    loop = context.loops[sample.agent_name]
    with user_code(f"agent loop {sample.agent_name}", loop.first_prompt, passing=(ValueError,)):
        return loop.first_prompt(sample, context.tools.schemas)


def show_first_prompts(chat: Chat, context: ContextParts, display: Display) -> None:
    """The start-up check, by loop: print a rendered prompt; fail when tools, parser and template do not fit."""
    for name, sample in context.examples.items():
        with user_code(f"agent loop {name}", context.loops[name].check):
            context.loops[name].check()
        text = start_up_check(chat, *first_prompt(sample, context))
        display.note(f"first prompt of {sample.file} (agent_name={name}):\n{text}")


def build_kl_controller(config: Config) -> KLController | None:
    """The KL coefficient of the reward; None without KL in the reward."""
    ctrl = config.algorithm.kl_ctrl
    if not config.algorithm.use_kl_in_reward:
        return None
    if ctrl.type == "fixed":
        return FixedKLController(ctrl.kl_coef)
    return AdaptiveKLController(ctrl.kl_coef, target=ctrl.target_kl, horizon=ctrl.horizon)
