"""The roles of a run as the training loops call them: one class per role, over the ranks that hold its model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from agentrl.algorithms.policy_loss import loss_columns
from agentrl.checkpoint.manager import Finish
from agentrl.checkpoint.state import all_seen
from agentrl.config.declaration import Computed
from agentrl.config.sections.algorithm import RolloutCorrectionConfig
from agentrl.engines.weights import Weights
from agentrl.observe.report import Report
from agentrl.observe.watch import Comparison, UpdateChecked
from agentrl.runtime.ranks import Batch, Ranks
from agentrl.system.metrics import Numbers
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.critic import CriticWorker
from agentrl.workers.policy import PolicyWorker
from agentrl.workers.preferences import PreferenceWorker
from agentrl.workers.reference import ReferenceWorker
from agentrl.workers.reward_model import RewardModelWorker
from agentrl.workers.sft import TuningWorker
from agentrl.workers.teacher import TeacherWorker
from agentrl.workers.trainable import TrainableWorker


class TrainableGroup:
    """Saving and loading of a role that learns."""

    def __init__(self, ranks: Ranks[TrainableWorker[object]]) -> None:
        self._trainable = ranks

    def save(self, dir: Path, *, background: bool) -> Finish:
        """Have every rank write its part of model and optimizer into `dir`.

        Returns an object that says whether this process sees all of the files.
        """
        files = list(chain.from_iterable(self._trainable.broadcast(TrainableWorker.save, dir, background=background)))

        def finish(wait: bool) -> bool:
            written = all(self._trainable.broadcast(TrainableWorker.finish_save, wait=wait))
            return written and all_seen(dir, files, wait=wait)

        return finish

    def checked(self) -> list[UpdateChecked]:
        """Return the findings of each rank's watches about the last `update`."""
        return list(chain.from_iterable(self._trainable.broadcast(TrainableWorker.checked)))

    def load(self, dir: Path) -> None:
        """Load the parts in `dir`, saved by any number of ranks. Raises CheckpointError."""
        self._trainable.broadcast(TrainableWorker.load, dir)


class PolicyGroup(TrainableGroup):
    """The policy that is trained."""

    def __init__(
        self, ranks: Ranks[PolicyWorker], further_scores: Sequence[Computed] = (), *, records_experts: bool = False
    ) -> None:
        """Take the ranks with their workers' options: `further_scores`, router_replay.mode=R2."""
        super().__init__(ranks)
        self._ranks = ranks
        self._further_scores = further_scores
        self._records_experts = records_experts

    def keep(self) -> None:
        """Keep the weights as they are, for `log_probs` where the proximal policy is the published one."""
        self._ranks.broadcast(PolicyWorker.keep)

    def log_probs(self, batch: Batch) -> tuple[Batch, Numbers]:
        """Add the columns old_logprobs and `further_scores` [T] float32; the metrics hold actor/entropy in nats.

        With router_replay.mode=R2 the column experts [T, L, k], too.
        """
        method = PolicyWorker.compute_log_probs
        batch, metrics = self._ranks.add_columns(("old_logprobs", *self._further_scores), method, batch)
        if self._records_experts:
            batch = self._ranks.cached_columns(("experts",), PolicyWorker.of_log_probs, batch)
        return batch, metrics

    def update(
        self,
        batch: Sequences,
        *,
        step: int,
        expert: Sequences | None = None,
        entropy_coeff: float | None = None,
        by_token: bool = False,
    ) -> Numbers:
        """Take the optimizer steps of training step `step` (see `PolicyWorker.update`)."""
        return self._ranks.metrics(
            PolicyWorker.update, batch, step=step, expert=expert, entropy_coeff=entropy_coeff, by_token=by_token
        )

    def recompute(self, sequence: Sequences, temperature: float, compare: Comparison) -> Report:
        """Compare one sequence's scores with a second computation (see `PolicyWorker.recompute`)."""
        return self._ranks.broadcast(PolicyWorker.recompute, sequence, temperature, compare)[0]

    def of_update(self, batch: Batch, correction: RolloutCorrectionConfig) -> Batch:
        """Add to the batch of the last `update`, which was called with `by_token`, the columns of its loss."""
        return self._ranks.cached_columns(loss_columns(correction), PolicyWorker.of_update, batch)

    def weights(self) -> Weights:
        """Return the weights as they are when they are read."""
        return self._ranks.weights(PolicyWorker.weights)

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write the policy and its tokenizer into `dir` in Hugging Face format."""
        self._ranks.broadcast(PolicyWorker.export, dir, tokenizer)


class HasReference(Protocol):
    """A worker with the model that KLs are measured against."""

    def compute_reference_log_probs(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Return ([T] float32 on the CPU: log-probs of the policy tokens, 0 elsewhere; no metrics)."""
        ...

    def recompute_reference(self, sequence: Sequences, temperature: float, compare: Comparison) -> Report:
        """Compare one sequence's scores with a second computation."""
        ...


