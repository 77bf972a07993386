"""The interface between training algorithms and the models that learn, for all ways to hold, shard or step them.

A policy worker plans mini-batches, names the loss and reads the metrics; its backend runs forward passes and takes
optimizer steps. `actor_rollout_ref.actor.strategy` names it (`agentrl.config.registries.POLICY_BACKENDS`).

On several ranks every rank has a backend of its own, and every method is called on all of them in the same order. Whole
batches are handed to all: a backend takes its rank's share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.parallel import Parallel, most_tokens
from agentrl.model.scores import Compare, Needs, TokenScores
from agentrl.observe.watch import UpdateWatch
from agentrl.runtime.ranks import RankWeights
from agentrl.trajectory.batch import RaggedBatch, Sequences

Found = TypeVar("Found")
AUX_LOSS, Z_LOSS = "moe_aux_loss", "moe_z_loss"
"""Sums that a backend adds to the loss's sums: load balance and z-loss of a mixture's routers, unweighted."""


Loss = Callable[[Found, RaggedBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Function of the forward pass's result and the micro-batch's columns. It returns this micro-batch's share of the loss
(scalar with gradient), and numbers to be added up over the mini-batch (scalars, no gradient).

The share is divided by counts over the whole mini-batch, so shares simply add up.
"""


@dataclass(frozen=True, slots=True)
class MiniBatch(Generic[Found]):
    """The sequences and the loss of one optimizer step."""

    where: str
    """Names it in messages."""
    sequences: Sequences
    """The same micro-batches on every rank; without any, the step has gradient 0."""
    loss: Loss[Found]
    """A pure function, called for each micro-batch of a rank's share."""
    needs: Needs = frozenset()
    """Scores that `loss` reads in addition to log-probs."""
    compare: Callable[[RaggedBatch], Compare] | None = None
    """Makes of a micro-batch the function that the forward pass calls with its distributions, for
    `TokenScores.divergence`."""
    reads: Callable[[RaggedBatch], torch.Tensor] | None = None
    """Marks the tokens [T] of a micro-batch whose log-probs `loss` reads; None: its mask."""
    beside: MiniBatch[Found] | None = None
    """Other sequences whose loss is added in the same optimizer step; its sums have other names."""
    watches: Sequence[UpdateWatch[Found]] = ()
    """Observers of the step. A backend that does not call them is not checked."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one optimizer step."""

    sums: dict[str, float]
    """The loss function's sums over all micro-batches and ranks (empty or 0 without any), and always `loss`."""
    grad_norm: float
    """Over all parameters of all ranks, before clipping; not finite: no step was taken."""
    lr: float

    @property
    def loss(self) -> float:
        """The mini-batch's loss."""
        return self.sums["loss"]


class Backend(Protocol[Found]):
    """A model that learns. Its forward pass gives a `Found` for each micro-batch."""

    def on_device(self) -> AbstractContextManager[None]:
        """Hold the model where it computes, for calls that follow each other. Nests."""
        ...

    def step(self, mini: MiniBatch[Found], step: float) -> StepReport:
        """Take one optimizer step, at the learning rate of training step `step` (counted from 1).

        With optim.lr_by_mini_batch it has a fraction: the mini-batch at place i of n in step s is at s + i / n.

        Where the loss or the gradient norm is not finite, weights and optimizer state stay as they are.
        """
        ...

    def share_of(self, sequences: Sequences) -> RaggedBatch:
        """Load this rank's share of sequences that all ranks are given."""
        ...

    def sum(self, values: torch.Tensor) -> list[float]:
        """Add up numbers [n] float64 over the ranks that have different sequences."""
        ...

    def save(self, dir: Path, *, background: bool) -> list[str]:
        """Begin to write the trained parameters and their optimizer state into `dir`, to be continued from bit for bit.

        Returns the files in `dir` that this rank writes. With `background` this returns when everything is copied.
        """
        ...

    def finish_save(self, *, wait: bool) -> bool:
        """Return true when this rank's files of the last save are on the disk. Raises the error of writing them."""
        ...

    def load(self, dir: Path) -> None:
        """Load the parts saved by any number of ranks. Raises CheckpointError when they are damaged or of another
        model."""
        ...


class PolicyBackend(Backend[TokenScores], Protocol):
    """A policy that learns."""

    def log_probs(self, batch: RaggedBatch, needs: Needs) -> TokenScores:
        """Score the tokens of this rank's share without gradient, on the CPU."""
        ...

    def reference_log_probs(self, batch: RaggedBatch) -> torch.Tensor:
        """Compute `log_probs` without adapters: [T] float32. Asked only of models that have adapters."""
        ...

    def keep(self) -> None:
        """Copy the weights that learn to host memory, for `kept`."""
        ...

    def kept(self) -> AbstractContextManager[None]:
        """Hold the weights of the last `keep` in place of the present ones."""
        ...

    def weights(self) -> RankWeights:
        """Return the weights in the dtype that engines compute in, by their names in checkpoints.

        Adapters are merged, unless the config says lora_merge=false and the answer has them.
        """
        ...

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, whole, in the configured dtype."""
        ...


class CriticBackend(Backend[torch.Tensor], Protocol):
    """A critic that learns; its forward pass gives values [T] float32."""

    def values(self, batch: RaggedBatch) -> torch.Tensor:
        """[T] float32 on the CPU, without gradient: the value of the state before each token of this rank's share."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model learns. A backend refuses with a ConfigError every option that it does not support."""

    section: ActorConfig
    """Keys by which it learns: the config's own section of the policy. A critic has its own keys in their place
    (`CriticConfig.over`), a model that learns from files its own (`agentrl.workers.sft.section_of`)."""
    model: ModelConfig
    device: str | torch.device
    total_steps: int
    """Training steps in which the model learns, for the learning rate."""

    @property
    def optim(self) -> OptimConfig:
        return self.section.optim

    @property
    def parallel(self) -> Parallel:
        return self.section.parallel

    @property
    def grad_clip(self) -> float:
        """Largest gradient norm."""
        return self.section.grad_clip

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch and rank, at most."""
        return most_tokens(self.section.ppo_max_token_len_per_gpu)

    @property
    def freeze_vision_tower(self) -> bool:
        return self.section.freeze_vision_tower

    @property
    def param_offload(self) -> bool:
        """Parameters, and the optimizer's state between steps, lie in host memory while they are not needed."""
        return self.section.fsdp_config.param_offload

    @property
    def use_torch_compile(self) -> bool:
        return self.section.compiles

    @property
    def checkpoint_writer(self) -> str:
        """Name of a `StateWriterFactory`."""
        return self.section.checkpoint.writer


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings(Settings):
    """How a policy learns, and how it is scored."""

    seed: int
    """Seed of the adapters' start."""
    temperature: float = 1.0
    """Log-probs are of softmax(logits / temperature)."""
    log_prob_max_tokens: int | None = None
    """Same as `max_tokens`, for forward passes without gradient; None: the same."""

    @property
    def replays_experts(self) -> bool:
        """Tokens with `RaggedBatch.experts` are sent to these experts, log-probs before the update included. Forward
        passes return the experts where they are needed."""
        return self.section.router_replay.mode != "disabled"


PolicyBackendFactory = Callable[[PolicySettings], PolicyBackend]
"""Factory that the config's strategy names. Called on every rank at once. Raises ConfigError.

A parameter `options`, annotated with a pydantic model, is given `strategy_options`.
"""
CriticBackendFactory = Callable[[Settings], CriticBackend]
"""Factory that `critic.strategy` names, likewise."""
