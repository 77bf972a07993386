"""KL between policies from the log-probs of sampled tokens: estimators, and the KL in the reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from agentrl.algorithms.ragged import masked_mean, segment_sum, sum_by
from agentrl.errors import TrainingError
from agentrl.system.json_value import JSON

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import KLLossType, KLType
    from agentrl.trajectory.batch import RaggedBatch


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLType) -> Tensor:
    """Estimate KL(policy || reference) by token, for tokens that the policy sampled: [T], from log-probs [T] float.

    With d = log p - log q (J. Schulman, "Approximating KL Divergence", 2020, http://joschu.net/blog/kl-approx.html):
    - kl, k1: d, unbiased; as a loss its expected gradient is 0, so it belongs in the reward
    - abs: |d|
    - mse, k2: d^2 / 2, whose gradient is the KL's
    - low_var_kl, k3: exp(-d) - 1 + d, unbiased and never negative (GRPO, arXiv:2402.03300, eq. 4); -d is clamped to
      +-20 and the result to +-10
    """
    difference = logprobs - ref_logprobs
    match kind:
        case "kl" | "k1":
            return difference
        case "abs":
            return difference.abs()
        case "mse" | "k2":
            return 0.5 * difference.square()
        case "low_var_kl" | "k3":
            log_ratio = (-difference).clamp(-20.0, 20.0)
            return (log_ratio.exp() - 1 - log_ratio).clamp(-10.0, 10.0)


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, kind: KLLossType) -> Tensor:
    """Estimate KL(policy || reference) by token for a loss: [T] float, from log-probs [T] float.

    Without a +, return `kl_penalty` with its own gradient. For k1 that gradient is 0 in expectation; for k3 it is the
    gradient of the reverse divergence. With a +, return the value of `kl_penalty` with the gradient of k2, which is the
    gradient of the KL for tokens that the policy sampled.
    """
    if not kind.endswith("+"):
        return kl_penalty(logprobs, ref_logprobs, cast("KLType", kind))
    value = kl_penalty(logprobs, ref_logprobs, cast("KLType", kind.removesuffix("+")))
    k2 = kl_penalty(logprobs, ref_logprobs, "k2")
    return value.detach() + (k2 - k2.detach())


@dataclass(slots=True)
class FixedKLController:
    """Constant coefficient `coef` of the KL in the reward, also after a checkpoint that had another."""

    coef: float

    def update(self, kl: float, trajectories: int) -> None:
        """Adapt to a step whose mean KL over so many trajectories was `kl`."""

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        """Take over the result of `state_dict`."""


@dataclass(slots=True)
class AdaptiveKLController(FixedKLController):
    """Coefficient that steers the KL towards `target` (arXiv:1909.08593, section 2.2).

    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * trajectories / horizon.
    """

    target: float
    horizon: int

    def update(self, kl: float, trajectories: int) -> None:
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * trajectories / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, JSON]) -> None:
        coef = state.get("coef", self.coef)  # a constant coefficient had no state
        if not isinstance(coef, int | float):
            raise TypeError(f"expected a number as coef, found {coef!r:.100}")
        self.coef = coef


def apply_kl_to_rewards(batch: RaggedBatch, kind: KLType, coef: float) -> tuple[RaggedBatch, float]:
    """Subtract coef * KL(old policy || reference) from the reward of every policy token.

    r_t - coef * kl_t (arXiv:1909.08593, eq. 2, by token). Needs `old_logprobs` and `ref_logprobs`. Returns the
    batch and the KL that steers controllers, the mean over trajectories of their mean over policy tokens. Raises
    TrainingError when the KL is not finite.
    """
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "both log-probs come first"
    kl = torch.where(batch.mask, kl_penalty(batch.old_logprobs, batch.ref_logprobs, kind), 0.0)
    if not kl.isfinite().all():
        columns = {"the policy's": batch.old_logprobs, "the reference's": batch.ref_logprobs}
        broken = [f"{int((~one[batch.mask].isfinite()).sum())} of {whose}" for whose, one in columns.items()]
        raise TrainingError(
            f"algorithm.use_kl_in_reward: the KL of {int((~kl.isfinite()).sum())} of {int(batch.mask.sum())} policy "
            f"tokens is not finite; of their log-probs {' and '.join(broken)} are not. That model's weights are "
            "broken, or its numbers overflow in model.dtype"
        )
    owner = batch.trajectory.unique(return_inverse=True)[1]
    counts = sum_by(owner, segment_sum(batch.mask.to(kl.dtype), batch.offsets))
    by_trajectory = sum_by(owner, segment_sum(kl, batch.offsets)) / counts.clamp(min=1)
    mean = masked_mean(by_trajectory, counts > 0).item()
    return batch.with_fields(rewards=batch.rewards - coef * kl), mean
