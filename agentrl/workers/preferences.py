"""Learning from preferences: a policy against its start, or a reward model.

A row is a pair of conversations in which one is preferred, or one that is good or bad by itself. The loss of a row
needs other conversations, too, which may be on different ranks and in different micro-batches. So a step passes over
its rows twice. The pass without gradient finds each row's loss and the weight of its log-probs (or scores) in it. In
the pass with gradient every conversation stands for itself (see `pair_weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from agentrl.algorithms.pair_losses import (
    Judged,
    JudgedLoss,
    PairLoss,
    Pairs,
    SigmoidOptions,
    judged_weights,
    pair_weights,
    sigmoid,
)
from agentrl.algorithms.ragged import masked_sum, segment_ids, segment_sum
from agentrl.config.registries import PAIR_LOSSES
from agentrl.config.sections.sft import PreferencesConfig
from agentrl.data.pairs import Preference
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


class Compared(NamedTuple):
    """The losses of M rows with N conversations."""

    losses: torch.Tensor  # [M] float64
    weights: torch.Tensor  # [N] float64, of each conversation's log-probs in the sum of the losses
    shares: torch.Tensor  # [N] float64, parts of the sum of the losses that stand for the conversations
    figures: Numbers

    @classmethod
    def empty(cls, losses: torch.Tensor, conversations: int, figures: Numbers) -> Compared:
        """Begin with weights and shares of 0, to be filled."""
        return cls(losses, torch.zeros(conversations).double(), torch.zeros(conversations).double(), figures)


Compare = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Compared]
"""Function of N conversations: their log-ratios [N] float64, tokens [N] float64 and sides [N] int32."""


class PreferenceWorker(TuningWorker[Found_co]):
    """One rank's part of a model that learns from preferences: the column side says how it learns from a sequence."""

    def __init__(
        self,
        backend: Exporting[Found_co],
        compare: Compare,
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
            kind="pairs" if config.rows == "pairs" else "judged",
            config=config,
            section=section_of(config),
            dtype=config.model.dtype,
            total_steps=total_steps,
            scores=watched_scores(scores_of),
        )
        super().__init__(backend, learning, config.trainer.checks.watches)
        self.backend, self._compare, self._score, self._scores_of = backend, compare, score, scores_of

    def compute_scores(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Return ([T] float32 on the CPU: log-probs of the tokens that are learnt, or scores; no metrics)."""
        return self._score(batch), {}

    def update(self, batch: Sequences, step: int) -> Numbers:
        """Take one optimizer step; `step` counts from 1.

        Returns preferences/skipped_updates (0 or 1); of a step that was taken preferences/loss, the mean over the
        rows, preferences/grad_norm and preferences/lr; and the numbers of `figures` or `figures_of_judged`, before the
        step. Raises TrainingError when loss or gradient were not finite for too long (see `agentrl.workers.trainable`).
        """
        found = self._compared(batch)
        count = len(found.losses)
        loss = linear_loss(self._scores_of, found.weights.float() / count, (found.shares / count).float())
        learnt = batch.sequences["side"] != 0
        if not learnt.all():
            batch = batch.select(learnt.nonzero()[:, 0].tolist())
        counts = Counts(policy_tokens=batch.policy_tokens, owners=owners_of(batch, range(len(batch))))
        report = self._learn([MiniBatch(f"step {step}", batch, loss, watches=self._watched(counts))], step=step)
        metrics = report.metrics("preferences", {"loss": "loss"}, {})
        return metrics | {f"preferences/{name}": value for name, value in found.figures.items() if name != "auc"}

    def mean_loss(self, batch: Sequences) -> Numbers:
        """Return val/loss, the mean over the rows of `batch`, and val/<name> of the figures, without learning."""
        found = self._compared(batch)
        return {f"val/{name}": value for name, value in ({"loss": found.losses.mean().item()} | found.figures).items()}

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer in Hugging Face format, in the configured dtype."""
        self.backend.export(Path(dir), tokenizer)

    def _compared(self, batch: Sequences) -> Compared:
        """Add up the scores, less the reference's, over each conversation, on all ranks alike, and compare them."""
        mine = self.backend.share_of(batch)
        scores = self.compute_scores(mine)[0]
        if mine.ref_logprobs is not None:
            scores = scores - mine.ref_logprobs
        by_token = torch.stack([torch.where(mine.mask, one, 0.0).double() for one in (scores, torch.ones_like(scores))])
        found = torch.zeros(2, len(batch), dtype=torch.float64)
        found[:, mine.trajectory] = torch.stack([segment_sum(one, mine.offsets) for one in by_token])
        totals, tokens = torch.tensor(self.backend.sum(found.flatten()), dtype=torch.float64).view(2, -1)
        return self._compare(totals, tokens, batch.sequences["side"])


class PolicyPreferenceWorker(PreferenceWorker[TokenScores]):
    """A policy that learns preferences, against the policy that it starts as."""

    def __init__(self, config: PreferencesConfig, *, device: str | torch.device, total_steps: int) -> None:
        """Sharded over the ranks of the process group, if there is one. Raises ConfigError."""
        policy = FSDPPolicy(policy_settings(config, device, total_steps))
        loss, options, key = PAIR_LOSSES.get(config.loss), config.loss_options, "loss_options"
        compare: Compare
        if config.rows == "pairs":
            compare = partial(compare_pairs, configured(cast(PairLoss, loss), options, key))
        else:
            compare = partial(compare_judged, configured(cast(JudgedLoss, loss), options, key))
        super().__init__(
            policy,
            compare,
            lambda batch: policy.log_probs(batch, frozenset()).logprobs,
            lambda found: found.logprobs,
            config,
            total_steps,
        )


class RewardPairWorker(PreferenceWorker[torch.Tensor]):
    """A reward model that learns to score preferred conversations higher (Bradley and Terry, 1952)."""

    def __init__(self, config: PreferencesConfig, *, device: str | torch.device, total_steps: int) -> None:
        """Do as `PolicyPreferenceWorker`."""
        model = FSDPScores(policy_settings(config, device, total_steps))
        compare = partial(compare_pairs, partial(sigmoid, options=SigmoidOptions(beta=1.0)))
        super().__init__(model, compare, model.scores, lambda found: found, config, total_steps)


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


def compare_pairs(loss: PairLoss, ratios: torch.Tensor, tokens: torch.Tensor, sides: torch.Tensor) -> Compared:
    """Compare the two of each pair; see `Compare`."""
    chosen, rejected = sides > 0, sides < 0
    pairs = Pairs(ratios[chosen], ratios[rejected], tokens[chosen], tokens[rejected])
    losses, *weights = pair_weights(loss, pairs)
    found = Compared.empty(losses, len(sides), figures(pairs))
    for one, weight in zip((chosen, rejected), weights, strict=True):
        found.weights[one], found.shares[one] = weight, losses / 2
    return found


def compare_judged(loss: JudgedLoss, ratios: torch.Tensor, tokens: torch.Tensor, sides: torch.Tensor) -> Compared:
    """Compare each judged conversation with the mean of the mismatched ones; see `Compare`."""
    own = sides != 0
    kl = torch.zeros((), dtype=torch.float64) if own.all() else ratios[~own].mean().clamp(min=0)
    judged = Judged(ratios[own], tokens[own], sides[own] > 0, kl)
    losses, weights = judged_weights(loss, judged)
    found = Compared.empty(losses, len(sides), figures_of_judged(judged))
    found.weights[own], found.shares[own] = weights, losses
    return found


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


def figures_of_judged(judged: Judged) -> Numbers:
    """Describe judged conversations by their log-ratios in nats: kl; good and bad, the means of each, where there are
    some; accuracy, the part of good ones above kl and bad ones below it. Where there are both, margin, good less bad;
    and auc, the part of all couples of a good and a bad one in which the good one has more, of equal ones half."""
    good, bad = judged.ratios[judged.good], judged.ratios[~judged.good]
    above = ((judged.ratios - judged.kl) / SAME).round()
    right = torch.where(judged.good, above > 0, above < 0)
    found = {"kl": judged.kl.item(), "accuracy": right.double().mean().item()}
    found |= {name: part.mean().item() for name, part in (("good", good), ("bad", bad)) if len(part)}
    if len(good) and len(bad):
        found |= {"margin": found["good"] - found["bad"], "auc": auc(good, bad)}
    return found


SAME = 1e-3
"""Nats: log-ratios that are not further apart may be of the same weights, computed in other micro-batches."""


def auc(good: torch.Tensor, bad: torch.Tensor) -> float:
    """Compute the part of all couples of a good and a bad log-ratio in which the good one is higher; equal ones count
    half."""
    good, bad = ((part / SAME).round().contiguous() for part in (good, bad))
    ordered = bad.sort().values
    below, up_to = (torch.searchsorted(ordered, good, right=right).double().sum() for right in (False, True))
    return ((below + up_to) / (2 * len(good) * len(bad))).item()


def to_batch(rows: Sequence[Preference]) -> RaggedBatch:
    """Make a batch of rows. The conversations of a row follow each other, a prompt of their own. The column side says
    which are preferred. The batch has ref_logprobs where all rows have them."""
    lengths = [length for row in rows for length in row.lengths]
    batch = RaggedBatch.unsampled(
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        ids=torch.from_numpy(np.concatenate([row.ids for row in rows]).astype(np.int64)),
        mask=torch.from_numpy(np.concatenate([row.mask for row in rows])),
        group=torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row.lengths) for row in rows])),
        trajectory=torch.arange(len(lengths)),
    ).with_fields(side=torch.tensor([side for row in rows for side in row.sides], dtype=torch.int32))
    references = [row.reference for row in rows if row.reference is not None]
    if len(references) < len(rows):
        return batch
    return batch.with_fields(ref_logprobs=torch.from_numpy(np.concatenate(references)))
