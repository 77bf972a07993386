"""The configured policy loss on a micro-batch, and the terms that are added to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import log_ratio
from agentrl.algorithms.ragged import masked_sum
from agentrl.config.declaration import Declaration, declaration_of
from agentrl.config.registries import POLICY_LOSSES
from agentrl.errors import TrainingError
from agentrl.system.registry import configured

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig
    from agentrl.trajectory.batch import RaggedBatch


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """The policy loss of a micro-batch."""

    by_token: Tensor  # [T] float with gradient
    tokens: Tensor
    """Scalar int64: the policy tokens whose advantage is not 0. The others have no gradient that a clip could cut off,
    and whether sequences of such tokens alone are computed changes no number."""
    sums: dict[str, Tensor]
    """Scalars over these tokens: those of `TokenLoss`, and ppo_kl, the sum of old - new log-prob."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss that `config.policy_loss` names, with its options."""

    config: ActorConfig
    declaration: Declaration
    function: Callable[[LossColumns, ActorConfig], TokenLoss]

    @staticmethod
    def of(config: ActorConfig) -> PolicyLoss:
        """Raises ConfigError when there is no such loss, or it does not take the options."""
        found = POLICY_LOSSES.get(config.policy_loss.loss_mode)
        key = "actor_rollout_ref.actor.policy_loss.options"
        return PolicyLoss(config, declaration_of(found), configured(found, config.policy_loss.options, key))

    def __call__(
        self, micro: RaggedBatch, logprobs: Tensor, entropy: Tensor | None = None, squared_probs: Tensor | None = None
    ) -> MicroLoss:
        """Compute the loss of a micro-batch with advantages.

        logprobs, entropy and squared_probs [T] float with gradient, the last two where they are declared. Without
        old_logprobs the policy's own, detached, stand in. Raises TrainingError when the loss does not return one number
        a token.
        """
        columns = self._columns(micro, logprobs, entropy, squared_probs)
        found = self.function(columns, self.config)
        if found.by_token.shape != columns.mask.shape:
            raise TrainingError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={self.config.policy_loss.loss_mode}: expected by_token "
                f"of shape {list(columns.mask.shape)}, one a token, found {list(found.by_token.shape)}"
            )
        with torch.no_grad():
            taught = columns.mask & (columns.advantages != 0)
            sums = {"ppo_kl": -masked_sum(log_ratio(columns), taught), **found.sums}
        return MicroLoss(found.by_token, taught.sum(), sums)

    def _columns(
        self, micro: RaggedBatch, logprobs: Tensor, entropy: Tensor | None, squared_probs: Tensor | None
    ) -> LossColumns:
        assert micro.advantages is not None
        mask = micro.mask

        def inside(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0)

        further = {"ref_logprobs": micro.ref_logprobs, "entropy": entropy, "squared_probs": squared_probs}
        declared: dict[str, Tensor] = {}
        for name, values in further.items():
            if name in self.declaration.columns:
                assert values is not None, f"{name} is declared"
                declared[name] = inside(values)
        return LossColumns(
            logprobs=inside(logprobs),
            old_logprobs=inside(logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs),
            rollout_logprobs=inside(micro.rollout_logprobs),
            advantages=inside(micro.advantages),
            mask=mask,
            offsets=micro.offsets,
            turn=micro.turn,
            version=micro.version,
            **declared,
        )


def actor_loss(
    policy: Tensor,
    *,
    entropy: Tensor | None = None,
    entropy_coeff: float = 0.0,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """[T]: policy loss - entropy_coeff * entropy + kl_coef * kl, all [T] and aggregated alike.

    The entropy bonus is PPO's (arXiv:1707.06347, eq. 9), the KL to the reference GRPO's (arXiv:2402.03300, eq. 3).
    """
    loss = policy
    if entropy is not None and entropy_coeff != 0:
        loss = loss - entropy_coeff * entropy
    if kl is not None and kl_coef != 0:
        loss = loss + kl_coef * kl
    return loss
