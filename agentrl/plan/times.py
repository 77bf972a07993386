"""Seconds of a training step by stage, from a run's config, and the staleness bound with the fastest steps.

The arithmetic is in `step_times.py`, the rollouts are simulated (`rollout_times.py`, `many_steps.py`). Formulas,
assumptions and measurements: docs/scale.md.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter

import torch

from agentrl.config import Config
from agentrl.config.sections.parallel import most_tokens
from agentrl.errors import ConfigError
from agentrl.model.packed import CHUNK_LOGITS, CHUNK_LOGITS_ON_GPU
from agentrl.plan.many_steps import Draw, Simulation, Trajectories, Way, drawn
from agentrl.plan.memory import MemoryPlan
from agentrl.plan.one_step import Forecast, bound_by, forecast
from agentrl.plan.rollout_times import recorded
from agentrl.plan.simulated_servers import Session
from agentrl.plan.sizing import ModelShape
from agentrl.plan.step_times import Cluster, Plan, Training

CARDS = {
    "H100 PCIe": (756e12, 2.0e12),
    "H100 NVL": (835e12, 3.9e12),
    "H100": (989e12, 3.35e12),
    "H200": (989e12, 4.8e12),
    "A100": (312e12, 2.0e12),
}
"""By what a GPU's name contains: dense bfloat16 FLOPs and bytes of memory a second (NVIDIA's data sheets)."""
EMBEDDED_STEP = 0.03
"""Seconds of the embedded engine's decoding step on a GPU, with any number of requests (docs/gpu.md: H200)."""
ON_A_CPU = {"mfu_update": 0.85, "mfu_forward": 0.9, "mfu_prefill": 0.9, "attention_slower": 2.0, "step_fixed": 0.0}
"""Parts of a matrix product's rate that passes reach on a CPU, and how much slower attention is (docs/scale.md)."""
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
    source: str
    """Origin of the cluster's speeds, in words."""

    @cached_property
    def training(self) -> Training:
        """The run on its cluster. Raises ConfigError where an engine has no room for the model."""
        made = Training(self.cluster, self._plan, self.memory.policy)
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
            rollout_gpus=apart,
            tp=rollout.tensor_model_parallel_size,
            engine_memory=rollout.gpu_memory_utilization,
            free_engine=rollout.free_cache_engine,
            running=rollout.max_num_seqs,
            concurrent=rollout.agent.max_concurrent,
            transport=transport,
            save_every=max(0, config.trainer.save_freq),
            chunk_logits=CHUNK_LOGITS if on_cpu else CHUNK_LOGITS_ON_GPU,
            share_prompts=on_cpu,
        )

    @cached_property
    def _trajectories(self) -> tuple[Draw, str]:
        config = self.memory.config
        folder = Path(config.trainer.default_local_dir) / "trajectories"
        if steps := recorded(folder) if folder.is_dir() else []:
            return resampled(steps[-1], self._plan), f"as in the newest step of {folder}"
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


def cluster_of(memory: MemoryPlan) -> tuple[Cluster, str]:
    """Return the run's machines with their speeds, and where these come from in words."""
    config, device = memory.config, memory.device
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    ranks = max(1, trainer.nnodes * trainer.n_gpus_per_node)
    apart = only_generate(config)
    each = math.gcd(max(1, trainer.n_gpus_per_node), apart) if apart else max(1, trainer.n_gpus_per_node)
    machines = {"nodes": (ranks + apart) // each, "gpus_per_node": each, "memory": memory.capacity}
    if device == "cpu":
        product, copy = rates(memory.policy)
        speeds = {"flops": product / each, "bandwidth": 2 * copy, "host_copy": copy, "link": copy, "pcie": copy}
        cluster = Cluster.model_validate({**machines, **speeds, **ON_A_CPU})
        now = f"{product / 1e9:.0f} GFLOP/s in a matrix product, {copy / 1e9:.1f} GB/s in a copy"
        return cluster, f"this CPU now: {now}"
    name = torch.cuda.get_device_name()
    found = next((card for card in CARDS if all(word in name for word in card.split())), None)
    flops, bandwidth = CARDS[found or "H100"]
    if config.actor_rollout_ref.model.dtype == "float32":
        flops /= 2  # TF32's rate, the most that float32 products reach
    engine = {"step_fixed": EMBEDDED_STEP, "step_each": 0.0} if rollout.name == "embedded" else {}
    cluster = Cluster.model_validate({**machines, **engine, "flops": flops, "bandwidth": bandwidth})
    given = f"the data sheet of {found}" if found else f"an H100's data sheet, since none of {name} is known"
    return cluster, f"{given}; parts of the peak are assumed (docs/scale.md)"


def only_generate(config: Config) -> int:
    """Return the number of GPUs that only generate; 0: all devices do both in turn."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.server_urls is not None:
        return len(rollout.server_urls) * rollout.tensor_model_parallel_size
    return rollout.nnodes * rollout.n_gpus_per_node


def rates(shape: ModelShape) -> tuple[float, float]:
    """Measure this process: FLOPs a second of an MLP's product, and copied bytes a second. Takes about two seconds.

    Rates are means, so that other work of the machine counts. A copy reads and writes each of its bytes.
    """
    left, right = torch.ones(512, shape.hidden), torch.ones(shape.hidden, shape.intermediate)
    source = torch.ones(1 << 24)
    into = torch.ones_like(source)  # memory that the system has given already
    product = mean_seconds(lambda: torch.mm(left, right))
    copy = mean_seconds(lambda: into.copy_(source))
    return 2.0 * 512 * shape.hidden * shape.intermediate / product, source.nbytes / copy


def mean_seconds(call: Callable[[], object]) -> float:
    """Mean seconds of calls that are repeated for a second, after a first call that does not count."""
    call()
    count, began = 0, perf_counter()
    while (passed := perf_counter() - began) < 1.0:
        call()
        count += 1
    return passed / count


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
        if roles.rollout.name == "embedded" and plan.memory.device == "cuda":
            yield "actor_rollout_ref.rollout.name=sglang: the embedded engine waits for kernel launches"
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
