"""Seconds of a training step by stage, from a run's config, and the staleness bound with the fastest steps.

The arithmetic is in `step_times.py`, the rollouts are simulated (`rollout_times.py`, `many_steps.py`). Formulas,
assumptions and measurements: docs/scale.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from agentrl.config import Config
from agentrl.config.sections.parallel import most_tokens
from agentrl.errors import ConfigError
from agentrl.model.packed import CHUNK_LOGITS, CHUNK_LOGITS_ON_GPU
from agentrl.plan import speeds
from agentrl.plan.many_steps import Draw, Simulation, Trajectories, Way, drawn
from agentrl.plan.measured import DTYPE, OF_DECODING, OF_UPDATES, OPTION, Measured
from agentrl.plan.memory import MemoryPlan
from agentrl.plan.one_step import Forecast, bound_by, forecast
from agentrl.plan.rollout_times import recorded
from agentrl.plan.simulated_servers import Session
from agentrl.plan.speeds import Figure, Figures
from agentrl.plan.step_times import Cluster, Plan, Training
from agentrl.workers.plan import learns_by_parts

BOUNDS = (0, 1, 2, 4, 8)
"""Values of async_training.max_staleness that are compared."""
STEPS = 12
"""Steps that a way is simulated at least, and two more for each version of its bound."""
TRAJECTORIES = 2000
"""Trajectories of these steps at least: fewer differ by chance."""
NEAR = 1.05
"""A smaller bound is preferred whose steps take at most so many times the fastest ones' seconds."""


