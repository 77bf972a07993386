"""A teacher's numbers on the policy's own tokens: as advantages, or as a term of the loss.

`teacher_scores` [T, 1 + X] float32 holds the teacher's log-prob of each sampled token and, by `distillation.scope`:

| scope | X |
|---|---|
| sampled | 0 |
| top_k | 2 k: the ids of its k likeliest tokens (whole numbers, exact below 2^24), then their log-probs |
| full | width of its last hidden state, from which its head makes all log-probs, a chunk of tokens at a time |

`teacher` [T] int32 is the index of the sequence's teacher, -1 without a teacher. Entries of tokens that the policy did
not sample are never read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from agentrl.algorithms.aggregate import Scored, Share, Term
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.ragged import masked_mean
from agentrl.config.registries import DIVERGENCES
from agentrl.errors import TrainingError
from agentrl.model.scores import Compare
from agentrl.system.registry import configured

if TYPE_CHECKING:
    from agentrl.config.sections.distillation import DistillationConfig
    from agentrl.trajectory.batch import RaggedBatch

Head = Callable[[Tensor], Tensor]
"""Function from hidden states [M, H] to logits [M, V] float32 at the policy's temperature."""
IMPOSSIBLE = -100.0
"""Log-prob of a listed token that is in the teacher's vocabulary alone. Its id stands for no token of the policy's."""
LEAST = 1e-7
"""Least probability of all tokens that are not compared one by one: the rounding of a sum of float32."""


def taught(batch: RaggedBatch) -> Tensor:
    """Mark the tokens that a teacher has scored: [T] bool."""
    assert batch.teacher is not None, "the teacher's scores come first"
    return batch.mask & (batch.teacher >= 0)


def sampled_logprobs(batch: RaggedBatch) -> Tensor:
    """Take the teacher's log-prob of each sampled token, [T] float32; 0 without a teacher."""
    scores = batch.teacher_scores
    assert scores is not None, "the teacher's scores come first"
    of_samples = scores[:, 0] if scores.ndim == 2 else scores  # a rank without sequences has [0]
    return torch.where(taught(batch), of_samples, 0.0)


def teacher_logprobs(batch: RaggedBatch) -> Tensor:
    """Take the teacher's log-prob of each sampled token, [T] float32; NaN without a teacher."""
    return torch.where(taught(batch), sampled_logprobs(batch), math.nan)


def with_teacher_advantages(
    batch: RaggedBatch, config: DistillationConfig, *, mixed: bool = True
) -> tuple[RaggedBatch, dict[str, float]]:
    """Mix the teacher into the advantages, where the config asks for that. Returns the batch and metrics.

    Not `mixed`: the advantages stay as they are, for their estimator has read the teacher.

    A = policy_loss_coef * A - coef * k(log p_S - log p_T), where k is the estimator, cut off at max_divergence. With k1
    it is the advantage of MiMo-V2-Flash (arXiv:2601.02780): each token answers for its own log-ratio alone. Metrics:
    distill/kl, the k1 estimate of KL(policy || teacher) by token, and distill/taught_fraction, the part of the policy
    tokens that have a teacher.
    """
    assert batch.advantages is not None, "advantages come first"
    told = taught(batch)
    assert batch.old_logprobs is not None, "the policy's log-probs come first"
    ratio = torch.where(told, batch.old_logprobs - sampled_logprobs(batch), 0.0)
    metrics = {
        "distill/kl": masked_mean(ratio.double(), told).item(),
        "distill/taught_fraction": told.sum().item() / max(int(batch.mask.sum()), 1),
    }
    if config.in_loss or not mixed:
        return batch, metrics
    penalty = torch.where(told, bounded(kl_penalty(ratio, torch.zeros_like(ratio), config.estimator), config), 0.0)
    return batch.with_fields(advantages=config.policy_loss_coef * batch.advantages - config.coef * penalty), metrics


