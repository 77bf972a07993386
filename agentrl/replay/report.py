"""One replay as the command makes it: the run's config, its weights in an engine, and what is told."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
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
from agentrl.replay.again import Comparison, edit, replay, sampled_before
from agentrl.replay.recorded import Recorded, checkpoint_of, find, read_edit
from agentrl.rollouts.context import load_chat, load_context
from agentrl.rollouts.objects import UserObjects
from agentrl.runtime.device import resolve_device
from agentrl.system.targets import is_target
from agentrl.workers.roles import policy_role

T = TypeVar("T")
ONE_PROCESS = ("trainer.nnodes=1", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.nnodes=0")


def run_replay(
    run: Path, uid: str, checkpoint: Path | None, turn: int | None, tool_answer: Path | None, message: str | None
) -> bool:
    """Replay a trajectory, print what was found, and return whether a token differs. Raises UserError."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run}: want the folder of a run, with its config.yaml")
    config = load_config(["--config-path", str(run.absolute()), "--config-name", "config", *ONE_PROCESS])
    recorded = find(run, uid, config)
    text = read_edit(tool_answer, message)
    format = config.actor_rollout_ref.rollout.multi_turn.format
    if not is_target(format.removeprefix("template:")) and unknown_format(format, CALL_FORMATS.names()) is not None:
        load_context(config, scored=False)  # a file of the run's tools or loops registers it
    chat = load_chat(config)
    if turn is not None and text is not None:
        weights = checkpoint or checkpoint_of(run, sampled_before(recorded, turn).version)
        asyncio.run(_goes_on(config, recorded, turn, text, open_engine(config, chat, weights), chat))
        return False
    versions = sorted({one.version for one in recorded.stretches()})
    # All of them are looked for before the first is loaded.
    wanted = {None: checkpoint} if checkpoint else {version: checkpoint_of(run, version) for version in versions}
    compared: list[Comparison] = []
    for version, weights in wanted.items():
        engine = open_engine(config, chat, weights)
        print(f"{uid}, of {run}: sampled again by {weights or config.actor_rollout_ref.model.path}")
        compared += asyncio.run(_closed(engine, replay(recorded, version, engine, chat)))
    for one in sorted(compared, key=lambda one: (one.stretch.turn, one.stretch.start)):
        print(line_of(one))
    return any(one.first_difference is not None for one in compared)


async def _goes_on(
    config: Config, recorded: Recorded, turn: int, text: str, engine: EmbeddedEngine, chat: Chat
) -> None:
    """Put `text` in the place of a turn, go on with the run's tools, and print what follows."""
    context = load_context(config, UserObjects(), scored=False)
    context.bind(chat)
    await context.tools.start("replay")
    try:
        found = await _closed(
            engine, edit(recorded, turn, text, engine, chat, context.tools, LoopLimits.from_config(config))
        )
    finally:
        await context.close()
    for role, said in found.turns:
        print(f"--- {role}\n{said}")


def open_engine(config: Config, chat: Chat, checkpoint: Path | None) -> EmbeddedEngine:
    """Make an embedded engine with the run's first weights, or those of a checkpoint. Raises CheckpointError."""
    model, device = config.actor_rollout_ref.model, resolve_device(config.trainer.device, print)
    limits = LoopLimits.from_config(config)
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
    """Write what became of a stretch in a line."""
    stretch = one.stretch
    tokens = stretch.end - stretch.start
    begins = f"turn {stretch.turn} (version {stretch.version}): {tokens} tokens"
    if one.first_difference is not None:
        return (
            f"{begins}; the first other one is token {one.first_difference} of its transcript: {one.recorded!r} was "
            f"recorded, and {one.sampled!r} is sampled"
        )
    rest = f", the others within {one.logprob_gap:.2g}" if one.same_logprobs < tokens else ""
    return f"{begins}, all the same; {one.same_logprobs} log-probs the same bit for bit{rest}"
