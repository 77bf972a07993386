"""Learning from pairs of conversations in which one is preferred: a policy against its start, or a reward model.

The loss of a pair needs both of its conversations, which may be on different ranks and in different micro-batches. So a
step passes over its pairs twice. The pass without gradient finds each pair's loss and the weight of its log-probs (or
scores) in it. In the pass with gradient every conversation stands for itself (see `pair_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from agentrl.algorithms.pair_losses import PairLoss, Pairs, SigmoidOptions, pair_weights, sigmoid
from agentrl.algorithms.ragged import masked_sum, segment_ids, segment_sum
from agentrl.config.registries import PAIR_LOSSES
from agentrl.config.sections.sft import PreferencesConfig
from agentrl.data.pairs import Pair
from agentrl.model.scores import TokenScores
from agentrl.observe.watch import Counts, Learning, owners_of
from agentrl.system.metrics import Numbers
from agentrl.system.registry import configured
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import Backend, Loss, MiniBatch
from agentrl.workers.fsdp import FSDPPolicy, FSDPScores
from agentrl.workers.sft import TuningWorker, policy_settings, section_of
from agentrl.workers.trainable import Found_co

Found = TypeVar("Found")


class Exporting(Backend[Found], Protocol):
    """A backend whose model can be written."""

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format."""
        ...


