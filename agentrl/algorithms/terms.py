"""The terms of the policy's loss, and the one place that chooses them by the config.

The entropy bonus is PPO's (arXiv:1707.06347, eq. 9), the KL to the reference GRPO's (arXiv:2402.03300, eq. 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from agentrl.algorithms.aggregate import Scored, Share, Term
from agentrl.algorithms.declared import leaves_out_equal_groups
from agentrl.algorithms.distillation import Head, TeacherLoss
from agentrl.algorithms.kl import kl_loss
from agentrl.algorithms.policy_loss import PolicyLoss
from agentrl.algorithms.ragged import masked_sum, observed, segment_ids
from agentrl.config.declaration import Score
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import AlgorithmConfig, KLLossType
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.errors import TrainingError
from agentrl.trajectory.batch import RaggedBatch, Sequences


@dataclass(frozen=True)
class EntropyBonus(Term):
    """The entropy of the policy, which the loss rewards."""

    coef: float

    key = "actor_rollout_ref.actor.entropy_coeff"

    def scores(self) -> Sequence[Score]:
        return ("entropy",)

    def share(self, scored: Scored, count: int) -> Share:
        assert scored.found.entropy is not None
        return Share(scored.found.entropy)


@dataclass(frozen=True)
class KLTerm(Term):
    """The KL to the reference."""

    coef: float
    kind: KLLossType

    name = "kl_loss"
    key = "actor_rollout_ref.actor.use_kl_loss"
    columns = ("ref_logprobs",)

    def share(self, scored: Scored, count: int) -> Share:
        assert scored.micro.ref_logprobs is not None
        return Share(kl_loss(scored.logprobs, scored.micro.ref_logprobs, self.kind))


@dataclass(frozen=True)
class SuccessNLL(Term):
    """The negative log-likelihood of the policy tokens of trajectories that succeed."""

    coef: float

    name = "success_nll"
    key = "actor_rollout_ref.actor.success_nll_coef"
    by_token = False
    columns = ("success",)

    def share(self, scored: Scored, count: int) -> Share:
        micro = scored.micro
        assert micro.success is not None
        imitated = micro.mask & micro.success[segment_ids(micro.offsets, micro.num_tokens)]
        return Share(-masked_sum(scored.logprobs, imitated) / max(count, 1))

    def counts(self, batch: Sequences) -> Tensor:
        return batch.policy_tokens * batch.sequences["success"]

    def computes(self, batch: Sequences) -> Tensor:
        return self.counts(batch) > 0


@dataclass(frozen=True)
class ObservationNLL(Term):
    """The negative log-likelihood of the tokens that the policy read after its first one."""

    coef: float

    name = "observation_nll"
    key = "actor_rollout_ref.actor.observation_nll_coef"
    by_token = False
    columns = ("observed",)

    def share(self, scored: Scored, count: int) -> Share:
        """Raises TrainingError where the backend gives no log-probs of these tokens."""
        places, logprobs = observed(scored.micro.mask, scored.micro.offsets), scored.found.logprobs
        if places.any() and not logprobs[places].any():
            raise TrainingError(
                f"{self.key}: this strategy gives no log-probs of tokens that the policy did not sample "
                "(MiniBatch.reads); set it to 0, or take actor_rollout_ref.actor.strategy=fsdp2"
            )
        return Share(-masked_sum(logprobs, places) / max(count, 1))

    def counts(self, batch: Sequences) -> Tensor:
        return batch.sequences["observed"]

    def reads(self) -> Callable[[RaggedBatch], Tensor]:
        return lambda micro: micro.mask | observed(micro.mask, micro.offsets)


@dataclass(frozen=True)
class ExpertNLL(Term):
    """The negative log-likelihood of an expert's transcripts, the only term of a mini-batch of their own."""

    coef: float

    name = "expert_loss"
    key = "expert.coef"
    by_token = False

    def share(self, scored: Scored, count: int) -> Share:
        return Share(masked_sum(-scored.found.logprobs, scored.micro.mask) / max(count, 1))


def loss_terms(
    actor: ActorConfig,
    algorithm: AlgorithmConfig | None,
    distillation: DistillationConfig | None,
    heads: Sequence[Head],
) -> list[Term]:
    """Choose the terms of the policy's loss, in the order in which they are added.

    algorithm: None: no correction. heads: of the teachers (see `TeacherLoss`). Raises ConfigError.
    """
    teacher = None if distillation is None else TeacherLoss.from_config(distillation, heads)
    policy = PolicyLoss.from_config(
        actor,
        None if algorithm is None else algorithm.rollout_correction,
        coef=1.0 if teacher is None else teacher.config.policy_loss_coef,
        filters=algorithm is None or leaves_out_equal_groups(algorithm),
    )
    terms: list[Term] = [policy]
    if actor.has_entropy_bonus:
        terms.append(EntropyBonus(-actor.entropy_coeff))
    if actor.use_kl_loss:
        terms.append(KLTerm(actor.kl_loss_coef, actor.kl_loss_type))
    if teacher is not None:
        terms.append(teacher)
    if actor.success_nll_coef:
        terms.append(SuccessNLL(actor.success_nll_coef))
    if actor.observation_nll_coef:
        terms.append(ObservationNLL(actor.observation_nll_coef))
    return terms
