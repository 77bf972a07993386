"""Rollouts, and the source of a training's trajectories, as the config asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from agentrl.chat import Chat
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.weights import Weights
from agentrl.errors import TrainingError
from agentrl.observe.display import Display
from agentrl.rollouts.context import RunContext
from agentrl.rollouts.contract import RolloutRunner
from agentrl.rollouts.local import open_local_rollouts
from agentrl.rollouts.reward_servers.open import open_reward_servers


@contextmanager
def open_rollouts(
    config: RolloutsConfig,
    device: str,
    chat: Chat,
    context: RunContext,
    run_dir: Path,
    display: Display,
    nodes: Callable[[], Sequence[str]] = tuple,
) -> Iterator[RolloutRunner]:
    """Open rollouts in this process, or under Ray, which must be up, in workers of their own; close them at the end.

    `nodes`: names Ray's nodes for the workers; they are used unless `rollout.nnodes` asks for devices of their own.
    Raises UserError.
    """
    with open_reward_servers(config, device, run_dir, display) as servers:
        if not config.uses_ray:
            context.serve(servers, config.actor_rollout_ref.model.chat_template_date)
            with open_local_rollouts(config, device, chat, context, run_dir, display) as rollouts:
                yield rollouts
            return
        from agentrl.rollouts.ray import RayRunner  # Ray is an extra
        from agentrl.rollouts.ray_placing import WorkerMaker

        places = None if config.actor_rollout_ref.rollout.nnodes > 0 else nodes
        maker = WorkerMaker(config, device, run_dir, places, context.objects, context.first, servers)
        with closing(RayRunner(maker, run_dir, display)) as runner:
            yield runner


def send_first_weights(config: RolloutsConfig, rollouts: RolloutRunner, weights: Weights, display: Display) -> None:
    """Send an engine the weights that the run starts from, where it has others. Raises TrainingError."""
    try:
        with display.stage("send weights"):
            rollouts.update_weights(weights, 0)
    except TrainingError as error:
        if config.actor_rollout_ref.rollout.server_urls is None:
            raise
        raise TrainingError(
            f"{error}\nThe servers of actor_rollout_ref.rollout.server_urls must serve "
            f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}; weights of another size end a server"
        ) from error
