"""Memory of a training by part and moment, from its config and the models' `config.json`, before anything is loaded.

The formulas are in `agentrl.plan.sizing` (docs/scale.md). Lengths are taken at their longest, so a run whose
trajectories end earlier needs less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from agentrl.algorithms.declared import declared_by_estimator, needs_reference
from agentrl.config import Config
from agentrl.config.sections.parallel import Parallel, most_tokens
from agentrl.engines.embedded import blocked
from agentrl.engines.embedded.cache import COLUMNS
from agentrl.engines.embedded.pages import PAGE, in_pages
from agentrl.errors import ConfigError
from agentrl.model.folder import check_folder
from agentrl.model.packed import CHUNK_LOGITS, CHUNK_LOGITS_ON_GPU
from agentrl.model.read_config import read_config
from agentrl.plan import sizing
from agentrl.plan.counts import counted
from agentrl.plan.sizing import BFLOAT16, FLOAT32, ModelShape
from agentrl.system.json_value import JSON
from agentrl.workers.roles import policy_is_reference

Parts = Mapping[str, float]
"""Bytes by part."""

GB = 1e9
PROCESS = 0.75e9
"""Bytes of a process on a CPU that has imported torch and transformers, and holds a batch (measured: docs/plan.md)."""
PIECES = 2.0
"""Memory of an update's activations on a CPU over their sizes, where micro-batches of different sizes follow each
other: the C library keeps pieces that fit no other tensor (measured: docs/plan.md)."""
GPU_RESERVE = 0.08
"""Part of a GPU that CUDA's context, NCCL's buffers and gaps between blocks take (assumed: docs/scale.md)."""


TEACHERS = "teachers"


@dataclass(frozen=True, slots=True)
class Moment:
    """A time of the step, and the bytes that are held in it."""

    name: str
    parts: Parts

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of one rank: of its GPU, or on a CPU of its process."""

    config: Config
    device: str
    capacity: float
    """Bytes that there are."""
    _shapes: dict[tuple[str, bool], ModelShape] = field(default_factory=dict)
    """By path and by whether values replace those of the model's config, for plans of the same models."""

    def with_config(self, config: Config) -> MemoryPlan:
        """Plan another config of the same models."""
        return MemoryPlan(config, self.device, self.capacity, self._shapes)

    @property
    def policy(self) -> ModelShape:
        model = self.config.actor_rollout_ref.model
        return self._shape(model.path, model.override_config)

    def _shape(self, path: str, override: Mapping[str, JSON] = {}) -> ModelShape:
        key = path, bool(override)
        if key not in self._shapes:
            self._shapes[key] = read_shape(path, override)
        return self._shapes[key]

    @cached_property
    def states(self) -> Parts:
        """States that are held from the first step to the last, gradients apart: the least that the run needs."""
        roles, found = self.config.actor_rollout_ref, dict[str, float]()
        bytes_each = FLOAT32 if roles.model.dtype == "float32" else BFLOAT16
        ranks, params = self._ranks(roles.actor.parallel), self.policy.params
        if roles.model.lora_rank:
            found["policy's weights"] = params * bytes_each / ranks
        trained = sizing.state_bytes(self._trained, ranks, trained=True)
        found["adapters" if roles.model.lora_rank else "policy's weights"] = trained["weights"]
        if not roles.actor.fsdp_config.param_offload:
            moments = trained["optimizer"]
            found["policy's optimizer"] = moments if roles.actor.optim.name == "adamw" else moments / 2
        if self._has_reference:
            other = self._shape(roles.ref.path) if roles.ref.path else self.policy
            found["reference"] = other.params * bytes_each / self._ranks(roles.ref_parallel)
        if self._critic is not None:
            held = sizing.state_bytes(
                self._critic.backbone_params, self._ranks(self.config.critic.parallel), trained=True
            )
            found["critic's weights"], found["critic's optimizer"] = held["weights"], held["optimizer"]
        judge = self.config.reward_model
        if self.device != "cpu" and judge.starts_servers and not judge.enable_resource_pool:
            found["reward model's servers"] = judge.rollout.gpu_memory_utilization * self.capacity
        kept = not roles.actor.fsdp_config.param_offload
        return found | {name: sum(sizes) for name, (_, sizes) in self._scoring.items() if kept or name != TEACHERS}

    @cached_property
    def moments(self) -> list[Moment]:
        """The moments of a step that may be the fullest."""
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        awake, asleep = ({}, {}) if rollout.nnodes else self._engine
        at_rest = {**self._process, **self.states}
        training = {**at_rest, **asleep}
        scored = [rollout.log_prob_max_token_len_per_gpu]
        if self._has_reference:
            scored.append(self.config.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu)
        passing = self._forward(self.policy, max(map(most_tokens, scored)))
        found = [Moment("rollout", {**at_rest, **awake}), Moment("log-probs", {**training, **passing})]
        for name, (shape, sizes) in self._scoring.items():
            most = rollout.log_prob_max_token_len_per_gpu
            most = most if name == TEACHERS else self.config.reward_model.forward_max_token_len_per_gpu
            here = {**training, **self._forward(shape, most_tokens(most))}
            found.append(Moment(name, here if name in training else {**here, name: max(sizes)}))
        if self._critic is not None:
            shape, tokens = self._critic, most_tokens(self.config.critic.ppo_max_token_len_per_gpu)
            gradients = FLOAT32 * shape.backbone_params / self._ranks(self.config.critic.parallel)
            parts = {"gradients": gradients, "activations": self._activations(shape, tokens)}
            found.append(Moment("critic's update", {**training, **parts}))
        tokens = most_tokens(actor.ppo_max_token_len_per_gpu)
        parts = {
            "gradients": FLOAT32 * self._trained / self._ranks(actor.parallel),
            "activations": self._activations(self.policy, tokens),
            **self._forward_only(self.policy, tokens),
        }
        found.append(Moment("update", {**training, **parts}))
        return found

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def updates_fit(self) -> bool:
        """Say whether there is room for the moments that keep activations for a backward pass."""
        return all(moment.total <= self.capacity for moment in self.moments if moment.name.endswith("update"))

    @property
    def least(self) -> float:
        """Bytes without which no step can be made, however short its trajectories are."""
        return sum(self.states.values())

    @property
    def _process(self) -> Parts:
        if self.device == "cpu":
            return {"process": PROCESS}
        return {"CUDA, NCCL, gaps": GPU_RESERVE * self.capacity}

    @property
    def _trained(self) -> int:
        """Parameters of the policy that learn."""
        rank = self.config.actor_rollout_ref.model.lora_rank
        return self.policy.lora_params(rank) if rank else self.policy.params

    @property
    def _has_reference(self) -> bool:
        return needs_reference(self.config) and not policy_is_reference(self.config)

    @cached_property
    def _critic(self) -> ModelShape | None:
        if "values" not in declared_by_estimator(self.config).columns:
            return None
        path = self.config.critic.path
        return self._shape(path) if path else self.policy

    @cached_property
    def _scoring(self) -> dict[str, tuple[ModelShape, list[float]]]:
        """Models that only score, on the devices that train: the largest of their shapes, and the bytes of each."""
        found = dict[str, tuple[ModelShape, list[float]]]()
        bytes_each = FLOAT32 if self.config.actor_rollout_ref.model.dtype == "float32" else BFLOAT16
        if shapes := [self._shape(path) for path in self.teacher_paths]:
            ranks = self._ranks(self.config.teacher_parallel)
            largest = max(shapes, key=lambda shape: shape.params)
            found[TEACHERS] = largest, [shape.params * bytes_each / ranks for shape in shapes]
        if (shape := self.reward_model) is not None:
            found["reward model"] = shape, [shape.backbone_params * bytes_each / self.ranks]
        return found

    @property
    def teacher_paths(self) -> list[str]:
        """Teachers that the trainer's devices hold: all but servers and the policy itself."""
        return [one.path for _, one in self.config.distillation.teachers if one.path is not None and not one.is_policy]

    @property
    def teacher(self) -> ModelShape | None:
        """The largest teacher that the trainer's devices compute; None without any."""
        itself = [self.policy] if any(one.is_policy for _, one in self.config.distillation.teachers) else []
        shapes = [*itself, *map(self._shape, self.teacher_paths)]
        return max(shapes, key=lambda shape: shape.active_params, default=None)

    @property
    def reward_model(self) -> ModelShape | None:
        """A reward model on the trainer's devices; None without it."""
        scoring = self.config.reward_model
        on_these = scoring.classifies and not scoring.enable_resource_pool
        return self._shape(scoring.model.path) if on_these and scoring.model.path is not None else None

    @property
    def ranks(self) -> int:
        """Ranks that train."""
        trainer = self.config.trainer
        return max(1, trainer.nnodes * trainer.n_gpus_per_node)

    def _ranks(self, parallel: Parallel) -> int:
        """Ranks that hold a copy of a role's parameters together."""
        return parallel.shards * parallel.tensor if parallel.shards else self.ranks

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence."""
        data = self.config.data
        return data.max_prompt_length + data.max_response_length

    def _micro_batch(self, most: int) -> int:
        """Tokens that the largest micro-batch computes, where `most` are allowed.

        On a CPU prompts that trajectories share are computed once, and all sequences are at their longest. On a GPU
        shorter sequences may fill the micro-batch up to the last token.
        """
        data, n = self.config.data, self.config.actor_rollout_ref.rollout.n
        if self.device != "cpu":
            return min(max(most, self._longest), self.sequences * self._longest)
        sequences = max(1, min(most // self._longest, self.sequences))
        return -(-sequences // n) * data.max_prompt_length + sequences * data.max_response_length

    @property
    def _autocast(self) -> bool:
        return self.config.actor_rollout_ref.model.dtype == "bfloat16"

    def _activations(self, shape: ModelShape, most: int) -> float:
        model, tokens = self.config.actor_rollout_ref.model, self._micro_batch(most)
        recomputed = model.recomputed(shape.layers)
        kept = sizing.activation_bytes(
            shape,
            tokens,
            autocast=self._autocast,
            recomputed=recomputed,
            offload=model.enable_activation_offload,
        )
        if self.device != "cpu":
            return kept
        # The gradients of a recomputed layer lie next to it (measured: docs/plan.md).
        beside = tokens * sizing.layer_activation_bytes(shape, autocast=self._autocast)
        actor, n = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        is_only = min(actor.ppo_mini_batch_size * n, self.sequences) * self._longest <= most
        return (1.0 if is_only else PIECES) * (kept + beside if recomputed else kept)

    def _forward_only(self, shape: ModelShape, most: int) -> Parts:
        """Logits of a chunk, and the bfloat16 copies of matrices that autocast makes on one device."""
        scored = self._micro_batch(most)
        found = {
            "logits": sizing.logits_bytes(shape, scored, CHUNK_LOGITS if self.device == "cpu" else CHUNK_LOGITS_ON_GPU)
        }
        if self._autocast:
            found["casts"] = float(BFLOAT16 * (shape.layers * shape.layer_params + shape.head_params))
        return found

    def _forward(self, shape: ModelShape, most: int) -> Parts:
        one = sizing.layer_activation_bytes(shape, autocast=self._autocast) * self._micro_batch(most)
        return {"activations": one, **self._forward_only(shape, most)}

    @property
    def _engine(self) -> tuple[Parts, Parts]:
        """Bytes of the engine while it generates, and while the policy is updated."""
        roles = self.config.actor_rollout_ref
        rollout, shape = roles.rollout, self.policy
        bytes_each = FLOAT32 if roles.model.dtype == "float32" else BFLOAT16
        if rollout.name != "embedded":
            if self.device == "cpu" or rollout.server_urls is not None:
                return {}, {}
            held = {"engine": rollout.gpu_memory_utilization * self.capacity}
            if not rollout.free_cache_engine:
                return held, held
            weights = {"engine's weights": shape.params * bytes_each / rollout.tensor_model_parallel_size}
            return held, {} if self.config.frees_weights else weights
        weights = {"engine's weights": float(shape.params * bytes_each)}
        working = {"engine's cache": float(self._cells * sizing.kv_bytes(shape, dtype=bytes_each))}
        linear = shape.layers * shape.layer_params
        if self.device == "cpu" and bytes_each == FLOAT32 and linear >= blocked.LEAST:
            working["engine's blocked copies"] = float(FLOAT32 * (linear + shape.head_params))
        awake = {**weights, **working}
        return awake, weights if rollout.free_cache_engine else awake

    @property
    def rows(self) -> int:
        """Sequences that an embedded engine generates at once."""
        return min(self.config.actor_rollout_ref.rollout.max_num_seqs, self.sequences)

    @property
    def decodes_by_graphs(self) -> bool:
        """Say whether an embedded engine would decode by graphs, over pages. Models with states have no plan."""
        roles = self.config.actor_rollout_ref
        asked, recorded = roles.rollout.engine_kwargs.embedded.paged, roles.actor.router_replay.of_engine
        return in_pages(self.device, asked, has_states=False, records_experts=recorded)[0]

    @property
    def sequences(self) -> int:
        """Trajectories of a step."""
        return self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n

    @property
    def _cells(self) -> int:
        """Tokens that the embedded engine's cache has room for: it keeps a prompt once for its trajectories, and grows
        by doubling, in pages on a GPU."""
        prompts = min(self.rows, self.config.data.train_batch_size)
        own, prompt = self.config.data.max_response_length, self.config.data.max_prompt_length
        if self.decodes_by_graphs:
            return PAGE * doubled(self.rows * -(-own // PAGE) + prompts * -(-prompt // PAGE), 1)
        return doubled(self.rows, 1) * doubled(own, COLUMNS) + doubled(prompts, 1) * doubled(prompt, COLUMNS)


def check_room(config: Config, device: str, room: float, warn: Callable[[str], None]) -> None:
    """Raise ConfigError where the states of a run alone take more than `room` bytes; warn where a full step may.

    Ranks on one machine share its memory, on a CPU. Models whose size cannot be counted are not checked.
    """
    actor = config.actor_rollout_ref.actor
    if actor.strategy not in ("fsdp", "fsdp2"):
        return
    ranks = config.trainer.n_gpus_per_node if device == "cpu" else 1
    plan = MemoryPlan(config, device, room / max(1, ranks))
    try:
        least, fullest = plan.least, plan.fullest
    except ConfigError:
        return
    where = "process" if device == "cpu" else "GPU"
    if least > plan.capacity:
        parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in plan.states.items())
        raise ConfigError(
            f"the run does not fit: a {where} has {plan.capacity / GB:.1f} GB, and what is held from the first step to "
            f"the last takes {least / GB:.1f} ({parts}). Take more ranks, adapters "
            "(actor_rollout_ref.model.lora_rank=16) or a smaller model; python -m agentrl.plan shows all parts"
        )
    if fullest.total > plan.capacity:
        warn(
            f"the fullest moment ({fullest.name}) may take {fullest.total / GB:.1f} of {plan.capacity / GB:.1f} GB, "
            "with sequences at their longest; python -m agentrl.plan shows which part, and what makes it smaller"
        )


def doubled(least: int, start: int) -> int:
    """Double `start` until it is at least `least`."""
    while start < least:
        start *= 2
    return start


def read_shape(path: str, override: Mapping[str, JSON]) -> ModelShape:
    """Read the shape of a model from its config.json. Raises ConfigError for a model that is not counted."""
    if path == "quickstart":
        raise ConfigError(
            "the quickstart's policy of 0.36 million parameters is made when a run begins; name a model: "
            "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B"
        )
    if not Path(path).exists():
        check_folder("actor_rollout_ref.model.path", path)
    try:
        found, _ = PreTrainedConfig.get_config_dict(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the model's config.json cannot be read: {error}\nGive the folder of a model, or a name that the "
            "Hugging Face hub knows, where it can be reached"
        ) from None
    if not found:
        raise ConfigError(f"{path}: the model's config.json cannot be read: the folder has none")
    try:
        try:
            config = read_config(path, override)
        except (
            KeyError,
            TypeError,
            ValueError,
            StrictDataclassError,
        ):  # unknown to transformers, e.g. with code of its own
            return ModelShape.from_config({**found, **override})
        return counted(config)
    except ValueError as error:
        raise ConfigError(f"{path}: a plan counts decoders of attention and gated MLPs; {error}") from None
