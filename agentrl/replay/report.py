"""One replay as the command makes it: the run's config, its weights in an engine, and the printed report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from agentrl.agent_loop.limits import LoopLimits
from agentrl.chat import Chat
from agentrl.config import Config, load_config
from agentrl.config.formats import unknown_format
from agentrl.config.registries import CALL_FORMATS
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.errors import ConfigError
from agentrl.model.packed import load_model
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.open import open_display
from agentrl.replay.again import Comparison, as_trajectory, compare, placed_images
from agentrl.replay.edited import Edit, Parts, go_on, sampled_before
from agentrl.replay.recorded import Recorded, Stretch, checkpoint_of, find, version_of
from agentrl.rollouts.context import load_chat, load_context
from agentrl.rollouts.objects import UserObjects
from agentrl.runtime.device import resolve_device
from agentrl.system.targets import is_target
from agentrl.system.versions import check_folder
from agentrl.system.visible import visible
from agentrl.trajectory import Trajectory, Turn
from agentrl.trajectory.files import TRAJECTORIES
from agentrl.trajectory.parquet import write_trajectories
from agentrl.workers.roles import policy_role

T = TypeVar("T")
ONE_PROCESS = (
    "~trainer.default_local_dir",  # nothing is written, and a run may have been moved
    "trainer.nnodes=1",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.nnodes=0",
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The request for one replay."""

    run: Path
    uid: str
    checkpoint: Path | None = None
    """Weights to sample by; None: the weights that sampled the trajectory."""
    edit: Edit | None = None
    device: str | None = None
    """Device in place of the run's."""
    trust: bool = False
    """Take code, commands and hosts, too, from the run's config."""
    out: Path | None = None
    """Folder that the trajectory is written into, as sampled again or continued."""


def run_replay(asked: Asked) -> bool:
    """Replay a trajectory, print the findings, and return whether a token differs. Raises UserError."""
    config = config_of(asked.run, asked.device, trust=asked.trust)
    recorded = find(asked.run, asked.uid, config)
    format = config.actor_rollout_ref.rollout.multi_turn.format
    if not is_target(format.removeprefix("template:")) and unknown_format(format, CALL_FORMATS.names()) is not None:
        load_context(config, scored=False)  # a file of the run's tools or loops registers it
    chat = load_chat(config)
    if asked.edit is None:
        compared = _again(asked, config, recorded, chat)
        made = as_trajectory(recorded, compared, chat)
    else:
        compared, made = [], _edited(asked, asked.edit, config, recorded, chat)
    if asked.out is not None:
        folder = asked.out / TRAJECTORIES
        folder.mkdir(parents=True, exist_ok=True)
        write_trajectories(folder, [made], step=recorded.step, split=recorded.split, turn_reward_coef=None)
    return any(one.first_difference is not None for one in compared)


def config_of(run: Path, device: str | None = None, *, trust: bool = False) -> Config:
    """Load a run's config for this process alone, and such that nothing of the run is written.

    Raises ConfigError for a run without a config, and for a config that names more than data without `trust`.
    """
    check_folder(run)
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: want the folder of a run, with its config.yaml")
    more = [] if device is None else [f"trainer.device={device}"]
    more += ["--trust"] if trust else []
    file = ["--config-path", str(run.absolute()), "--config-name", "config"]
    config = load_config([*file, *ONE_PROCESS, *more])
    if config.tools.cassette == "record":  # the run may be recording on it
        return config.model_copy(update={"tools": config.tools.model_copy(update={"cassette": None})})
    return config


def _again(asked: Asked, config: Config, recorded: Recorded, chat: Chat) -> list[Comparison]:
    """Sample the trajectory again, print the outcome of each stretch, and return them in order."""
    stretches = recorded.stretches()
    # All weights are looked for before the first are loaded.
    wanted = {one.version: asked.checkpoint or checkpoint_of(asked.run, one.version) for one in stretches}
    compared: list[Comparison] = []
    for weights in dict.fromkeys(wanted.values()):
        print(f"{asked.uid}, of {asked.run}: sampled again by {weights or config.actor_rollout_ref.model.path}")
        engine = open_engine(config, chat, weights)
        mine = [one for one in stretches if wanted[one.version] == weights]
        compared += asyncio.run(_closed(engine, _compared(recorded, mine, engine, chat)))
    return sorted(compared, key=lambda one: (one.stretch.turn, one.stretch.start))