@dataclass(frozen=True)
class TimePlan:
    """Seconds of a run's step on the cluster that its config asks for."""

    memory: MemoryPlan
    cluster: Cluster
    figures: Figures
    """The cluster's speeds, each with its origin."""

    @cached_property
    def training(self) -> Training:
        """The run on its cluster. Raises ConfigError where an engine has no room for the model."""
        memory = self.memory
        made = Training(self.cluster, self._plan, memory.policy, memory.teacher, memory.reward_model)
        try:
            made.speed()
        except ValueError as error:
            raise ConfigError(f"no times: {error}") from None
        return made

    @cached_property
    def step(self) -> Forecast:
        """A step whose rollouts and updates take turns."""
        draw, prompts = self._trajectories[0], self.training.plan.prompts
        return forecast(self.training, [session for ordinal in range(prompts) for session in draw(ordinal)])

    @property
    def lengths(self) -> str:
        """Origin of the trajectories' lengths, in words."""
        return self._trajectories[1]

    def by_bound(self) -> Iterator[tuple[Way, float]]:
        """Simulate the ways to bound staleness, and yield each with its seconds a step."""
        plan = self.training.plan
        least = max(STEPS, TRAJECTORIES // (plan.prompts * plan.n))
        for way in self.ways:
            simulation = Simulation(self.training, way, self._trajectories[0], least + 2 * way.bound)
            simulation.run()
            yield way, simulation.seconds_a_token * self.step.sampled

    @property
    def ways(self) -> list[Way]:
        """Ways to bound staleness, the smallest bound and depth first."""
        shared = not only_generate(self.memory.config)
        pairs = [(bound, depth) for bound in BOUNDS for depth in sorted({min(1, bound), bound})]
        return [Way(f"max_staleness={bound}", bound, depth, shared=shared) for bound, depth in pairs]

    @cached_property
    def _plan(self) -> Plan:
        memory, config = self.memory, self.memory.config
        roles = config.actor_rollout_ref
        actor, rollout, model = roles.actor, roles.rollout, roles.model
        on_cpu, apart = memory.device == "cpu", only_generate(config)
        transport = rollout.update_weights_transport
        if transport not in ("tensor", "distributed", "disk"):
            transport = "distributed" if apart else "tensor"
        return Plan(
            prompts=config.data.train_batch_size,
            n=rollout.n,
            mini_batch=actor.ppo_mini_batch_size,
            epochs=actor.ppo_epochs,
            micro_tokens=most_tokens(actor.ppo_max_token_len_per_gpu),
            dtype="bfloat16" if model.dtype == "bfloat16" else "float32",
            lora_rank=model.lora_rank,
            serves_adapters=config.served_adapters is not None,
            recompute=model.recomputed(memory.policy.layers) / memory.policy.layers,
            fsdp_size=actor.parallel.shards or 0,
            sequence_parallel=actor.parallel.sequence,
            offload_optimizer=actor.fsdp_config.param_offload,
            offload_params=actor.fsdp_config.param_offload,
            reference="reference" in memory.states,
            critic="critic's weights" in memory.states,
            scope=config.distillation.scope,
            top_k=config.distillation.top_k,
            rollout_gpus=apart,
            tp=rollout.tensor_model_parallel_size,
            engine_memory=rollout.gpu_memory_utilization,
            free_engine=rollout.free_cache_engine,
            running=rollout.max_num_seqs,
            concurrent=rollout.agent.max_concurrent,
            transport=transport,
            save_every=max(0, config.trainer.save_freq),
            chunk_logits=CHUNK_LOGITS if on_cpu else CHUNK_LOGITS_ON_GPU,
            by_parts=learns_by_parts(memory.device, memory.ranks, has_router_losses=actor.has_router_losses),
            share_prompts=on_cpu,
        )

    @cached_property
    def _trajectories(self) -> tuple[Draw, str]:
        config = self.memory.config
        folder = Path(config.trainer.default_local_dir) / "trajectories"
        if folder.is_dir() and (newest := next(recorded(folder), None)) is not None:
            return resampled(newest, self._plan), f"as in the newest step of {folder}"
        data, turns = config.data, config.actor_rollout_ref.rollout.multi_turn
        tools = turns.tool_config_path is not None or turns.interaction_config_path is not None
        most = min(turns.max_assistant_turns, 12) if tools else 1
        answer = max(1, data.max_response_length // (4 * min(most, 3)))
        shape = Trajectories(
            system=0,
            prompt=max(10, data.max_prompt_length // 2),
            answer=answer,
            answer_most=data.max_response_length,
            turns=min(most, 3),
            turns_most=most,
            observation=max(10, answer // 2),
            tool_seconds=1.0,
            response_most=data.max_response_length,
        )
        waits = f", {shape.turns:g} turns, tools of 1 s" if tools else ""
        return drawn(shape, self._plan, 1), (
            f"assumed: answers of a quarter of max_response_length (median, log-normal){waits}. "
            f"A run in {folder.parent} gives its own"
        )


def cluster_of(memory: MemoryPlan, report: Path | None = None) -> tuple[Cluster, Figures]:
    """Return the run's machines with their speeds, and where these come from.

    report: of the kit `benchmarks.gpu`, on a GPU of this kind. Raises ConfigError for one that says nothing of the run.
    """
    config = memory.config
    trainer = config.trainer
    apart = only_generate(config)
    each = math.gcd(max(1, trainer.n_gpus_per_node), apart) if apart else max(1, trainer.n_gpus_per_node)
    if memory.device == "cpu":
        if report is not None:
            raise ConfigError(
                f"{OPTION} {report}: trainer.device: expected cuda, found cpu. A CPU is measured as the plan is made: "
                f"leave {OPTION} out"
            )
        product, copy = speeds.rates(memory.policy)
        figures = speeds.on_cpu(product / each, copy)
    else:
        figures = gpu_figures(memory, torch.cuda.get_device_name(), report)
    values = {name: figure.value for name, figure in figures.items()}
    nodes = (memory.ranks + apart) // each
    return Cluster(nodes=nodes, gpus_per_node=each, memory=memory.capacity, **values), figures


def gpu_figures(memory: MemoryPlan, name: str, report: Path | None) -> dict[str, Figure]:
    """Take the speeds of a run on this GPU from its data sheet, and from a report where there is one."""
    roles, by_graphs = memory.config.actor_rollout_ref, memory.decodes_by_graphs
    embedded, dtype, compiled = roles.rollout.name == "embedded", roles.model.dtype, roles.actor.compiles
    found = speeds.on_gpu(name, dtype)
    if embedded and not by_graphs:
        found |= speeds.one_by_one()
    if report is None:
        return found
    measured, tokens = Measured.read(report, name), most_tokens(roles.actor.ppo_max_token_len_per_gpu)
    params, same, seen = memory.policy.params, dtype == DTYPE, dict[str, Figure]()
    if same:
        seen |= measured.update_figures(params, tokens, compiled=compiled)
    if same and embedded:
        seen |= measured.decoding_figures(by_graphs=by_graphs)
    asked = [(OF_UPDATES, f"updates with{'' if compiled else 'out'} compiled layers")]
    if embedded:
        asked.append((OF_DECODING, f"decoding with{'' if by_graphs else 'out'} graphs"))
    for names, what in asked:
        for name in names:
            if name not in seen:
                seen[name] = Figure(found[name].value, f"{found[name].origin}, as {report} has no {what} in {dtype}")
    return found | seen


def only_generate(config: Config) -> int:
    """Return the number of GPUs that only generate; 0: all devices do both in turn."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.server_urls is not None:
        return len(rollout.server_urls) * rollout.tensor_model_parallel_size
    return rollout.nnodes * rollout.n_gpus_per_node


def resampled(sessions: Sequence[Session], plan: Plan) -> Draw:
    """Draw prompts of `plan.n` trajectories from recorded ones, the same for the same ordinal."""
    groups: dict[int, list[Session]] = {}
    for session in sessions:
        groups.setdefault(session.group, []).append(session)
    pool = list(groups.values())

    def draw(ordinal: int) -> list[Session]:
        rng = random.Random(ordinal)
        group = rng.choice(pool)
        found = []
        picked = rng.sample(group, plan.n) if plan.n <= len(group) else rng.choices(group, k=plan.n)
        for number, one in enumerate(picked):
            name = f"train/{ordinal}/{number}"
            answers, observations, tools = list(one.answers), list(one.observations), list(one.tools)
            found.append(
                Session(name, ordinal, one.prompt, answers, observations, tools, context=one.prompt, left=answers[0])
            )
        return found

    return draw


def best(ways: Sequence[tuple[Way, float]]) -> tuple[Way, float]:
    """Return the way with the smallest bound and depth whose steps are nearly as fast as the fastest."""
    fastest = min(seconds for _, seconds in ways)
    return next((way, seconds) for way, seconds in ways if seconds <= NEAR * fastest)


def advice(plan: TimePlan, chosen: Way) -> Iterator[str]:
    """Suggest keys that make the step shorter: the bound, and keys of the stage that takes longest."""
    step, config = plan.step, plan.memory.config
    roles, bound = config.actor_rollout_ref, config.async_training.max_staleness
    if chosen.bound != bound:
        depth = f" async_training.depth={chosen.depth}" if chosen.depth > 1 else ""
        yield f"async_training.max_staleness={chosen.bound}{depth}" + (
            ": watch correction/ess (docs/async.md)" if chosen.bound > bound else ": a larger bound is no faster"
        )
    first = step.dominates
    if first.name == "rollout":
        if roles.rollout.name == "embedded" and plan.memory.device == "cuda" and not plan.memory.decodes_by_graphs:
            yield "actor_rollout_ref.rollout.name=sglang: without graphs the embedded engine waits for kernel launches"
        if step.rollout.most < 0.7 * step.rollout.all:
            yield "a smaller data.max_response_length or multi_turn.max_assistant_turns bounds the longest trajectories"
    elif first.name in ("update_actor", "old_log_prob", "update_critic"):
        if bound_by(first).startswith("the network"):
            yield "a larger actor_rollout_ref.actor.ppo_max_token_len_per_gpu gathers weights less often"
        elif plan.memory.device == "cuda" and roles.model.dtype == "float32":
            yield "actor_rollout_ref.model.dtype=bfloat16"
        elif roles.model.recomputed(plan.memory.policy.layers):
            yield "model.enable_gradient_checkpointing=false saves a quarter of the update, where its memory suffices"
    elif first.name == "sync_weights":
        yield "async_training.publish_every above 1 sends weights less often"
