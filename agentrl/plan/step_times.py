"""Seconds of a training step on a cluster, stage by stage, and what lies in a GPU's memory meanwhile.

A cluster has speeds, a plan says who does what; the arithmetic is in `sizing.py`. Everything is computed from
these, nothing is measured: parts of the peak that are reached (`mfu_*`, `bandwidth_used`) are assumptions, or come from
`step_calibration.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.plan import sizing
from agentrl.plan.simulated_servers import Session, Speed
from agentrl.plan.sizing import BFLOAT16, FLOAT32, ModelShape, Work
from agentrl.runtime.ranks import shares


class Options(BaseModel):
    """Fields are options of a command; their docstrings are its help."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid", frozen=True)


class Cluster(Options):
    """Machines of alike GPUs. Bytes, bytes and FLOPs a second; by GPU where nothing else is said."""

    nodes: int = 1
    gpus_per_node: int = 8
    flops: float = 989e12
    """Peak, dense, in the type that is computed in."""
    memory: float = 80e9
    bandwidth: float = 3.35e12
    link: float = 450e9
    """Bytes a second from a GPU to the others of its machine, one way."""
    network: float = 400e9
    """Bytes a second from a machine to others, one way, all its cards together."""
    pcie: float = 50e9
    host_copy: float = 10e9
    """One copy in a machine's memory, as through Ray's object store."""
    disk: float = 2e9
    """Bytes a second of the disk of the run's folder."""
    mfu_update: float = 0.40
    """Part of `flops` that an update reaches."""
    mfu_forward: float = 0.45
    mfu_prefill: float = 0.45
    attention_slower: float = 1.0
    """How many times as long a FLOP between tokens takes as one of a linear layer; in updates and log-probs."""
    bandwidth_used: float = 0.7
    """Part of `bandwidth` that decoding reaches."""
    step_fixed: float = 0.003
    """Seconds of a decode step that neither weights, nor tokens, nor contexts explain: launches, scheduling."""
    step_each: float = 2e-5
    """Seconds of it for each running request: sampling, its tokens' way out."""

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


class Plan(Options):
    """A training on it."""

    prompts: int = 128
    n: int = 8
    """Trajectories a prompt."""
    mini_batch: int = 128
    """Prompts an optimizer step."""
    epochs: int = 1
    micro_tokens: int = 16384
    """Tokens a micro-batch of a rank (ppo_max_token_len_per_gpu)."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    lora_rank: int = 0
    serves_adapters: bool = False
    """Servers are sent adapters alone, in files, and serve them unmerged."""
    recompute: float = Field(1.0, ge=0, le=1)
    """Part of the layers that are computed again in the backward pass (activation checkpointing)."""
    fsdp_size: int = 0
    """Ranks that hold a copy of the model together; 0: all that train. Copies add up their gradients."""
    sequence_parallel: int = 1
    """Ranks that share a sequence (Ulysses)."""
    offload_optimizer: bool = False
    """AdamW's moments wait in the host's memory until they are needed."""
    offload_params: bool = False
    """Weights wait in the host's memory while the policy does nothing."""
    reference: bool = False
    critic: bool = False
    """A critic of the policy's shape."""
    teacher: str = ""
    """A teacher's model, as --model, which lies on the GPUs that train; empty: no teacher."""
    scope: Literal["sampled", "top_k", "full"] = "sampled"
    """Part of the teacher's distributions that is compared (distillation.scope)."""
    top_k: int = 64
    rollout_gpus: int = 0
    """GPUs that only generate; 0: all GPUs do both in turn."""
    tp: int = 1
    """GPUs of a server."""
    engine_memory: float = 0.5
    """Part of a GPU that a server takes (gpu_memory_utilization)."""
    free_engine: bool = False
    """Give a server's memory back while the policy is updated (free_cache_engine)."""
    running: int = 256
    """Requests that a server runs at once (max_num_seqs)."""
    concurrent: int = 1024
    """Trajectories at once."""
    transport: Literal["tensor", "distributed", "disk"] = "tensor"
    delta_share: float = 1.0
    """Share of the weights' elements that a step changes, where only these are sent (update_weights_delta); 1: all
    weights are sent."""
    delta_on_ranks: bool = False
    """The ranks find the changes before weights leave their GPUs. It is not built: senders find them after Ray."""
    save_every: int = 20
    """Steps from one checkpoint to the next; 0: no checkpoints."""
    chunk_logits: int = 1 << 27
    """Logits alive at once."""
    by_parts: bool = False
    """An update takes micro-batches through the head in parts of whole sequences, which makes the logits of sequences
    that fit into a chunk once. agentrl does so on one GPU."""
    share_prompts: bool = False
    """The trajectories of a prompt compute it once, as the CPU's attention does."""
    common_tokens: int = 0
    """Tokens that all prompts begin with, which a micro-batch then computes once, too."""
    reserve: float = 0.08
    """Part of a GPU that CUDA's context, NCCL's buffers and gaps between blocks take."""

    @property
    def bytes(self) -> int:
        return FLOAT32 if self.dtype == "float32" else BFLOAT16


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds. Computing and gathering weights go side by side; what exchanges activations cannot."""

    name: str
    compute: float = 0.0
    traffic: float = 0.0
    serial: float = 0.0
    note: str = ""

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic) + self.serial


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a GPU by part, in the moments that may be the fullest."""

    capacity: float
    moments: dict[str, dict[str, float]] = field(default_factory=dict)

    def total(self, moment: str) -> float:
        return sum(self.moments[moment].values())

    @property
    def fits(self) -> bool:
        return all(self.total(moment) <= self.capacity for moment in self.moments)