async def _compared(
    recorded: Recorded, stretches: list[Stretch], engine: EmbeddedEngine, chat: Chat
) -> list[Comparison]:
    images, found = placed_images(recorded, chat), []
    for one in stretches:
        found.append(await compare(recorded, one, images[one.transcript], engine, chat))
        print(visible(line_of(found[-1])))
    return found


def _edited(asked: Asked, edit: Edit, config: Config, recorded: Recorded, chat: Chat) -> Trajectory:
    """Make the edit, continue from it, and print the turns that follow."""
    version = sampled_before(recorded, edit.turn).version
    weights = asked.checkpoint or checkpoint_of(asked.run, version)
    number = version if asked.checkpoint is None else version_of(asked.checkpoint)
    print(f"{asked.uid}, of {asked.run}: goes on by {weights or config.actor_rollout_ref.model.path}")
    context = load_context(config, UserObjects(), scored=False)
    context.bind(chat)
    engine = open_engine(config, chat, weights)

    async def work() -> Trajectory:
        await context.tools.start("replay")
        try:
            parts = Parts(engine, number, chat, context.tools, LoopLimits.from_config(config))
            return await go_on(recorded, edit, parts, print_turn)
        finally:
            await context.close()

    return asyncio.run(_closed(engine, work()))


def print_turn(turn: Turn) -> None:
    """Print a turn of a continued trajectory."""
    print(visible(f"--- {turn.role}\n{turn.text}"))
    for call in turn.calls:
        print(visible(f"calls {call.name}({json.dumps(call.arguments, ensure_ascii=False)})"))


def open_engine(config: Config, chat: Chat, checkpoint: Path | None) -> EmbeddedEngine:
    """Make an embedded engine with the run's first weights, or with the weights of a checkpoint.

    Raises CheckpointError.
    """
    model, device = config.actor_rollout_ref.model, resolve_device(config.trainer.device, print)
    limits = LoopLimits.from_config(config)
    with open_display("replay") as display, bars_as_stages(display), display.stage("load engine"):
        engine = EmbeddedEngine(
            load_model(
                model.path,
                dtype=model.dtype,
                device=device,
                trust_remote_code=model.trust_remote_code,
                override=model.override_config,
            ),
            max_num_seqs=1,
            max_model_len=limits.max_model_len + limits.max_response_tokens,
            stop_decode=chat.decode,
        )
        if checkpoint is not None or model.lora_adapter_path is not None:
            with torch.no_grad():
                worker = policy_role(config, device, 1).make()
                if checkpoint is not None:
                    worker.load(checkpoint / "policy")
                asyncio.run(engine.update_weights(worker.weights().alone(), 1))
    return engine


async def _closed(engine: EmbeddedEngine, work: Coroutine[None, None, T]) -> T:
    """Await `work`, and close the engine then."""
    try:
        return await work
    finally:
        await engine.close()


def line_of(one: Comparison) -> str:
    """Write the outcome of a stretch in a line."""
    stretch = one.stretch
    tokens = stretch.end - stretch.start
    kept = ", sampled from keys and values of older weights, in part, and here without them" if stretch.kept else ""
    begins = f"turn {stretch.turn} (version {stretch.version}{kept}): {tokens} tokens"
    if one.first_difference is not None:
        return (
            f"{begins}; the first other one is token {one.first_difference} of its transcript: {one.recorded!r} was "
            f"recorded, and {one.sampled!r} is sampled"
        )
    rest = f", the others within {one.logprob_gap:.2g}" if one.same_logprobs < tokens else ""
    return f"{begins}, all the same; {one.same_logprobs} log-probs the same bit for bit{rest}"
