"""Start the engine and what rollouts need, from the config."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.agent_loop import LoopContext, LoopLimits, Scheduler
from agentrl.chat import Chat
from agentrl.config import Config
from agentrl.config.needs import uses_ray
from agentrl.config.registries import ENGINES
from agentrl.engines.builder import EngineSetting
from agentrl.engines.contract import RolloutEngine
from agentrl.engines.weights import Weights
from agentrl.errors import TrainingError
from agentrl.observe.display import Display
from agentrl.reward.model_input import ModelInput
from agentrl.rollouts.local import Audience, Rollouts

if TYPE_CHECKING:
    from agentrl.rollouts.ray import RayRollouts
from agentrl.rollouts.context import ContextParts, run_name, uses_reward_model


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
            context=LoopContext(engine, chat, context.tools, context.interactions, LoopLimits.from_config(config)),
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
    """Build the engine that `rollout.name` asks for. Raises UserError with the reason when it does not start."""
    setting = EngineSetting(
        config, device, LoopLimits.from_config(config).max_model_len, run_dir, chat.decode, audience
    )
    return ENGINES.get(config.actor_rollout_ref.rollout.name)(setting, runner)