@dataclass(frozen=True, slots=True)
class Training:
    """A model of a shape, trained by a plan on a cluster."""

    cluster: Cluster
    plan: Plan
    shape: ModelShape
    teacher: ModelShape | None = None
    reward_model: ModelShape | None = None
    """A classifier that scores whole conversations on the GPUs that train."""

    def __post_init__(self) -> None:
        """Raises ValueError for a plan that cannot be placed."""
        plan, trainers = self.plan, self.trainers
        if trainers < 1 or trainers % plan.sequence_parallel:
            raise ValueError(
                f"{trainers} GPUs that train cannot be split by sequence_parallel={plan.sequence_parallel}"
            )
        if trainers % self.shards:
            raise ValueError(f"{trainers} GPUs that train cannot be split by fsdp_size={plan.fsdp_size}")
        if self.rollout_gpus % plan.tp:
            raise ValueError(f"{self.rollout_gpus} GPUs that generate cannot be split by tp={plan.tp}")

    @property
    def trainers(self) -> int:
        return self.cluster.gpus - self.plan.rollout_gpus

    @property
    def shards(self) -> int:
        """Ranks that hold a copy of each model together."""
        return self.plan.fsdp_size or self.trainers

    @property
    def rollout_gpus(self) -> int:
        return self.plan.rollout_gpus or self.cluster.gpus

    @property
    def servers(self) -> int:
        return self.rollout_gpus // self.plan.tp

    @property
    def trained(self) -> int:
        """Parameters of the policy that learn."""
        return self.shape.lora_params(self.plan.lora_rank) if self.plan.lora_rank else self.shape.params

    # Rollouts

    @property
    def kv_tokens(self) -> int:
        """Tokens that a server's cache holds. Raises ValueError when its memory does not even hold the weights."""
        plan, shape = self.plan, self.shape
        room = plan.engine_memory * self.cluster.memory - sizing.sharded(shape, plan.tp, dtype=plan.bytes)
        tokens = int(room * plan.tp // sizing.kv_bytes(shape, dtype=plan.bytes))
        if tokens < 1:
            raise ValueError(
                f"engine_memory={plan.engine_memory:g} of {self.cluster.memory / 1e9:g} GB on {plan.tp} GPUs does not "
                f"hold the model's {sizing.sync_bytes(shape, dtype=plan.bytes) / 1e9:.0f} GB: raise tp or engine_memory"
            )
        return tokens

    def speed(self) -> Speed:
        """Speed of one server: a decoding step reads all weights once and the contexts of its requests, and then
        computes each request's products, as if nothing of both overlapped."""
        cluster, plan, shape = self.cluster, self.plan, self.shape
        rate = cluster.bandwidth * cluster.bandwidth_used * plan.tp
        computing = cluster.flops * cluster.mfu_prefill * plan.tp
        weights = shape.params - (0 if shape.tied else shape.head_params)  # the embedding is looked up
        prefill = 2.0 * shape.active_params
        return Speed(
            prefill=computing / prefill,
            prefill_fixed=cluster.step_fixed / 4,  # several prefills share a step
            step_fixed=cluster.step_fixed + weights * plan.bytes / rate,
            step_each=cluster.step_each + (prefill + 2.0 * shape.head_params) / computing,
            step_token=sizing.kv_bytes(shape, dtype=plan.bytes) / rate,
            max_running=plan.running,
            kv_tokens=self.kv_tokens,
        )

    # Passes of the trainer

    def work(self, sessions: Sequence[Session]) -> tuple[Work, int]:
        """Work of the fullest rank (where ranks share sequences: of all these together), and its micro-batches."""
        plan = self.plan
        groups = self.trainers // plan.sequence_parallel
        lengths = [s.prompt + sum(s.answers) + sum(s.observations) for s in sessions]
        heaviest, rounds = Work(0.0, 0.0, 0.0), 0
        for rows in shares(lengths, groups):
            tokens = sum(lengths[row] for row in rows)
            rounds = max(rounds, math.ceil(tokens / (plan.micro_tokens * plan.sequence_parallel)))
            part = Work.from_lengths([lengths[row] for row in rows], sum(sum(sessions[row].answers) for row in rows))
            if plan.share_prompts:
                prompts = {sessions[row].group: sessions[row].prompt for row in rows}
                repeated = [sessions[row].prompt for row in rows]
                for prompt in prompts.values():
                    repeated.remove(prompt)
                part = without(part, [*repeated, *[plan.common_tokens] * (len(prompts) - rounds)])
            if sizing.forward_flops(self.shape, part) >= sizing.forward_flops(self.shape, heaviest):
                heaviest = part
        return heaviest, rounds

    def forward(self, name: str, sessions: Sequence[Session], *, head: bool = True) -> Stage:
        """Log-probs, or values, of all tokens."""
        work, rounds = self.work(sessions)
        work = work if head else Work(work.tokens, work.squares, 0.0)
        flops = sizing.forward_flops(self.shape, work) + self._slower_attention(work)
        compute = flops / self._rate(self.cluster.mfu_forward)
        traffic = sizing.fsdp_bytes(self.shape.params, self.shards, rounds, trained=False, dtype=self.plan.bytes)
        return Stage(name, compute, traffic / self._wire, self._exchange(work, 1))

    def passes(self, sessions: Sequence[Session]) -> list[Stage]:
        """Stages of the trainer between a step's rollout and its weights' way to the engine."""
        found = []
        if self.reward_model is not None:
            found.append(self._of(self.reward_model).forward("reward_model", sessions, head=False))
        found.append(self.forward("old_log_prob", sessions))
        if self.plan.reference:
            found.append(self.forward("ref_log_prob", sessions))
        if self.plan.critic:
            found += [self.forward("values", sessions, head=False), self.update("update_critic", sessions, head=False)]
        if self.teacher is not None:
            found.append(self._of(self.teacher).forward("teacher", sessions))
        return [*found, self.update("update_actor", sessions)]

    def _of(self, shape: ModelShape) -> Training:
        """Return the same training of another model alone."""
        return replace(self, shape=shape, teacher=None, reward_model=None)

    def update(self, name: str, sessions: Sequence[Session], *, head: bool = True) -> Stage:
        """All optimizer steps of a training step."""
        plan, cluster, shape = self.plan, self.cluster, self.shape
        lora = bool(plan.lora_rank) and head
        trained = self.trained if head else shape.params
        steps = math.ceil(plan.prompts / plan.mini_batch)
        by_group: dict[int, list[Session]] = {}
        for session in sessions:
            by_group.setdefault(session.group, []).append(session)
        groups, compute, traffic, serial = list(by_group.values()), 0.0, 0.0, 0.0
        for step in range(steps):
            mini = [s for group in groups[step::steps] for s in group]
            work, rounds = self.work(mini)
            work = work if head else Work(work.tokens, work.squares, 0.0)
            several = work.scored / max(rounds, 1) * shape.vocab > plan.chunk_logits
            flops = sizing.update_flops(
                shape,
                work,
                recompute=plan.recompute,
                lora=lora,
                recompute_head=self._logits_made_again(mini) if several and head else 0.0,
            )
            flops += self._slower_attention(work) * (3 + plan.recompute)
            compute += flops / self._rate(cluster.mfu_update)
            dtype = FLOAT32 if lora else self.plan.bytes
            sums = sizing.fsdp_bytes(trained, self.shards, rounds, trained=True, dtype=dtype)
            frozen = sizing.fsdp_bytes(shape.params, self.shards, 2 * rounds, trained=False, dtype=plan.bytes)
            traffic += (frozen + sums if lora else sums) / self._wire
            copies = self.trainers // self.shards
            traffic += rounds * 2 * sizing.ring(trained * FLOAT32 / self.shards, copies) / self._own_network
            serial += self._exchange(work, 2 + plan.recompute)
            serial += self.optimizer_seconds(trained)
        return Stage(name, plan.epochs * compute, plan.epochs * traffic, plan.epochs * serial)

    def _logits_made_again(self, sessions: Sequence[Session]) -> float:
        """Compute the part of the scored tokens whose logits are made again in the backward pass."""
        if not self.plan.by_parts:
            return 1.0
        scored = [sum(session.answers) for session in sessions]
        most = self.plan.chunk_logits // self.shape.vocab
        return sum(count for count in scored if count > most) / max(sum(scored), 1)

    def optimizer_seconds(self, trained: int) -> float:
        """AdamW reads 16 bytes a parameter and writes 12; moments that wait in the host's memory come and go."""
        mine = trained / self.shards
        moving = 2 * mine * sizing.ADAMW / self.cluster.pcie if self.plan.offload_optimizer else 0.0
        return mine * (16 + 12) / self.cluster.bandwidth + moving

    def sync(self) -> Stage:
        """The policy's weights to the servers: gathered, to the driver through the object store, and to the servers."""
        cluster, plan = self.cluster, self.plan
        if plan.serves_adapters:
            files = self.shape.lora_params(plan.lora_rank) * plan.bytes
            return Stage("sync_weights", serial=2 * files / cluster.disk, note=f"{files / 1e9:.3g} GB of adapters")
        size = sizing.sync_bytes(self.shape, dtype=plan.bytes)
        stored = plan.bytes if plan.lora_rank else FLOAT32
        gather = sizing.ring(self.shape.params * stored, self.shards) / self._wire
        machines = max(1, math.ceil(self.rollout_gpus / cluster.gpus_per_node))
        sent = min(size, sizing.delta_bytes(self.shape, plan.delta_share, dtype=plan.bytes))
        read = sent if plan.delta_on_ranks else size
        ray = (size / cluster.pcie + 2 * read / cluster.host_copy) if self.trainers > 1 else 0.0
        send = {
            "tensor": sent / cluster.host_copy + sent * min(self.rollout_gpus, cluster.gpus_per_node) / cluster.pcie,
            "distributed": sent / cluster.pcie + sent / (cluster.network if machines > 1 else cluster.link),
            "disk": sent / cluster.disk + sent * machines / cluster.disk,
        }[plan.transport]
        found_late = plan.delta_share < 1 and not plan.delta_on_ranks
        find = 2 * size / cluster.host_copy if found_late else 0.0  # on the sender's processors; on ranks by the GPU
        return Stage("sync_weights", serial=gather + ray + find + send, note=f"{sent / 1e9:.3g} GB by {plan.transport}")

    def save(self) -> Stage:
        """A checkpoint, spread over the steps between two."""
        if not self.plan.save_every:
            return Stage("save")
        size = sizing.checkpoint_bytes(self.trained) + (
            sizing.checkpoint_bytes(self.shape.params) if self.plan.critic else 0.0
        )
        note = f"{size / 1e9:.3g} GB every {self.plan.save_every} steps"
        return Stage("save", serial=size / self.cluster.disk / self.plan.save_every, note=note)

    def _slower_attention(self, work: Work) -> float:
        """FLOPs of linear layers that take as long as what attention takes too long for."""
        return sizing.attention_flops(self.shape, work) * (self.cluster.attention_slower - 1)

    def _rate(self, mfu: float) -> float:
        """FLOPs a second of the ranks that share sequences."""
        return self.cluster.flops * mfu * self.plan.sequence_parallel

    @property
    def _wire(self) -> float:
        """Bytes a second that a ring over the GPUs of a copy brings each of them: rings go through every card of a
        machine at once, so that what enters a machine is shared by all its GPUs."""
        several = self.shards > self.cluster.gpus_per_node
        return min(self.cluster.link, self.cluster.network) if several else self.cluster.link

    @property
    def _own_network(self) -> float:
        """Bytes a second of one GPU to other machines, where all GPUs of its machine talk to GPUs of others, each
        with its own part of the model."""
        return self.cluster.network / self.cluster.gpus_per_node

    def _exchange(self, work: Work, passes: float) -> float:
        size = self.plan.sequence_parallel
        return sizing.ulysses_bytes(self.shape, work.tokens, size, passes=passes) / self.cluster.link


def without(work: Work, beginnings: Sequence[int]) -> Work:
    """Beginnings of so many tokens left out, which are computed for other sequences anyway."""
    squares = sum(length**2 for length in beginnings)
    return Work(work.tokens - sum(beginnings), work.squares - squares, work.scored)


def gpu_memory(training: Training) -> Memory:
    """Memory of a GPU that trains."""
    plan, shape, cluster = training.plan, training.shape, training.cluster
    ranks, tokens = training.shards, plan.micro_tokens
    autocast, lora = plan.dtype == "bfloat16", bool(plan.lora_rank)
    own = sizing.state_bytes(training.trained, ranks, trained=True)
    base = {"weights beside adapters": shape.params * plan.bytes / ranks} if lora else {}
    weights = {} if plan.offload_params else {"weights": own["weights"], **base}
    moments = {} if plan.offload_optimizer else {"optimizer": own["optimizer"]}
    fixed: dict[str, float] = {"reserve": plan.reserve * cluster.memory}
    if plan.reference and not lora:
        fixed["reference"] = shape.params * plan.bytes / ranks
    if training.teacher is not None:
        head = training.teacher.head_params * plan.bytes if plan.scope == "full" else 0
        fixed["teacher"] = training.teacher.params * plan.bytes / ranks + head
    if training.reward_model is not None:
        fixed["reward model"] = training.reward_model.backbone_params * plan.bytes / ranks
    if plan.critic:
        critic = sizing.state_bytes(shape.params, ranks, trained=True)
        fixed["critic"] = critic["weights"] + (0.0 if plan.offload_optimizer else critic["optimizer"])
    colocated = not plan.rollout_gpus
    engine = {"engine": plan.engine_memory * cluster.memory} if colocated else {}
    beside = {} if plan.free_engine else engine
    logits = sizing.logits_bytes(shape, tokens, plan.chunk_logits)
    awake = {"weights": own["weights"], **base}
    cast = autocast and training.plan.bytes == FLOAT32
    outer = plan.bytes if lora else FLOAT32
    gathered, reading = (
        sizing.gathered_bytes(shape, dtype=training.plan.bytes, outer=outer, trained=trained, cast=cast)
        for trained in (not lora, False)
    )
    recomputed = round(plan.recompute * shape.layers)
    kept = sizing.activation_bytes(shape, tokens, autocast=autocast, recomputed=recomputed)
    layer = sizing.layer_activation_bytes(shape, autocast=autocast) * tokens
    update = {"gradients": own["gradients"], "gathered": gathered, "activations": kept, "logits": logits}
    moments_of = {
        "log-probs": fixed | beside | awake | moments | {"gathered": reading, "activations": layer, "logits": logits},
        "update": fixed | beside | awake | moments | update,
        "optimizer step": fixed | beside | awake | own,
    }
    if colocated:
        moments_of["rollout"] = fixed | engine | weights | moments
    return Memory(cluster.memory, moments_of)


def host_memory(training: Training, tokens: float) -> dict[str, float]:
    """Bytes of a machine's memory by use, without programs and the page cache."""
    plan, per_node = training.plan, min(training.cluster.gpus_per_node, training.trainers) / training.shards
    models = 1 + plan.critic
    learnt = training.trained + (training.shape.params if plan.critic else 0)
    parts = {"a step's batch": sizing.batch_bytes(tokens)}
    if training.teacher is not None:
        beside = {"sampled": 0, "top_k": 2 * plan.top_k, "full": training.teacher.hidden}[plan.scope]
        parts["a teacher's scores"] = tokens * FLOAT32 * (1 + beside)
    if plan.offload_optimizer:
        parts["optimizer"] = learnt * sizing.ADAMW * per_node
    if plan.offload_params:
        parts["weights"] = models * training.shape.params * FLOAT32 * per_node
    return parts