@dataclass(frozen=True)
class TeacherLoss(Term):
    """The term of the loss by which the policy learns a teacher's distributions."""

    config: DistillationConfig
    function: Callable[[Tensor, Tensor], Tensor] | None
    """The divergence; None where sampled tokens alone are compared."""
    heads: Sequence[Head] = ()
    """With scope=full, of each teacher."""

    name = "teacher_loss"
    key = "distillation"
    columns = ("teacher", "teacher_scores")

    @staticmethod
    def from_config(config: DistillationConfig, heads: Sequence[Head] = ()) -> TeacherLoss | None:
        """Make the term; None where the loss has no teacher. Raises ConfigError for a wrong divergence."""
        if not config.in_loss:
            return None
        if config.scope == "sampled":
            return TeacherLoss(config, None)
        found = cast("Callable[[Tensor, Tensor], Tensor]", DIVERGENCES.get(config.divergence))
        function = configured(found, config.divergence_options, "distillation.divergence_options")
        return TeacherLoss(config, function, heads)

    @property
    def coef(self) -> float:  # type: ignore[override]  # no term's coefficient is set later
        return self.config.coef

    def share(self, scored: Scored, count: int) -> Share:
        return Share(self.by_token_of(scored.micro, scored.logprobs, scored.found.divergence))

    def comparison(self) -> Callable[[RaggedBatch], Compare] | None:
        return None if self.function is None else self.compare

    def compare(self, micro: RaggedBatch) -> Callable[[Tensor, Tensor], Tensor]:
        """Make the function that returns divergences from the teacher [M], 0 without a teacher.

        It takes the policy's log-probs [M, V] at some tokens, and the places [M] int64 of these tokens in `micro`.

        Only a few distributions at a time have to be in memory. Raises TrainingError when the divergence does not
        return one number a row.
        """
        teacher, scores = micro.teacher, micro.teacher_scores
        assert teacher is not None and scores is not None, "the teacher's scores come first"

        def divergences(student: Tensor, places: Tensor) -> Tensor:
            """Compare log-probs student [R, V] of the tokens at places [R] int64 with their teachers': [R]."""
            owners = teacher[places]
            known = [int(index) for index in owners.unique().tolist() if index >= 0]
            if len(known) == 1 and bool((owners >= 0).all()):  # no row has to be copied
                return self._rows(student, scores[places], known[0])
            found = 0.0 * student[:, 0]  # with a gradient, also where there is no teacher
            for index in known:
                rows = (owners == index).nonzero()[:, 0]
                found = found.index_copy(0, rows, self._rows(student[rows], scores[places[rows]], index))
            return found

        return divergences

    def _rows(self, student: Tensor, scores: Tensor, teacher: int) -> Tensor:
        assert self.function is not None
        if self.config.scope == "top_k":
            ids, told = scores[:, 1:].chunk(2, dim=1)
            own = torch.where(told > IMPOSSIBLE, student.gather(1, ids.long()), IMPOSSIBLE)
            found = self.function(with_rest(own), with_rest(told))
        else:
            with torch.no_grad():
                logits = self.heads[teacher](scores[:, 1:])
                told = logits[:, : student.shape[1]].log_softmax(-1)
            known = told.shape[1]  # a vocabulary may be padded further than another
            found = self.function(student if student.shape[1] == known else student[:, :known].log_softmax(-1), told)
        if found.shape != student.shape[:1]:
            raise TrainingError(
                f"distillation.divergence={self.config.divergence}: expected one number a row, "
                f"{list(student.shape[:1])}, found {list(found.shape)}"
            )
        return found

    def by_token_of(self, micro: RaggedBatch, logprobs: Tensor, divergence: Tensor | None) -> Tensor:
        """Return the term by token, [T] with gradient, without `coef`: 0 where there is no teacher.

        logprobs [T]: the policy's. divergence [T]: the result of `compare`, where it has to be called.
        """
        told = taught(micro)
        if self.function is None:
            found = kl_penalty(torch.where(told, logprobs, 0.0), sampled_logprobs(micro), self.config.estimator)
            return bounded(found, self.config)
        if divergence is None:
            raise TrainingError(
                f"distillation.scope={self.config.scope}: this strategy gives no divergences of distributions; take "
                "distillation.scope=sampled, or actor_rollout_ref.actor.strategy=fsdp2"
            )
        return torch.where(told, bounded(divergence, self.config), 0.0)


def bounded(divergences: Tensor, config: DistillationConfig) -> Tensor:
    """Cut off divergences further from 0 than `max_divergence`: [T]."""
    most = config.max_divergence
    return divergences if most is None else divergences.clamp(-most, most)


def with_rest(logprobs: Tensor) -> Tensor:
    """Add the category of all other tokens: log-probs [M, k] of some -> [M, k + 1]."""
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
    return torch.cat([logprobs, rest.log()], dim=1)
