"""The critic of PPO: values by token, fitted to the returns."""

from __future__ import annotations

from typing import cast

import torch

from agentrl.algorithms.aggregate import LossScale, aggregate, with_loss_units
from agentrl.algorithms.value_loss import value_loss
from agentrl.config.registries import CRITIC_BACKENDS
from agentrl.config.sections.training import Config
from agentrl.observe.report import Report
from agentrl.observe.watch import Comparison, Counts, Learning, owners_of
from agentrl.system.metrics import Numbers
from agentrl.system.registry import configured
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import CriticBackendFactory, Loss, MiniBatch, Settings
from agentrl.workers.fsdp import FSDPCritic
from agentrl.workers.plan import update_plan, with_policy_tokens
from agentrl.workers.trainable import TrainableWorker


class CriticWorker(TrainableWorker[torch.Tensor]):
    """Values of the states that policy tokens were sampled in: the algorithm, over a `CriticBackend`.

    Starts from `critic.path`, else from the policy's model. Keys that `critic.*` leaves open are the actor's.
    """

    def __init__(self, config: Config, *, device: str | torch.device, total_steps: int) -> None:
        """Make the backend of the critic's strategy. Raises ConfigError. total_steps: as `PolicyWorker`'s."""
        critic, model = config.critic, config.actor_rollout_ref.model
        self.config = section = critic.over(config.actor_rollout_ref.actor)
        self._clip = critic.cliprange_value
        self.seed = config.trainer.seed
        self._max_response_length = config.data.max_response_length
        if critic.path not in (None, model.path):  # another model's config.json
            model = model.model_copy(update={"path": critic.path, "override_config": {}})
        settings = Settings(section=section, model=model, device=device, total_steps=total_steps)
        make = cast(CriticBackendFactory, CRITIC_BACKENDS.get(section.strategy))
        self.backend = configured(make, section.strategy_options, f"{CRITIC_BACKENDS.key}_options")(settings)
        learning: Learning[torch.Tensor] = Learning(
            kind="critic",
            config=config,
            section=section,
            dtype=model.dtype,
            total_steps=total_steps,
            scores=lambda values: {"score": values},
        )
        super().__init__(self.backend, learning, config.trainer.checks.watches)

    def compute_values(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Return ([T] float32 on the CPU: the value of the state before each token, see `ValueModel.forward`; {})."""
        return self.backend.values(batch), {}

    def recompute(self, sequence: Sequences, compare: Comparison) -> Report:
        """Compare one sequence's values with those of transformers' own model."""
        if not isinstance(self.backend, FSDPCritic):
            return compare(None, sequence, torch.device("cpu"))
        with self.backend.on_device():
            return compare(self.backend.second(), sequence, self.backend.device)

    def update(self, batch: Sequences, *, step: int) -> Numbers:
        """Fit the values to `batch.returns`, in mini-batches of whole prompts; `step` counts from 1.

        Returns critic/vf_loss, critic/clip_frac, critic/value_mean, critic/grad_norm, critic/lr and
        critic/skipped_updates (see `agentrl.trainer.step`).

        Raises ValueError when values or returns are missing or there is no policy token, and TrainingError when loss
        or gradient were not finite for too long (see `agentrl.workers.trainable`).
        """
        batch = with_loss_units(batch.select(with_policy_tokens(batch)), self.config.loss_unit)
        if len(batch) == 0:
            raise ValueError("CriticWorker.update: the batch has no policy token")
        if not (batch.has("values") and batch.has("returns")):
            raise ValueError("CriticWorker.update: batch.values and batch.returns are needed; compute them first")
        key = f"{self.seed}/{step}" if self.config.shuffle else None
        tokens, units, mode = batch.policy_tokens, batch.sequences["loss_unit"], self.config.loss_agg_mode
        plan = update_plan(batch.group, self.config.ppo_mini_batch_size, self.config.ppo_epochs, key)
        minis = (
            MiniBatch(
                f"step {step}, {where} of the critic",
                batch.select(rows),
                self._loss(LossScale.from_policy_tokens(tokens[rows], mode, self._max_response_length, units[rows])),
                watches=self._watched(Counts(policy_tokens=tokens[rows], owners=owners_of(batch, rows))),
            )
            for where, rows in plan
        )
        report = self._learn(minis, step=step, rates=len(plan) if self.config.optim.lr_by_mini_batch else 1)
        return report.metrics("critic", {"vf_loss": "loss"}, {"clip_frac": "clipped", "value_mean": "values"})

    def _loss(self, scale: LossScale) -> Loss[torch.Tensor]:
        """Make the loss of a mini-batch, divided by the denominators of `scale`."""

        def loss(values: torch.Tensor, micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            """Compute (loss, a scalar; sums for metrics, scalars) from the values [T] float32 of a micro-batch."""
            assert micro.values is not None and micro.returns is not None
            by_token, clipped = value_loss(values, micro.values, micro.returns, micro.mask, self._clip)
            seen = {"tokens": micro.mask.sum(), "clipped": clipped, "values": values.detach()[micro.mask].sum()}
            return aggregate(by_token, micro.mask, micro.offsets, scale, micro.unit_tokens), seen

        return loss
