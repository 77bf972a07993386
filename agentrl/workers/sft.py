"""Supervised learning of transcripts, with the model, packing and optimizer of the policy's update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.algorithms.losses import LossScale, aggregate
from agentrl.checkpoint.state import WorkerState
from agentrl.config.sections.sft import SFTConfig
from agentrl.data.sft import SFTSample
from agentrl.model.export import export_model
from agentrl.model.heads import load_policy
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import Offload, at_work
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.learner import Learner, MiniBatch, forward_tokens


class SupervisedWorker:
    """A policy that learns what the assistant says: mean negative log-likelihood over an optimizer step's tokens."""

    def __init__(self, config: SFTConfig, *, device: str | torch.device, total_steps: int) -> None:
        """Sharded over the ranks of the process group, if there is one. Raises ConfigError."""
        self.device = torch.device(device)
        self.dtype = getattr(torch, config.model.dtype)
        mesh = Mesh(config.parallel, device)
        self.model = load_policy(config.model, device=device, seed=config.data.seed, group=mesh.sequence)
        self.learner = Learner(
            self.model,
            config.optim,
            mesh,
            grad_clip=config.grad_clip,
            max_tokens=config.data.max_token_len_per_gpu,
            total_steps=total_steps,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
            activation_offload=config.model.enable_activation_offload,
            optimizer_offload=config.model.fsdp_config.param_offload,
        )
        self.offload = Offload(self.model, self.device, enabled=config.model.fsdp_config.param_offload)
        self.state = WorkerState(self.learner.params, self.learner.optim)

    @at_work
    def update(self, batch: Sequences, step: int) -> dict[str, float]:
        """One optimizer step; `step` counts from 1. Returns sft/skipped_updates (0 or 1), and of a step that was taken
        sft/loss, sft/grad_norm and sft/lr.

        Raises TrainingError when loss or gradient were not finite for too long (see `agentrl.workers.learner`).
        """
        scale = LossScale.of(batch.policy_tokens, "token-mean")

        def loss(micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return aggregate(-self._logprobs(micro), micro.mask, micro.offsets, scale), {}

        report = self.learner.update([MiniBatch(f"step {step}", batch, loss)], step=step)
        return report.metrics("sft", {"loss": "loss"}, {})

    @at_work
    def mean_loss(self, batch: Sequences) -> dict[str, float]:
        """Return val/loss, the loss over all tokens of `batch`, without learning. Every rank loads its share of it."""
        mine = self.learner.share_of(batch)
        logprobs = forward_tokens(self._logprobs, mine, self.learner.max_tokens, self.device)[mine.mask].double()
        sums = torch.stack([-logprobs.sum(), mine.mask.sum().double()]).to(self.device)
        total, tokens = self.learner.mesh.sum(sums).tolist()
        return {"val/loss": total / tokens}

    @at_work
    def save(self, dir: Path, background: bool = False) -> None:
        """As `PolicyWorker.save`."""
        self.state.save(Path(dir), self.model.mark(self.learner.tensors), background=background)

    def finish_save(self, wait: bool = True) -> bool:
        """As `PolicyWorker.finish_save`."""
        return self.state.finish(wait=wait)

    @at_work
    def load(self, dir: Path) -> None:
        """As `PolicyWorker.load`."""
        self.state.load(Path(dir), self.model.mark(self.learner.tensors))

    @at_work
    def export(self, dir: Path, tokenizer: Any) -> None:
        """As `PolicyWorker.export`."""
        export_model(self.model, self.learner.tensors, self.dtype, Path(dir), tokenizer)

    def _logprobs(self, micro: RaggedBatch) -> torch.Tensor:
        logprobs, _ = self.model(micro.ids, micro.offsets, needed=micro.mask, temperature=1.0)
        return logprobs


def to_batch(samples: Sequence[SFTSample]) -> RaggedBatch:
    """Transcripts as a batch: the mask marks what is learnt, each transcript is a prompt of its own."""
    ids = torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int64))
    offsets = np.cumsum([0, *(len(sample.ids) for sample in samples)])
    return RaggedBatch.unsampled(
        offsets=torch.from_numpy(offsets),
        ids=ids,
        mask=torch.from_numpy(np.concatenate([sample.mask for sample in samples])),
        group=torch.arange(len(samples)),
        trajectory=torch.arange(len(samples)),
    )
