"""The critic of PPO: values by token, fitted to the returns."""

from __future__ import annotations

from typing import cast

import torch

from agentrl.algorithms.aggregate import LossScale, aggregate, with_loss_units
from agentrl.algorithms.value_loss import value_loss
from agentrl.checks.loss_gradient import Counts, owners_of
from agentrl.checks.optimizer_step import StepWatch
from agentrl.checks.recomputed import recompute
from agentrl.checks.report import Report
from agentrl.checks.update import UpdateWatch, of_critic
from agentrl.config.registries import CRITIC_BACKENDS
from agentrl.config.sections.actor import ActorConfig, CriticConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.system.metrics import Numbers
from agentrl.system.registry import configured
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import CriticBackendFactory, Loss, MiniBatch, Settings
from agentrl.workers.fsdp import FSDPCritic
from agentrl.workers.plan import update_plan, with_policy_tokens
from agentrl.workers.trainable import TrainableWorker


class CriticWorker(TrainableWorker[torch.Tensor]):
    """Values of the states that policy tokens were sampled in: the algorithm, over a `CriticBackend`.

    Starts from `critic.path`, else from the policy's model. Settings that `critic.*` leaves open are taken from the
    actor's config. The other arguments are the same as for `PolicyWorker`.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        critic_config: CriticConfig,
        actor_config: ActorConfig,
        *,
        device: str | torch.device,
        total_steps: int,
        seed: int,
        max_response_length: int | None = None,
    ) -> None:
        self.config = critic_config
        self.seed = seed
        self._mini_batch_size = critic_config.ppo_mini_batch_size or actor_config.ppo_mini_batch_size
        self._epochs = critic_config.ppo_epochs or actor_config.ppo_epochs
        self._shuffle, self._loss_unit = actor_config.shuffle, actor_config.loss_unit
        self._max_response_length = max_response_length
        if critic_config.path not in (None, model_config.path):  # another model's config.json
            model_config = model_config.model_copy(update={"path": critic_config.path, "override_config": {}})
        settings = Settings(
            model=model_config,
            optim=critic_config.optim,
            parallel=critic_config.parallel,
            device=device,
            total_steps=total_steps,
            grad_clip=critic_config.grad_clip,
            max_tokens=critic_config.ppo_max_token_len_per_gpu,
            freeze_vision_tower=actor_config.freeze_vision_tower,
            param_offload=actor_config.fsdp_config.param_offload,
            use_torch_compile=actor_config.use_torch_compile,
            checkpoint_writer=actor_config.checkpoint.writer,
        )
        make = cast(CriticBackendFactory, CRITIC_BACKENDS.get(critic_config.strategy))
        self.backend = configured(make, critic_config.strategy_options, f"{CRITIC_BACKENDS.key}_options")(settings)
        steps = StepWatch(critic_config.optim, critic_config.grad_clip, total_steps)
        learnt = of_critic(critic_config, self._loss_unit, max_response_length)
        self._watch = UpdateWatch(learnt, steps, model_config.dtype)
        super().__init__(self.backend, self._watch)

    def compute_values(self, batch: RaggedBatch) -> tuple[torch.Tensor, Numbers]:
        """Return ([T] float32 on the CPU: the value of the state before each token, see `ValueModel.forward`; {})."""
        return self.backend.values(batch), {}

    def recompute(self, sequence: Sequences, *, gradients: bool) -> Report:
        """Compute one sequence of a step's batch again, by transformers' own model (see `checks.recomputed`)."""
        if not isinstance(self.backend, FSDPCritic):
            return recompute(None, sequence, torch.device("cpu"))
        with self.backend.on_device():
            return recompute(self.backend.second(), sequence, self.backend.device, gradients=gradients)

    def update(self, batch: Sequences, *, step: int) -> Numbers:
        """Fit the values to `batch.returns`, in mini-batches of whole prompts; `step` counts from 1.

        Returns critic/vf_loss, critic/clip_frac, critic/value_mean, critic/grad_norm, critic/lr and
        critic/skipped_updates (see `agentrl.trainer.step`).

        Raises ValueError when values or returns are missing or there is no policy token, and TrainingError when loss
        or gradient were not finite for too long (see `agentrl.workers.trainable`).
        """
        batch = with_loss_units(batch.select(with_policy_tokens(batch)), self._loss_unit)
        if len(batch) == 0:
            raise ValueError("CriticWorker.update: the batch has no policy token")
        if not (batch.has("values") and batch.has("returns")):
            raise ValueError("CriticWorker.update: batch.values and batch.returns are needed; compute them first")
        key = f"{self.seed}/{step}" if self._shuffle else None
        tokens, units, mode = batch.policy_tokens, batch.sequences["loss_unit"], self.config.loss_agg_mode
        plan = update_plan(batch.group, self._mini_batch_size, self._epochs, key)
        minis = (
            MiniBatch(
                f"step {step}, {where} of the critic",
                batch.select(rows),
                self._loss(LossScale.from_policy_tokens(tokens[rows], mode, self._max_response_length, units[rows])),
                watch=self._watch.mini(Counts(policy_tokens=tokens[rows], owners=owners_of(batch, rows))),
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
            by_token, clipped = value_loss(values, micro.values, micro.returns, micro.mask, self.config.cliprange_value)
            seen = {"tokens": micro.mask.sum(), "clipped": clipped, "values": values.detach()[micro.mask].sum()}
            return aggregate(by_token, micro.mask, micro.offsets, scale, micro.unit_tokens), seen

        return loss
