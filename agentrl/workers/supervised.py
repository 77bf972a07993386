"""Supervised learning of transcripts, with the model, packing and optimizer of the policy's update."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agentrl.algorithms.losses import LossScale, aggregate
from agentrl.batch import RaggedBatch
from agentrl.config.parallel import Parallel
from agentrl.config.schema import SFTConfig
from agentrl.data.sft import SFTSample
from agentrl.workers.learner import Learner, forward_tokens
from agentrl.workers.mesh import Mesh
from agentrl.workers.models import load_policy


class SupervisedLearner:
    """A policy that learns what the assistant says: mean negative log-likelihood over an optimizer step's tokens."""

    def __init__(self, config: SFTConfig, *, device: str | torch.device, total_steps: int) -> None:
        self.device = torch.device(device)
        self.dtype = getattr(torch, config.model.dtype)
        self.model = load_policy(config.model, device=device, seed=config.data.seed)
        self._max_tokens = config.data.max_token_len_per_gpu
        self.learner = Learner(
            self.model,
            config.optim,
            Mesh(Parallel(), device),
            grad_clip=config.grad_clip,
            max_tokens=self._max_tokens,
            total_steps=total_steps,
            gradient_checkpointing=config.model.enable_gradient_checkpointing,
        )

    def step(self, samples: Sequence[SFTSample], step: int) -> dict[str, float]:
        """One optimizer step; `step` counts from 1. Returns sft/loss, sft/grad_norm and sft/lr.

        Raises TrainingError, with the weights untouched, when the loss or the gradient is not finite.
        """
        batch = to_batch(samples)
        scale = LossScale.of(batch.policy_tokens, "token-mean")

        def loss(micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return aggregate(-self._logprobs(micro), micro.mask, micro.offsets, scale), {}

        report = self.learner.step(batch, loss, step=step, where=f"step {step}")
        return {"sft/loss": report.loss, "sft/grad_norm": report.grad_norm, "sft/lr": report.lr}

    def mean_loss(self, samples: Sequence[SFTSample]) -> float:
        """The loss over all tokens of `samples`, without learning."""
        batch = to_batch(samples)
        logprobs = forward_tokens(self._logprobs, batch, self._max_tokens, self.device)
        return -logprobs[batch.mask].double().mean().item()

    def _logprobs(self, micro: RaggedBatch) -> torch.Tensor:
        logprobs, _ = self.model(micro.ids, micro.offsets, needed=micro.mask, temperature=1.0)
        return logprobs


def to_batch(samples: Sequence[SFTSample]) -> RaggedBatch:
    """Transcripts as a batch: the mask marks what is learnt, each transcript is a prompt of its own."""
    ids = torch.from_numpy(np.concatenate([sample.ids for sample in samples]).astype(np.int64))
    offsets = np.cumsum([0, *(len(sample.ids) for sample in samples)])
    return RaggedBatch(
        offsets=torch.from_numpy(offsets),
        ids=ids,
        mask=torch.from_numpy(np.concatenate([sample.mask for sample in samples])),
        rollout_logprobs=torch.zeros(len(ids)),
        rewards=torch.zeros(len(ids)),
        group=torch.arange(len(samples)),
        trajectory=torch.arange(len(samples)),
    )
