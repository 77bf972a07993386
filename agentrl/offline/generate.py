"""Responses without training, for `python -m agentrl.generate`.

Loops, tools, interactions, engines and records are the same as in training. Prompts run in batches; each finished
batch is on the disk before the next begins. The seeds of a prompt depend on its position alone, so a run that was
killed continues to the same file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from agentrl.chat import Chat
from agentrl.config.sections.offline import GenerateConfig
from agentrl.data.contract import Dataset
from agentrl.errors import TrainingError
from agentrl.model.folder import check_folder
from agentrl.observe.bars import bars_as_stages
from agentrl.observe.display import Display
from agentrl.offline.decisive import decisive, hash_weights
from agentrl.offline.responses import ADDED, UNANSWERED, InputRows, Parts, check_output, response_text
from agentrl.rollouts.context import (
    RunContext,
    fit_prompts,
    load_chat,
    load_context,
    open_rows,
    show_first_prompts,
)
from agentrl.system.garbage import frozen
from agentrl.system.json_value import JSON
from agentrl.trajectory import Trajectory
from agentrl.trajectory.parquet import SCHEMA, to_row, valid_unicode
from agentrl.trajectory.sample import Sample

if TYPE_CHECKING:
    from agentrl.engines.weights import Weights
    from agentrl.rollouts.contract import RolloutRunner

ROLLOUT = "actor_rollout_ref.rollout"
IDLE = (
    "data.path",  # its content counts, see `settings`
    "data.max_samples",
    "data.output_path",
    "data.batch_size",
    *(
        f"{ROLLOUT}.{name}"
        for name in (
            "max_num_seqs",
            "nnodes",
            "n_gpus_per_node",
            "num_servers",
            "tensor_model_parallel_size",
            "gpu_memory_utilization",
            "engine_kwargs.embedded.graphs",
            "server_*",
            "health_check_interval",
            "max_server_restarts",
            "free_cache_engine",
            "update_weights_*",
            "agent.max_concurrent",
            "agent.max_retries",
            "agent.on_code_error",
            "agent.max_failed_fraction",
            "agent.openai_proxy.host",
            "agent.openai_proxy.port",
        )
    ),
    "reward_model.max_concurrent",
    "reward_model.*.max_concurrent",
    "tools.max_concurrent",
    "tools.max_rate",
    "tools.client_id",
    "trainer.device",
    "trainer.max_worker_restarts",
    "trainer.project_name",
    "trainer.experiment_name",
    "ray_init.*",
)
"""Keys (patterns) of hardware, pace, faults and names; the rows of one file have the same values of all others."""


def generate(config: GenerateConfig, display: Display) -> Path:
    """Do the whole job; returns the file that was written. Raises UserError."""
    check_folder("model.path", config.actor_rollout_ref.model.path)
    check_output(Path(config.data.output_path))
    context = load_context(config, scored=config.data.output_scores)
    data = open_rows(config, config.data.path, config.data.max_samples, context)
    rows = InputRows(data.files, ADDED)
    chat = load_chat(config)
    context.bind(chat)
    fit_prompts([data], config, chat, context, display)
    with Parts(Path(config.data.output_path), settings(config, data)) as parts:
        if parts.done:
            display.note(f"{parts.folder}: {parts.done} of {len(data)} prompts are done")
        if parts.done < len(data):
            run(config, chat, context, data, rows, parts, display)
        parts.publish()
        display.note(f"{parts.output}: {len(data)} prompts with {config.actor_rollout_ref.rollout.n} responses each")
        return parts.output


def run(
    config: GenerateConfig,
    chat: Chat,
    context: RunContext,
    data: Dataset,
    rows: InputRows,
    parts: Parts,
    display: Display,
) -> None:
    """Generate, batch by batch, the rows that `parts` lacks."""
    # Imported late: torch takes seconds, for which no mistake in tools or rows should wait.
    from agentrl.rollouts.build import open_rollouts, send_first_weights
    from agentrl.runtime.device import note_precision, resolve_device
    from agentrl.runtime.ray.session import ray_session

    show_first_prompts(chat, context, display)
    device = resolve_device(config.trainer.device, display.warn)
    note_precision(device, config.actor_rollout_ref.model, "actor_rollout_ref.model", display.note)
    workers = config.actor_rollout_ref.rollout.nnodes
    with (
        ray_session(config.ray_init, workers) if config.uses_ray else nullcontext(),
        bars_as_stages(display),
        open_rollouts(config, device, chat, context, parts.folder, display) as rollouts,
        frozen(),
        display.stage("generate", total=len(data), done=parts.done) as stage,
    ):
        if config.actor_rollout_ref.rollout.server_urls is not None:
            with display.stage("load model"):
                weights = model_weights(config)
            send_first_weights(config, rollouts, weights, display)
        while parts.done < len(data):
            end = min(parts.done + config.data.batch_size, len(data))
            samples = [data[position] for position in range(parts.done, end)]
            trajectories = respond(config, rollouts, samples, parts.done)
            table, each = rows.take(samples), config.actor_rollout_ref.rollout.n
            for name, (kind, values) in added_columns(trajectories, config).items():
                lists = [values[start : start + each] for start in range(0, len(values), each)]
                table = table.append_column(name, pa.array(lists, pa.list_(kind)))
            parts.add(table)
            stage.advance(len(samples))


def respond(config: GenerateConfig, rollouts: RolloutRunner, samples: Sequence[Sample], first: int) -> list[Trajectory]:
    """Run the trajectories of all samples, n a sample, in order. Raises TrainingError when too many failed."""
    from agentrl.rollouts.contract import responses
    from agentrl.rollouts.rounds import run_round

    agent, greedy = config.actor_rollout_ref.rollout.agent, not config.actor_rollout_ref.rollout.do_sample
    trajectories = run_round(rollouts, responses(config, greedy=greedy), samples, first).whole
    failed = [trajectory for trajectory in trajectories if trajectory.status in UNANSWERED]
    if len(failed) > agent.max_failed_fraction * len(trajectories):
        causes = sorted({trajectory.failure or trajectory.status for trajectory in failed})
        raise TrainingError(
            f"{len(failed)} of {len(trajectories)} trajectories of prompts {first} to {first + len(samples) - 1} "
            f"failed, more than {ROLLOUT}.agent.max_failed_fraction allows. Causes: {'; '.join(causes[:5])}\n"
            "What was done before is kept: the same command goes on"
        )
    return trajectories


def added_columns(
    trajectories: Sequence[Trajectory], config: GenerateConfig
) -> dict[str, tuple[pa.DataType, Sequence[object]]]:
    """Return type and values (one a trajectory) of each column of ADDED that is asked for."""
    columns: dict[str, tuple[pa.DataType, Sequence[object]]] = {
        "responses": (pa.string(), [response_text(one) for one in trajectories]),
        "response_status": (pa.string(), [one.status.value for one in trajectories]),
        "response_failure": (pa.string(), [one.failure and valid_unicode(one.failure) for one in trajectories]),
        "response_turns": (pa.int32(), [sum(turn.role == "assistant" for turn in one.turns) for one in trajectories]),
        "response_tool_calls": (pa.int32(), [len(one.tool_calls) for one in trajectories]),
        "response_tokens": (pa.int32(), [one.num_sampled for one in trajectories]),
    }
    if config.data.output_scores:
        columns["response_score"] = (pa.float64(), [one.score for one in trajectories])
    if config.data.output_trajectories:
        record = pa.struct([field for field in SCHEMA if field.name not in ("step", "split")])
        columns["trajectories"] = (record, [to_row(one, 0, "generate", None) for one in trajectories])
    return columns


def settings(config: GenerateConfig, data: Dataset) -> dict[str, JSON]:
    """Return the data, the keys and the weights that the rows of the file depend on."""
    path = config.actor_rollout_ref.model.path
    weights: dict[str, JSON] = {f"weights of {path}": hash_weights(Path(path))} if Path(path).is_dir() else {}
    return {"data.path": data.fingerprint, **decisive(config, IDLE), **weights}


def model_weights(config: GenerateConfig) -> Weights:
    """Load the weights of the model's files, for servers that were started by somebody else."""
    from agentrl.engines.weights import Weights
    from agentrl.model.packed import load_model

    model = config.actor_rollout_ref.model
    loaded = load_model(
        model.path,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        override=model.override_config,
    )
    return Weights.from_tensors(loaded.named_parameters())
