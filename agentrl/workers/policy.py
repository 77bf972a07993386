"""The policy: log-probs of what was sampled, the update, and its weights for the engine and for disk."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.losses import Clip, LossScale, actor_loss, aggregate, policy_loss
from agentrl.checkpoint.state import WorkerState
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.model import ModelConfig
from agentrl.engines.weights import Weights
from agentrl.model.export import export_model
from agentrl.model.heads import load_policy
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import Offload, at_work, give_back
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.learner import Learner, Loss, MiniBatch, forward_tokens
from agentrl.workers.plan import update_plan, with_policy_tokens


class PolicyWorker:
    """The trained policy on one device, or one rank's part of it.

    Args:
        temperature: what the engine sampled with; log-probs are of softmax(logits / temperature).
        log_prob_max_tokens: tokens a micro-batch of `compute_log_probs` and rank.
        total_steps: training steps of the whole run.
        critic_warmup: training steps at its start in which only the critic learns; the learning rate's schedule begins
            after them.
        seed: of the order of mini-batches, and of the start of adapters.
        max_response_length: the constant of loss_agg_mode=seq-mean-token-sum-norm, needed only there.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        actor_config: ActorConfig,
        *,
        device: str | torch.device,
        temperature: float,
        log_prob_max_tokens: int,
        total_steps: int,
        seed: int,
        critic_warmup: int = 0,
        max_response_length: int | None = None,
    ) -> None:
        self.config = actor_config
        self.device = torch.device(device)
        self.temperature = temperature
        self.seed = seed
        self._critic_warmup = critic_warmup
        self._max_response_length = max_response_length
        self._dtype = getattr(torch, model_config.dtype)
        mesh = Mesh(actor_config.parallel, device)
        self._log_prob_max_tokens = log_prob_max_tokens * mesh.parallel.sequence
        self.model = load_policy(
            model_config,
            device=device,
            seed=seed,
            freeze_vision_tower=actor_config.freeze_vision_tower,
            group=mesh.sequence,
        )
        self.base = self.model.base
        self.learner = Learner(
            self.model,
            actor_config.optim,
            mesh,
            grad_clip=actor_config.grad_clip,
            max_tokens=actor_config.ppo_max_token_len_per_gpu,
            total_steps=total_steps - critic_warmup,
            gradient_checkpointing=model_config.enable_gradient_checkpointing,
            activation_offload=model_config.enable_activation_offload,
            optimizer_offload=actor_config.fsdp_config.param_offload,
            compiled=actor_config.use_torch_compile,
        )
        self.offload = Offload(self.model, self.device, enabled=actor_config.fsdp_config.param_offload)
        self.state = WorkerState(self.learner.params, self.learner.optim)

    @at_work
    def compute_log_probs(self, batch: RaggedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """([T] float32 on the CPU: log-probs of the policy tokens, 0 elsewhere; the metric actor/entropy).

        The entropy is the mean over the batch's policy tokens, in nats.
        """
        scores = forward_tokens(self._score, batch, self._log_prob_max_tokens, self.device)
        sums = torch.stack([scores[:, 1].double().sum(), batch.mask.sum().double()]).to(self.device)
        entropy, tokens = self.learner.mesh.sum(sums).tolist()
        return scores[:, 0].contiguous(), {"actor/entropy": entropy / max(tokens, 1.0)}

    @at_work
    def compute_reference_log_probs(self, batch: RaggedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """As `ReferenceWorker.compute_reference_log_probs`, under the model that the adapters were put into."""
        assert self.model.lora is not None
        with self.model.lora.off():
            scores = forward_tokens(self._score, batch, self._log_prob_max_tokens, self.device)
        return scores[:, 0].contiguous(), {}

    @at_work
    def update(self, batch: Sequences, *, step: int, zero_advantage: Collection[int] = ()) -> dict[str, float]:
        """Update the weights in mini-batches of whole prompts; `step` is the training step, counted from 1.

        Every rank is given all sequences, and loads its share of each mini-batch.
        With one mini-batch and one epoch `batch.old_logprobs` may be None: the policy's own log-probs, detached, are
        the same. Sequences without a policy token are left out.

        zero_advantage: sequences whose advantages are all 0. With neither KL loss nor entropy bonus their gradient is
        0, and they are not computed. This changes no weight: mini-batches and denominators are those of all sequences,
        and a mini-batch without any other takes its optimizer step, too.

        Returns actor/pg_loss, actor/ppo_kl, actor/clip_frac, actor/clip_frac_lower, actor/grad_norm (before clipping),
        actor/lr, actor/skipped_updates, with KL in the loss actor/kl_loss (see `agentrl.trainer.grpo`);
        train/filtered_fraction, the part of the sequences that was not computed; and perf/update_tokens, all tokens
        that the updates went over.

        Raises ValueError when a field of the batch is missing or the batch has no policy token, and TrainingError
        when loss or gradient were not finite for too long (see `agentrl.workers.learner`).
        """
        config = self.config
        rows = with_policy_tokens(batch)
        left_out = set() if config.use_kl_loss or config.entropy_coeff != 0 else set(zero_advantage)
        computed = [row not in left_out for row in rows]
        batch = batch.select(rows)
        key = f"{self.seed}/{step}" if config.shuffle else None
        plan = update_plan(batch.group, config.ppo_mini_batch_size, config.ppo_epochs, key)
        self._check(batch, len(plan))
        tokens = batch.policy_tokens
        minis = (
            MiniBatch(
                f"step {step}, {where} of the policy",
                batch.select([row for row in members if computed[row]]),
                self._loss(LossScale.of(tokens[members], config.loss_agg_mode, self._max_response_length)),
            )
            for where, members in plan
        )
        report = self.learner.update(minis, step=step - self._critic_warmup)
        length = int(batch.lengths[torch.tensor(computed)].sum())
        terms = {"pg_loss": "pg_loss"} | ({"kl_loss": "kl_loss"} if config.use_kl_loss else {})
        by_token = {"ppo_kl": "kl", "clip_frac": "clipped", "clip_frac_lower": "dual_clipped"}
        return report.metrics("actor", terms, by_token) | {
            "train/filtered_fraction": 1 - sum(computed) / len(computed),
            "perf/update_tokens": float(length * config.ppo_epochs),
        }

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight once, by its name in checkpoints, whole and in the engine's dtype. Tied weights have one name.

        Adapters are merged into the weights that they stand beside. In float32 other tensors may be the live weights
        themselves, which the next update changes: copy them.
        """
        with self.offload:
            for name, tensor in self.model.named_tensors(self.learner.tensors):
                yield name, tensor.to(self._dtype)

    def weights(self) -> Weights:
        """`named_tensors` for an engine. Where the policy is sharded, every rank must read them together."""
        give_back(self.device)
        return Weights(self.model.shapes(self.learner.tensors), self.named_tensors)

    @at_work
    def save(self, dir: Path, background: bool = False) -> None:
        """Write what is trained and its optimizer state; `load` of them continues bit for bit.

        With `background` they are only copied to host memory: `finish_save` tells when they are written.
        """
        self.state.save(Path(dir), self.model.mark(self.learner.tensors), background=background)

    def finish_save(self, wait: bool = True) -> bool:
        """Whether this rank's part of the last save is on the disk. Raises what writing it raised."""
        return self.state.finish(wait=wait)

    @at_work
    def load(self, dir: Path) -> None:
        """Take over what `save` wrote. Raises CheckpointError when it is of another model or half-written."""
        self.state.load(Path(dir), self.model.mark(self.learner.tensors))

    @at_work
    def export(self, dir: Path, tokenizer: Any) -> None:
        """Write the policy and its tokenizer in Hugging Face format, in the configured dtype; see `export_model`."""
        export_model(self.model, self.learner.tensors, self._dtype, Path(dir), tokenizer)

    def _score(self, micro: RaggedBatch) -> torch.Tensor:
        """[T, 2]: log-probs and entropies of the policy tokens."""
        logprobs, entropy = self.model(
            micro.ids,
            micro.offsets,
            needed=micro.mask,
            temperature=self.temperature,
            with_entropy=True,
            images=micro.images,
        )
        return torch.stack([logprobs, entropy], dim=1)

    def _check(self, batch: Sequences, optimizer_steps: int) -> None:
        if len(batch) == 0:
            raise ValueError("PolicyWorker.update: the batch has no policy token")
        if not batch.has("advantages"):
            raise ValueError("PolicyWorker.update: batch.advantages is missing; compute them first")
        if not batch.has("old_logprobs") and optimizer_steps != 1:
            raise ValueError(
                f"PolicyWorker.update: {optimizer_steps} optimizer steps need batch.old_logprobs; without them the "
                "batch must be one mini-batch and one epoch"
            )
        if self.config.use_kl_loss and not batch.has("ref_logprobs"):
            raise ValueError("PolicyWorker.update: use_kl_loss needs batch.ref_logprobs, of the reference policy")

    def _loss(self, scale: LossScale) -> Loss:
        """The loss of a mini-batch, divided by the denominators of `scale`."""
        config = self.config
        clip = Clip(config.clip_low, config.clip_high, config.clip_ratio_c)

        def loss(micro: RaggedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            assert micro.advantages is not None
            logprobs, entropy = self.model(
                micro.ids,
                micro.offsets,
                needed=micro.mask,
                temperature=self.temperature,
                with_entropy=config.entropy_coeff != 0,
                images=micro.images,
            )
            old = logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs
            by_token, stats = policy_loss(
                config.policy_loss.loss_mode, logprobs, old, micro.advantages, micro.mask, micro.offsets, clip
            )
            kl = None
            if config.use_kl_loss:
                assert micro.ref_logprobs is not None
                kl = kl_penalty(logprobs, micro.ref_logprobs, config.kl_loss_type)
            seen = {
                "pg_loss": aggregate(by_token.detach(), micro.mask, micro.offsets, scale),
                "tokens": stats.tokens,
                "clipped": stats.clipped,
                "dual_clipped": stats.dual_clipped,
                "kl": stats.kl,
            }
            if kl is not None:
                seen["kl_loss"] = aggregate(kl.detach(), micro.mask, micro.offsets, scale)
            whole = actor_loss(
                by_token, entropy=entropy, entropy_coeff=config.entropy_coeff, kl=kl, kl_coef=config.kl_loss_coef
            )
            return aggregate(whole, micro.mask, micro.offsets, scale), seen

        return loss