class PairWorker(TuningWorker[Found_co]):
    """One rank's part of a model that learns from pairs: the sequences 2 i and 2 i + 1 of a batch."""

    def __init__(
        self,
        backend: Exporting[Found_co],
        loss: PairLoss,
        score: Callable[[RaggedBatch], torch.Tensor],
        scores_of: Callable[[Found_co], torch.Tensor],
        config: PreferencesConfig,
        total_steps: int,
    ) -> None:
        """Args:
        score: computes for the T tokens of a rank's share, without gradient, [T] float32 on the CPU: the numbers whose
            sum over the mask is a conversation's.
        scores_of: takes the same numbers, with gradient, out of the result of a forward pass.
        """
        learning: Learning[Found_co] = Learning(
            kind="pairs",
            config=config,
            section=section_of(config),
            dtype=config.model.dtype,
            total_steps=total_steps,
            scores=watched_scores(scores_of),
        )
        super().__init__(backend, learning, config.trainer.checks.watches)
        self.backend, self._loss, self._score, self._scores_of = backend, loss, score, scores_of

    def compute_scores(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Return ([T] float32 on the CPU: log-probs of the tokens that are learnt, or scores; no metrics)."""
        return self._score(batch), {}

    def update(self, batch: Sequences, step: int) -> Numbers:
        """Take one optimizer step; `step` counts from 1.

        Returns preferences/skipped_updates (0 or 1); of a step that was taken preferences/loss, the mean over the
        pairs, preferences/grad_norm and preferences/lr; and the numbers of `figures`, before the step. Raises
        TrainingError when loss or gradient were not finite for too long (see `agentrl.workers.trainable`).
        """
        pairs = self._pairs(batch)
        losses, chosen, rejected = pair_weights(self._loss, pairs)
        weights = torch.stack([chosen, rejected], dim=1).flatten().float() / len(losses)
        shares = (losses / len(losses) / 2).repeat_interleave(2).float()
        loss = linear_loss(self._scores_of, weights, shares)
        counts = Counts(policy_tokens=batch.policy_tokens, owners=owners_of(batch, range(len(batch))))
        report = self._learn([MiniBatch(f"step {step}", batch, loss, watches=self._watched(counts))], step=step)
        found = report.metrics("preferences", {"loss": "loss"}, {})
        return found | {f"preferences/{name}": value for name, value in figures(pairs).items()}

    def mean_loss(self, batch: Sequences) -> Numbers:
        """Return val/loss, the mean over the pairs of `batch`, and val/<name> of `figures`, without learning."""
        pairs = self._pairs(batch)
        losses, _, _ = pair_weights(self._loss, pairs)
        return {f"val/{name}": value for name, value in ({"loss": losses.mean().item()} | figures(pairs)).items()}

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, in the configured dtype."""
        self.backend.export(Path(dir), tokenizer)

    def _pairs(self, batch: Sequences) -> Pairs:
        """Add up the scores, less the reference's, over each conversation, on all ranks alike."""
        mine = self.backend.share_of(batch)
        scores = self.compute_scores(mine)[0]
        if mine.ref_logprobs is not None:
            scores = scores - mine.ref_logprobs
        by_token = torch.stack([torch.where(mine.mask, one, 0.0).double() for one in (scores, torch.ones_like(scores))])
        found = torch.zeros(2, len(batch), dtype=torch.float64)
        found[:, mine.trajectory] = torch.stack([segment_sum(one, mine.offsets) for one in by_token])
        totals, tokens = torch.tensor(self.backend.sum(found.flatten()), dtype=torch.float64).view(2, -1, 2)
        return Pairs(totals[:, 0], totals[:, 1], tokens[:, 0], tokens[:, 1])


class PolicyPairWorker(PairWorker[TokenScores]):
    """A policy that learns preferences, against the policy that it starts as."""

    def __init__(self, config: PreferencesConfig, *, device: str | torch.device, total_steps: int) -> None:
        """Sharded over the ranks of the process group, if there is one. Raises ConfigError."""
        policy = FSDPPolicy(policy_settings(config, device, total_steps))
        found = cast(PairLoss, PAIR_LOSSES.get(config.loss))
        loss = configured(found, config.loss_options, "loss_options")
        super().__init__(
            policy,
            loss,
            lambda batch: policy.log_probs(batch, frozenset()).logprobs,
            lambda found: found.logprobs,
            config,
            total_steps,
        )


class RewardPairWorker(PairWorker[torch.Tensor]):
    """A reward model that learns to score preferred conversations higher (Bradley and Terry, 1952)."""

    def __init__(self, config: PreferencesConfig, *, device: str | torch.device, total_steps: int) -> None:
        """Do as `PolicyPairWorker`."""
        model = FSDPScores(policy_settings(config, device, total_steps))
        loss = partial(sigmoid, options=SigmoidOptions(beta=1.0))
        super().__init__(model, loss, model.scores, lambda found: found, config, total_steps)


def watched_scores(scores_of: Callable[[Found], torch.Tensor]) -> Callable[[Found], dict[str, torch.Tensor]]:
    """Take the scores that watches of an update see out of a forward pass's result."""
    return lambda found: {"score": scores_of(found)}


def linear_loss(scores_of: Callable[[Found], torch.Tensor], weights: torch.Tensor, shares: torch.Tensor) -> Loss[Found]:
    """Make a mini-batch's loss of weights and shares, [N] each: its gradient is the gradient of -sum of weight times
    score, its value the sum of the sequences' shares."""

    def loss(found: Found, micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute (loss, a scalar; no sums) from the scores [T] of a micro-batch."""
        scores = scores_of(found)
        weight, share = (each.to(scores.device)[micro.trajectory] for each in (weights, shares))
        linear = -masked_sum(weight[segment_ids(micro.offsets, micro.num_tokens)] * scores, micro.mask)
        return linear - linear.detach() + share.sum(), {}

    return loss


def figures(pairs: Pairs) -> Numbers:
    """Describe pairs: accuracy, the part whose chosen one has more than the rejected one; margin, by how much on
    average; chosen and rejected, their means. In nats of log-ratio to the reference, or in a reward model's scores."""
    margin = pairs.chosen - pairs.rejected
    return {
        "accuracy": (margin > 0).double().mean().item(),
        "margin": margin.mean().item(),
        "chosen": pairs.chosen.mean().item(),
        "rejected": pairs.rejected.mean().item(),
    }


def to_batch(pairs: Sequence[Pair]) -> RaggedBatch:
    """Make a batch of pairs. Sequences 2 i and 2 i + 1 are the chosen and the rejected one of pair i, a prompt of its
    own. The batch has ref_logprobs where all pairs have them."""
    lengths = [length for pair in pairs for length in (pair.rejected_at, len(pair.ids) - pair.rejected_at)]
    batch = RaggedBatch.unsampled(
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        ids=torch.from_numpy(np.concatenate([pair.ids for pair in pairs]).astype(np.int64)),
        mask=torch.from_numpy(np.concatenate([pair.mask for pair in pairs])),
        group=torch.arange(len(pairs)).repeat_interleave(2),
        trajectory=torch.arange(2 * len(pairs)),
    )
    references = [pair.reference for pair in pairs if pair.reference is not None]
    if len(references) < len(pairs):
        return batch
    return batch.with_fields(ref_logprobs=torch.from_numpy(np.concatenate(references)))
