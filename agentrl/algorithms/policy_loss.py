"""The term of the configured policy loss, with the correction for the engine's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from agentrl.algorithms.aggregate import Scored, Share, Term
from agentrl.algorithms.columns import LossColumns, TokenLoss
from agentrl.algorithms.policy_losses.ratio import log_ratio
from agentrl.algorithms.ragged import masked_sum
from agentrl.algorithms.rollout_correction import Corrected, correct, interpolated, tally
from agentrl.config.columns import is_users
from agentrl.config.declaration import Declaration, Score, declaration_of
from agentrl.config.registries import POLICY_LOSSES
from agentrl.config.sections.algorithm import RolloutCorrectionConfig
from agentrl.errors import CodeError, TrainingError
from agentrl.system.registry import configured
from agentrl.system.user_code import Code, contract_error, user_code

if TYPE_CHECKING:
    from agentrl.config.sections.actor import ActorConfig
    from agentrl.trajectory.batch import RaggedBatch, Sequences


BY_TOKEN, CORRECTION = "by_token/", "correction/"
"""Marks, among the sums of an update, those reported as a mean over the policy tokens with advantage."""
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
OPTIONS = "actor_rollout_ref.actor.policy_loss.options"
REPORTED = frozenset(
    {
        *(
            "entropy",
            "entropy_coeff",
            "expert_loss",
            "grad_norm",
            "kl_loss",
            "loss",
            "lr",
            "moe_aux_loss",
            "moe_z_loss",
        ),
        *("observation_nll", "pg_loss", "ppo_kl", "reward_kl_penalty", "reward_kl_penalty_coeff", "skipped_updates"),
        *("success_nll", "teacher_loss"),
    }
)
"""Metrics `actor/<name>` that the trainer reports itself, so no loss may give a sum of the name."""


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


@dataclass
class PolicyLoss(Term):
    """The loss that `config.policy_loss` names, with its options."""

    config: ActorConfig
    declaration: Declaration
    function: Callable[[LossColumns, ActorConfig], TokenLoss]
    correction: RolloutCorrectionConfig
    coef: float = 1.0
    filters: bool = True
    """Sequences whose advantages are all 0 need not be computed, if the loss declares advantage_only."""
    is_believed: bool = True
    """No proof is due of the declarations: the loss is ours, or has been tried on a micro-batch."""

    name = "pg_loss"
    key = LOSS_MODE
    columns = ("advantages",)

    @staticmethod
    def from_config(
        config: ActorConfig,
        correction: RolloutCorrectionConfig | None = None,
        *,
        coef: float = 1.0,
        filters: bool = True,
    ) -> PolicyLoss:
        """Raises ConfigError when there is no such loss, or it does not take the options.

        correction: `algorithm.rollout_correction`; None: its defaults.
        """
        found = cast("Callable[[LossColumns, ActorConfig], TokenLoss]", POLICY_LOSSES.get(config.policy_loss.loss_mode))
        function = configured(found, config.policy_loss.options, OPTIONS)
        correction = correction or RolloutCorrectionConfig()
        believed = POLICY_LOSSES.is_built_in(config.policy_loss.loss_mode)
        return PolicyLoss(config, declaration_of(found), function, correction, coef, filters, believed)

    @property
    def is_of_a_user(self) -> bool:
        """True for a loss that is none of agentrl's."""
        return not POLICY_LOSSES.is_built_in(self.config.policy_loss.loss_mode)

    def scores(self) -> Sequence[Score]:
        return self.declaration.scores

    def share(self, scored: Scored, count: int) -> Share:
        found = scored.found
        lost = self(scored.micro, scored.logprobs, found.entropy, found.squared_probs)
        by_token = {f"{BY_TOKEN}{name}": value for name, value in lost.sums.items()}
        correction = {f"{CORRECTION}{name}": value for name, value in lost.correction.items()}
        return Share(lost.by_token, {"tokens": lost.tokens, **by_token, **correction}, lost.columns)

    def computes(self, batch: Sequences) -> Tensor:
        if not self.filters or not self.declaration.advantage_only or not batch.has("zero_advantage"):
            return super().computes(batch)
        return ~batch.sequences["zero_advantage"]

    def __call__(
        self, micro: RaggedBatch, logprobs: Tensor, entropy: Tensor | None = None, squared_probs: Tensor | None = None
    ) -> MicroLoss:
        """Compute the loss of a micro-batch with advantages.

        logprobs, entropy and squared_probs [T] float with gradient, the last two where they are declared. Without
        old_logprobs the policy's own, detached, replace them. The correction is the batch's column, or computed here,
        from its staleness, where the proximal policy is not recomputed. Raises CodeError where a user's loss fails,
        does not return one number a token, or is not what it declares.
        """
        scores = {"entropy": entropy, "squared_probs": squared_probs}
        columns = self._columns(micro, logprobs, scores)
        found = self._call(columns)
        self._check(found.by_token, columns.mask, "by_token")
        if not self.is_believed and self.declaration.advantage_only:
            self._prove_advantage_only(micro, logprobs, scores)
        self.is_believed = True
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

    def _call(self, columns: LossColumns) -> TokenLoss:
        with user_code(self.what, self._code):
            found = self.function(columns, self.config)
        if not isinstance(found, TokenLoss):
            raise self._broken(
                f"expected a TokenLoss, found {type(found).__name__}. Return TokenLoss(loss), or TokenLoss(loss, sums) "
                "with sums for metrics, of agentrl.algorithms"
            )
        for name, value in found.sums.items():
            if not isinstance(value, Tensor) or value.shape:
                raise self._broken(f"the sum {name!r}: expected a tensor of one number, found {value!r:.100}")
            if name in REPORTED:
                raise self._broken(f"the sum {name!r}: the trainer reports actor/{name} itself; choose another name")
        return found

    def _prove_advantage_only(self, micro: RaggedBatch, logprobs: Tensor, scores: Mapping[str, Tensor | None]) -> None:
        """Compute the gradient of a user's loss with all advantages 0. Raises CodeError where it is not 0.

        Sequences without advantage would be left out by the declaration, and their gradient with them.
        """
        leaves = {
            name: value.detach().requires_grad_()
            for name, value in {**scores, "logprobs": logprobs}.items()
            if value is not None
        }
        assert micro.advantages is not None
        blank = micro.with_fields(advantages=torch.zeros_like(micro.advantages))
        with torch.enable_grad():
            found = self._call(self._columns(blank, leaves["logprobs"], {name: leaves.get(name) for name in scores}))
            if not found.by_token.requires_grad:
                return
            total = masked_sum(found.by_token, micro.mask)
            gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        by_leaf = zip(leaves, gradients, strict=True)
        # A gradient that is not a number, of advantages divided by their own spread, proves nothing.
        pulls = [name for name, one in by_leaf if one is not None and one.nan_to_num(0, 0, 0).any()]
        if pulls:
            raise self._broken(
                f"it declares advantage_only, and with advantages of 0 its gradient by {' and '.join(pulls)} is not 0. "
                "Trajectories without advantage would be left out, and what it teaches by them: declare it without "
                "advantage_only"
            )

    @property
    def what(self) -> str:
        """The key and its value, for messages."""
        return f"{LOSS_MODE}={self.config.policy_loss.loss_mode}"

    @property
    def _code(self) -> Code:
        return self.function.func if isinstance(self.function, partial) else self.function

    def _broken(self, problem: str) -> CodeError:
        return contract_error(self.what, self._code, problem)

    @torch.no_grad()
    def select(self, batch: RaggedBatch, logprobs: Tensor, seed: int) -> Tensor:
        """Choose the tokens that the loss treats otherwise, by the function that it declares: [T] bool.

        logprobs [T] float: of the policy before the update. Raises CodeError when it does not return one a token.
        """
        assert self.declaration.select is not None, "a loss that selects"
        choose = configured(self.declaration.select, self.config.policy_loss.options, OPTIONS)
        selected = choose(self._columns(batch, logprobs, None), self.config, seed)
        self._check(selected, batch.mask, "selected tokens")
        return selected & batch.mask

    def _check(self, found: Tensor, mask: Tensor, what: str) -> None:
        if found.shape != mask.shape:
            raise self._broken(
                f"expected {what} of shape {list(mask.shape)}, one a token, found {list(found.shape)}. "
                "A number of each sequence becomes one of each token by repeat_interleave(columns.offsets.diff()); the "
                "mean over tokens is the trainer's (actor_rollout_ref.actor.loss_agg_mode)"
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

    def _columns(self, micro: RaggedBatch, logprobs: Tensor, scores: Mapping[str, Tensor | None] | None) -> LossColumns:
        """Build the view; scores: of the forward pass, with gradient. None: the view has no declared columns."""
        assert micro.advantages is not None
        mask, asked_by = micro.mask, self.what

        def inside(values: Tensor) -> Tensor:
            return torch.where(mask, values, 0.0) if values.is_floating_point() else values

        declared: dict[str, Tensor] = {}
        if self.declaration.select is not None and micro.selected is not None:
            declared["selected"] = micro.selected & mask
        for name in self.declaration.columns.difference(self.declaration.scores if scores is None else ()):
            values = scores[name] if scores is not None and name in scores else getattr(micro, name)
            if values is None:
                raise TrainingError(f"{asked_by}: the batch has no column {name!r}; it has to be computed before")
            declared[name] = values if name in micro.sequences or is_users(name) else inside(values)
        return LossColumns(
            asked_by=asked_by,
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