class ReferenceGroup:
    """The reference policy: a model of its own, or the policy without its adapters."""

    def __init__(self, ranks: Ranks[HasReference], own: Ranks[ReferenceWorker] | None = None) -> None:
        """own: the same ranks, where the reference is a model of its own."""
        self._ranks, self._own = ranks, own

    def sampled_checksums(self) -> dict[str, str]:
        """Return checksums of the reference's tensors on every rank; empty where the policy without adapters is it."""
        if not self._own:
            return {}
        ranks = self._own.broadcast(ReferenceWorker.sampled_checksums)
        return {f"{name} (rank {rank})": value for rank, part in enumerate(ranks) for name, value in part.items()}

    def recompute(self, sequence: Sequences, temperature: float, compare: Comparison) -> Report:
        """Compare one sequence's scores with a second computation."""
        return self._ranks.broadcast(HasReference.recompute_reference, sequence, temperature, compare)[0]

    def log_probs(self, batch: Batch) -> Batch:
        """Add the column ref_logprobs [T] float32."""
        return self._ranks.add_columns(("ref_logprobs",), HasReference.compute_reference_log_probs, batch)[0]


class TeacherGroup:
    """The teachers of a distillation."""

    def __init__(self, ranks: Ranks[TeacherWorker] | None, policy: Ranks[PolicyWorker] | None = None) -> None:
        """policy: where it is a teacher, too; ranks: of the others, where there are some."""
        self._ranks, self._policy = ranks, policy

    def recompute(self, sequence: Sequences, compare: Comparison) -> Report:
        """Compare one sequence's scores with a second computation. The policy as a teacher is left out."""
        return Report() if self._ranks is None else self._ranks.broadcast(TeacherWorker.recompute, sequence, compare)[0]

    def scores(self, batch: Batch) -> Batch:
        """Add the column teacher_scores [T, 1 + X] float32 to a batch with the column teacher."""
        if self._policy is not None:
            batch, _ = self._policy.add_columns(("teacher_scores",), PolicyWorker.compute_teacher_scores, batch)
        if self._ranks is not None:
            batch, _ = self._ranks.add_columns(("teacher_scores",), TeacherWorker.compute_teacher_scores, batch)
        return batch


class CriticGroup(TrainableGroup):
    """The critic of PPO."""

    def __init__(self, ranks: Ranks[CriticWorker]) -> None:
        super().__init__(ranks)
        self._ranks = ranks

    def values(self, batch: Batch) -> Batch:
        """Add the column values [T] float32."""
        return self._ranks.add_columns(("values",), CriticWorker.compute_values, batch)[0]

    def recompute(self, sequence: Sequences, compare: Comparison) -> Report:
        """Compare one sequence's values with a second computation."""
        return self._ranks.broadcast(CriticWorker.recompute, sequence, compare)[0]

    def update(self, batch: Sequences, *, step: int) -> Numbers:
        """Take the optimizer steps of training step `step` (see `CriticWorker.update`)."""
        return self._ranks.metrics(CriticWorker.update, batch, step=step)


class RewardModelGroup:
    """The reward model."""

    def __init__(self, ranks: Ranks[RewardModelWorker]) -> None:
        self._ranks = ranks

    def scores(self, conversations: Batch) -> Batch:
        """Set the column rewards [T] float32: each sequence's score at its last token, 0 elsewhere."""
        return self._ranks.add_columns(("rewards",), RewardModelWorker.compute_scores, conversations)[0]


class TuningGroup(TrainableGroup):
    """The model of supervised training, or of training on preferences."""

    def __init__(self, ranks: Ranks[TuningWorker[object]]) -> None:
        super().__init__(ranks)
        self._ranks = ranks

    def update(self, batch: Sequences, *, step: int) -> Numbers:
        """Take one optimizer step (see `TuningWorker.update`)."""
        return self._ranks.metrics(TuningWorker.update, batch, step=step)

    def mean_loss(self, batch: Sequences) -> Numbers:
        """Return val/loss, without learning."""
        return self._ranks.metrics(TuningWorker.mean_loss, batch)

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write model and tokenizer into `dir` in Hugging Face format."""
        self._ranks.broadcast(TuningWorker.export, dir, tokenizer)


class PreferenceGroup(TuningGroup):
    """The model of training on preferences."""

    def __init__(self, ranks: Ranks[PreferenceWorker[object]]) -> None:
        super().__init__(ranks)
        self._pair_ranks = ranks

    def scores(self, batch: Batch) -> Batch:
        """Add the column ref_logprobs [T] float32, by the model as it is now."""
        return self._pair_ranks.add_columns(("ref_logprobs",), PreferenceWorker.compute_scores, batch)[0]
