"""The configured policy loss on a micro-batch, and the terms that are added to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import log_ratio
from agentrl.algorithms.ragged import masked_sum
from agentrl.algorithms.rollout_correction import Corrected, correct, interpolated, tally
from agentrl.config.declaration import Declaration, declaration_of
from agentrl.config.registries import POLICY_LOSSES
from agentrl.config.sections.algorithm import RolloutCorrectionConfig
from agentrl.errors import TrainingError
from agentrl.system.registry import configured

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig
    from agentrl.trajectory.batch import RaggedBatch


OPTIONS = "actor_rollout_ref.actor.policy_loss.options"


def loss_columns(correction: RolloutCorrectionConfig) -> tuple[str, ...]:
    """Name the columns of a batch that its loss makes, next to its gradient.

    They are the ratio to the proximal policy and the tokens that a bound holds. Where the correction is the loss's own,
    its weight and the tokens whose weight is its bound come in addition.
    """
    return ("ratio", "clipped") if correction.needs_pass else ("ratio", "clipped", "correction", "correction_clipped")


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """The policy loss of a micro-batch."""

    by_token: Tensor  # [T] float with gradient
    tokens: Tensor
    """Scalar int64: the policy tokens whose advantage is not 0. The others have no gradient that a clip could cut off,
    and whether sequences of such tokens alone are computed changes no number."""
    sums: dict[str, Tensor]
    """Scalars over these tokens: the sums of `TokenLoss`, and ppo_kl, the sum of old - new log-prob."""
    correction: dict[str, Tensor]
    """Sums of `tally`, where the correction is the loss's own; else empty."""
    columns: dict[str, Tensor]
    """[T] without gradient, the columns of `loss_columns` that the loss has."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The loss that `config.policy_loss` names, with its options."""

    config: ActorConfig
    declaration: Declaration
    function: Callable[[LossColumns, ActorConfig], TokenLoss]
    correction: RolloutCorrectionConfig

    @staticmethod
    def from_config(config: ActorConfig, correction: RolloutCorrectionConfig | None = None) -> PolicyLoss:
        """Raises ConfigError when there is no such loss, or it does not take the options.

        correction: `algorithm.rollout_correction`; None: its defaults.
        """
        found = cast("Callable[[LossColumns, ActorConfig], TokenLoss]", POLICY_LOSSES.get(config.policy_loss.loss_mode))
        function = configured(found, config.policy_loss.options, OPTIONS)
        return PolicyLoss(config, declaration_of(found), function, correction or RolloutCorrectionConfig())

    def __call__(
        self, micro: RaggedBatch, logprobs: Tensor, entropy: Tensor | None = None, squared_probs: Tensor | None = None
    ) -> MicroLoss:
        """Compute the loss of a micro-batch with advantages.

        logprobs, entropy and squared_probs [T] float with gradient, the last two where they are declared. Without
        old_logprobs the policy's own, detached, replace them. The correction is the batch's column, or computed here,
        from its staleness, where the proximal policy is not recomputed. Raises TrainingError when the loss does not
        return one number a token.
        """
        further = {"ref_logprobs": micro.ref_logprobs, "entropy": entropy, "squared_probs": squared_probs}
        columns = self._columns(micro, logprobs, further)
        found = self.function(columns, self.config)
        self._check(found.by_token, columns.mask, "by_token")
        with torch.no_grad():
            taught = columns.mask & (columns.advantages != 0)
            change = log_ratio(columns)
            sums = {"ppo_kl": -masked_sum(change, taught), **found.sums}
            seen: dict[str, Tensor] = {"ratio": change.exp()}
            if found.clipped is not None:
                self._check(found.clipped, columns.mask, "clipped")
                seen["clipped"] = found.clipped
        by_token = found.by_token
        correction: dict[str, Tensor] = {}
        if not self.correction.needs_pass:
            corrected, correction = self._correct(columns, micro)
            by_token = by_token * corrected.weight
            seen |= {"correction": corrected.weight, "correction_clipped": corrected.clipped}
        elif micro.correction is not None:
            by_token = by_token * micro.correction
        return MicroLoss(by_token, taught.sum(), sums, correction, seen)

    @torch.no_grad()
    def select(self, batch: RaggedBatch, logprobs: Tensor, seed: int) -> Tensor:
        """Choose the tokens that the loss treats otherwise, by the function that it declares: [T] bool.

        logprobs [T] float: of the policy before the update. Raises TrainingError when it does not return one a token.
        """
        assert self.declaration.select is not None, "a loss that selects"
        choose = configured(self.declaration.select, self.config.policy_loss.options, OPTIONS)
        selected = choose(self._columns(batch, logprobs, {}), self.config, seed)
        self._check(selected, batch.mask, "selected tokens")
        return selected & batch.mask

    def _check(self, found: Tensor, mask: Tensor, what: str) -> None:
        if found.shape != mask.shape:
            raise TrainingError(
                f"actor_rollout_ref.actor.policy_loss.loss_mode={self.config.policy_loss.loss_mode}: expected {what} "
                f"of shape {list(mask.shape)}, one a token, found {list(found.shape)}"
            )

    @torch.no_grad()
    def _correct(self, columns: LossColumns, micro: RaggedBatch) -> tuple[Corrected, dict[str, Tensor]]:
        """Return (factors of the loss, sums of `tally`) where the proximal policy is not recomputed."""
        assert micro.staleness is not None, "estimate gives it"
        gap = columns.logprobs - columns.rollout_logprobs
        # The engine as the proximal policy leaves nothing between the two, so the policy that is trained is compared.
        compared = gap if self.correction.proximal == "rollout" else columns.old_logprobs - columns.rollout_logprobs
        found = correct(compared, columns.mask, columns.offsets, self.correction)
        return found, tally(gap, found, columns.mask, micro.staleness)

    def _proximal(self, micro: RaggedBatch, logprobs: Tensor) -> Tensor:
        """Return the proximal policy's log-probs, [T] float without gradient."""
        match self.correction.proximal:
            case "rollout":
                return micro.rollout_logprobs
            case "interpolated":
                assert micro.staleness is not None, "estimate gives it"
                return interpolated(logprobs, micro.rollout_logprobs, micro.staleness)
            case "recomputed" | "published":
                return logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs

    def _columns(self, micro: RaggedBatch, logprobs: Tensor, further: Mapping[str, Tensor | None]) -> LossColumns:
        assert micro.advantages is not None
        mask = micro.mask

        def inside(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0)

        declared: dict[str, Tensor] = {}
        if self.declaration.select is not None and micro.selected is not None:
            declared["selected"] = micro.selected & mask
        for name, values in further.items():
            if name in self.declaration.columns:
                assert values is not None, f"{name} is declared"
                declared[name] = inside(values)
        return LossColumns(
            logprobs=inside(logprobs),
            old_logprobs=inside(self._proximal(micro, logprobs)),
            rollout_logprobs=inside(micro.rollout_logprobs),
            advantages=inside(micro.advantages),
            mask=mask,
            offsets=micro.offsets,
            turn=micro.turn,
            version=micro.version,
            **declared,
        )


def select_tokens(batch: RaggedBatch, config: ActorConfig, seed: int) -> tuple[dict[str, Tensor], None]:
    """Compute the column `selected` [T] bool, for a loss that declares `select`. Needs the policy's old_logprobs."""
    assert batch.old_logprobs is not None, "the policy's log-probs come first"
    return {"selected": PolicyLoss.from_config(config).select(batch, batch.old_logprobs, seed)}, None


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
