"""Workers of a model and a few keys, where a test has no whole config."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.config import ActorConfig, AlgorithmConfig, Config, CriticConfig, ModelConfig
from agentrl.config.declaration import Computed
from agentrl.config.sections.distillation import DistillationConfig
from agentrl.workers import CriticWorker, PolicyWorker


def config_of(
    model: ModelConfig,
    actor: ActorConfig,
    critic: CriticConfig | None = None,
    *,
    temperature: float = 1.0,
    log_prob_max_tokens: int = 4096,
    seed: int = 1,
    critic_warmup: int = 0,
    max_response_length: int = 512,
    algorithm: AlgorithmConfig | None = None,
    distillation: DistillationConfig | None = None,
    expert_coef: float = 0.0,
) -> Config:
    """A config with these parts, unchecked."""
    whole = Config()
    roles = whole.actor_rollout_ref
    scoring = {"temperature": temperature, "log_prob_max_token_len_per_gpu": log_prob_max_tokens}
    rollout = roles.rollout.model_copy(update=scoring)
    trainer = whole.trainer.model_copy(update={"seed": seed, "critic_warmup": critic_warmup})
    return whole.model_copy(
        update={
            "actor_rollout_ref": roles.model_copy(update={"model": model, "actor": actor, "rollout": rollout}),
            "critic": critic or whole.critic,
            "trainer": trainer,
            "data": whole.data.model_copy(update={"max_response_length": max_response_length}),
            "algorithm": algorithm or whole.algorithm,
            "distillation": distillation or whole.distillation,
            "expert": whole.expert.model_copy(update={"coef": expert_coef}),
        }
    )


def policy_worker(
    model: ModelConfig,
    actor: ActorConfig,
    *,
    device: str | torch.device = "cpu",
    total_steps: int = 10,
    further_scores: Sequence[Computed] = (),
    **keys: object,
) -> PolicyWorker:
    """A policy by the keys of `config_of`."""
    config = config_of(model, actor, **keys)  # type: ignore[arg-type]
    return PolicyWorker(config, device=device, total_steps=total_steps, further_scores=further_scores)


def critic_worker(
    model: ModelConfig,
    critic: CriticConfig,
    actor: ActorConfig,
    *,
    device: str | torch.device = "cpu",
    total_steps: int = 10,
    **keys: object,
) -> CriticWorker:
    """A critic by the keys of `config_of`."""
    return CriticWorker(config_of(model, actor, critic, **keys), device=device, total_steps=total_steps)  # type: ignore[arg-type]
