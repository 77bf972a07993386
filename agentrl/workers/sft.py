"""Supervised learning of transcripts, with the model, packing and optimizer of the policy's update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from agentrl.algorithms.aggregate import LossScale, aggregate
from agentrl.algorithms.ragged import segment_ids
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.sft import SFTConfig, TuningConfig
from agentrl.data.sft import SFTSample
from agentrl.model.scores import TokenScores
from agentrl.observe.watch import Counts, Learning, owners_of
from agentrl.system.metrics import Numbers
from agentrl.system.registry import read_options
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import AUX_LOSS, Z_LOSS, MiniBatch, PolicySettings
from agentrl.workers.fsdp import FSDPOptions, FSDPPolicy
from agentrl.workers.trainable import Found_co, TrainableWorker


class TuningWorker(TrainableWorker[Found_co]):
    """One rank's part of a model that learns from files."""

    @abstractmethod
    def update(self, batch: Sequences, step: int) -> Numbers:
        """Take one optimizer step; `step` counts from 1. Returns <name>/loss, /grad_norm, /lr and /skipped_updates."""

    @abstractmethod
    def mean_loss(self, batch: Sequences) -> Numbers:
        """Return val/loss over all of `batch`, without learning."""

    @abstractmethod
    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format."""


class SupervisedWorker(TuningWorker[TokenScores]):
    """A policy that learns the assistant's tokens: mean negative log-likelihood, weighted or not."""

    def __init__(self, config: SFTConfig, *, device: str | torch.device, total_steps: int) -> None:
        """Sharded over the ranks of the process group, if there is one. Raises ConfigError."""
        options = read_options(FSDPPolicy, config.strategy_options, "strategy_options")
        assert isinstance(options, FSDPOptions)
        settings = policy_settings(config, device, total_steps)
        self.backend = FSDPPolicy(settings, options)
        learning: Learning[TokenScores] = Learning(
            kind="transcripts",
            config=config,
            section=settings.section,
            dtype=config.model.dtype,
            total_steps=total_steps,
            scores=lambda found: {"score": found.logprobs},
        )
        super().__init__(self.backend, learning, config.trainer.checks.watches)

    def update(self, batch: Sequences, step: int) -> Numbers:
        """Take one optimizer step; `step` counts from 1. Returns sft/skipped_updates (0 or 1), and of a step that was
        taken sft/loss, sft/grad_norm, sft/lr and, with these losses, sft/moe_aux_loss and sft/moe_z_loss.

        Raises TrainingError when loss or gradient were not finite for too long (see `agentrl.workers.trainable`).
        """
        scale = LossScale.from_policy_tokens(batch.policy_tokens, "token-mean")

        def loss(found: TokenScores, micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """Compute (loss, a scalar; sums for metrics, scalars) from the scores [T] of a micro-batch."""
            mean = aggregate(_weighed(-found.logprobs, micro), micro.mask, micro.offsets, scale)
            return mean, {"nll": mean.detach()}

        counts = Counts(policy_tokens=batch.policy_tokens, owners=owners_of(batch, range(len(batch))))
        report = self._learn([MiniBatch(f"step {step}", batch, loss, watches=self._watched(counts))], step=step)
        of_routers = {name: name for one in report.taken for name in (AUX_LOSS, Z_LOSS) if name in one.sums}
        return report.metrics("sft", {"loss": "nll", **of_routers}, {})

    def mean_loss(self, batch: Sequences) -> Numbers:
        """Return val/loss, the loss over all tokens of `batch`, without learning. Every rank loads its share of it."""
        mine = self.backend.share_of(batch)
        logprobs = _weighed(self.backend.log_probs(mine, frozenset()).logprobs, mine)[mine.mask].double()
        total, tokens = self.backend.sum(torch.stack([-logprobs.sum(), mine.mask.sum().double()]))
        return {"val/loss": total / tokens}

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the policy and its tokenizer in Hugging Face format, in the configured dtype."""
        self.backend.export(Path(dir), tokenizer)


def _weighed(values: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
    """Multiply values [T] by their sequences' weights, where the batch has some."""
    if batch.loss_weight is None:
        return values
    return values * batch.loss_weight.to(values.dtype)[segment_ids(batch.offsets, len(values))]


def policy_settings(config: TuningConfig, device: str | torch.device, total_steps: int) -> PolicySettings:
    """Say how a model learns from transcripts."""
    return PolicySettings(
        section=section_of(config), model=config.model, device=device, total_steps=total_steps, seed=config.data.seed
    )


def section_of(config: TuningConfig) -> ActorConfig:
    """Write the keys of a training from files as the policy's section has them; its other keys are the defaults."""
    return ActorConfig(
        optim=config.optim,
        grad_clip=config.grad_clip,
        ppo_max_token_len_per_gpu=config.data.max_token_len_per_gpu,
        ulysses_sequence_parallel_size=config.ulysses_sequence_parallel_size,
        fsdp_config=config.model.fsdp_config,
        checkpoint=config.trainer.checkpoint,
    )


def to_batch(samples: Sequence[SFTSample]) -> RaggedBatch:
    """Make a batch of transcripts: the mask marks the learnt tokens, each transcript is a prompt of its own.

    The batch has loss_weight where the transcripts have weights.
    """
    ids = torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int64))
    offsets = np.cumsum([0, *(len(sample.ids) for sample in samples)])
    batch = RaggedBatch.unsampled(
        offsets=torch.from_numpy(offsets),
        ids=ids,
        mask=torch.from_numpy(np.concatenate([sample.mask for sample in samples])),
        group=torch.arange(len(samples)),
        trajectory=torch.arange(len(samples)),
    )
    weights = [sample.weight for sample in samples if sample.weight is not None]
    if len(weights) < len(samples):
        return batch
    return batch.with_fields(loss_weight=torch.tensor(weights, dtype=torch.float64))
