"""The critic of PPO: values by token, fitted to the returns."""

from __future__ import annotations

from pathlib import Path

import torch

from agentrl.algorithms.losses import LossScale, aggregate, value_loss
from agentrl.checkpoint.state import WorkerState
from agentrl.config.sections.actor import ActorConfig, CriticConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.model.heads import ValueModel, freeze_vision
from agentrl.model.sharded_load import open_model
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import Offload, at_work
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.learner import Learner, Loss, MiniBatch, forward_tokens
from agentrl.workers.plan import update_plan, with_policy_tokens


class CriticWorker:
    """Values of the states that policy tokens were sampled in.

    Starts from `critic.path`, else from the policy's model; what `critic.*` leaves open is taken from the actor's
    config. The other arguments are those of `PolicyWorker`.
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
        self.device = torch.device(device)
        self.seed = seed
        self._mini_batch_size = critic_config.ppo_mini_batch_size or actor_config.ppo_mini_batch_size
        self._epochs = critic_config.ppo_epochs or actor_config.ppo_epochs
        self._shuffle = actor_config.shuffle
        self._max_response_length = max_response_length
        path = critic_config.path or model_config.path
        base = open_model(path, dtype="float32", device=device, trust_remote_code=model_config.trust_remote_code)
        if actor_config.freeze_vision_tower:
            freeze_vision(base)
        mesh = Mesh(critic_config.parallel, device)
        self.model = ValueModel(base, autocast=model_config.dtype == "bfloat16", group=mesh.sequence)
        self.learner = Learner(
            self.model,
            critic_config.optim,
            mesh,
            grad_clip=critic_config.grad_clip,
            max_tokens=critic_config.ppo_max_token_len_per_gpu,
            total_steps=total_steps,
            gradient_checkpointing=model_config.enable_gradient_checkpointing,
            activation_offload=model_config.enable_activation_offload,
            optimizer_offload=actor_config.fsdp_config.param_offload,
            compiled=actor_config.use_torch_compile,
        )
        self.offload = Offload(self.model, self.device, enabled=actor_config.fsdp_config.param_offload)
        self.state = WorkerState(self.learner.params, self.learner.optim)

    @at_work
    def compute_values(self, batch: RaggedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return ([T] float32 on the CPU: the value of the state before each token, see `ValueModel.forward`; {})."""

        def values(micro: RaggedBatch) -> torch.Tensor:
            found: torch.Tensor = self.model(micro.ids, micro.offsets, micro.images)
            return found

        return forward_tokens(values, batch, self.learner.max_tokens, self.device), {}

    @at_work
    def update(self, batch: Sequences, *, step: int) -> dict[str, float]:
        """Fit the values to `batch.returns`, in mini-batches of whole prompts; `step` counts from 1.

        Returns critic/vf_loss, critic/clip_frac, critic/value_mean, critic/grad_norm, critic/lr and
        critic/skipped_updates (see `agentrl.trainer.grpo`).

        Raises ValueError when values or returns are missing or there is no policy token, and TrainingError when loss
        or gradient were not finite for too long (see `agentrl.workers.learner`).
        """
        batch = batch.select(with_policy_tokens(batch))
        if len(batch) == 0:
            raise ValueError("CriticWorker.update: the batch has no policy token")
        if not (batch.has("values") and batch.has("returns")):
            raise ValueError("CriticWorker.update: batch.values and batch.returns are needed; compute them first")
        key = f"{self.seed}/{step}" if self._shuffle else None
        tokens, mode = batch.policy_tokens, self.config.loss_agg_mode
        minis = (
            MiniBatch(
                f"step {step}, {where} of the critic",
                batch.select(rows),
                self._loss(LossScale.of(tokens[rows], mode, self._max_response_length)),
            )
            for where, rows in update_plan(batch.group, self._mini_batch_size, self._epochs, key)
        )
        report = self.learner.update(minis, step=step)
        return report.metrics("critic", {"vf_loss": "loss"}, {"clip_frac": "clipped", "value_mean": "values"})

    @at_work
    def save(self, dir: Path, background: bool = False) -> None:
        """Write what is trained and its optimizer state; `load` of them continues bit for bit.

        With `background` they are only copied to host memory: `finish_save` tells when they are written.
        """
        self.state.save(Path(dir), background=background)

    def finish_save(self, wait: bool = True) -> bool:
        """Whether this rank's part of the last save is on the disk. Raises what writing it raised."""
        return self.state.finish(wait=wait)

    @at_work
    def load(self, dir: Path) -> None:
        """Take over what `save` wrote. Raises CheckpointError when it is of another model or half-written."""
        self.state.load(Path(dir))

    def _loss(self, scale: LossScale) -> Loss:
        """The loss of a mini-batch, divided by the denominators of `scale`."""

        def loss(micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert micro.values is not None and micro.returns is not None
            values = self.model(micro.ids, micro.offsets, micro.images)
            by_token, clipped = value_loss(values, micro.values, micro.returns, micro.mask, self.config.cliprange_value)
            seen = {"tokens": micro.mask.sum(), "clipped": clipped, "values": values.detach()[micro.mask].sum()}
            return aggregate(by_token, micro.mask, micro.offsets, scale), seen

        return loss
