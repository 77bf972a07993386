"""Losses of preferences: of pairs of responses, one preferred over the other, and of responses judged by themselves.

Each is a function of `Pairs`, P pairs, and returns the loss of each pair, [P]; or of `Judged`, U responses, and returns
the loss of each response, [U], as it declares. The losses are differentiable in the log-ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.config.declaration import declare


class Pairs(NamedTuple):
    """Log-ratios of P pairs: log p(y) - log p_ref(y), summed over the policy tokens of a response y."""

    chosen: Tensor  # [P] float64
    rejected: Tensor  # [P] float64
    chosen_tokens: Tensor  # [P] float64, the policy tokens of each
    rejected_tokens: Tensor  # [P] float64


class Judged(NamedTuple):
    """Log-ratios, as in `Pairs`, of U responses that somebody found good or bad."""

    ratios: Tensor  # [U] float64
    tokens: Tensor  # [U] float64, the policy tokens of each
    good: Tensor  # [U] bool
    kl: Tensor
    """Scalar, float64: the mean log-ratio of mismatched responses, prompts with the response to another prompt, but at
    least 0. It estimates how far the policy is from the reference. 0 where the loss declares no mismatched ones."""


PairLoss = Callable[[Pairs], Tensor]
"""Function of pairs that returns the loss of each, [P]."""
JudgedLoss = Callable[[Judged], Tensor]
"""Function of judged responses that returns the loss of each, [U]."""


class SigmoidOptions(BaseModel):
    """`loss_options.*` of sigmoid."""

    beta: float = Field(0.1, gt=0)
    """Weight of the KL divergence from the reference in the objective that is solved: larger ones stay nearer."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Probability that a pair is the wrong way round."""


def sigmoid(pairs: Pairs, options: SigmoidOptions) -> Tensor:
    """DPO (arXiv:2305.18290, eq. 7): -log sigmoid(beta (chosen - rejected)); [P] float64.

    With label_smoothing e: (1 - e) times that, and e times the loss of the pair the other way round.
    """
    margin = options.beta * (pairs.chosen - pairs.rejected)
    wrong = options.label_smoothing
    return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)


class IpoOptions(BaseModel):
    """`loss_options.*` of ipo."""

    beta: float = Field(0.1, gt=0)
    """The margin between chosen and rejected that is aimed at is 1 / (2 beta), nats a token."""


def ipo(pairs: Pairs, options: IpoOptions) -> Tensor:
    """IPO (arXiv:2310.12036, eq. 17): (chosen - rejected - 1 / (2 beta))^2; [P] float64.

    The log-ratios are means by token, as in TRL, so that a long response is not pushed further than a short one.
    """
    chosen = pairs.chosen / pairs.chosen_tokens.clamp(min=1)
    rejected = pairs.rejected / pairs.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * options.beta)).square()


class SppoOptions(BaseModel):
    """`loss_options.*` of sppo."""

    beta: float = Field(0.001, gt=0)
    """1 / eta: the log-ratios that are aimed at are 1 / (2 beta) and -1 / (2 beta)."""


def sppo(pairs: Pairs, options: SppoOptions) -> Tensor:
    """SPPO (arXiv:2405.00675, eq. 4.7): (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2; [P] float64.

    The chosen response counts as always winning, the rejected one as never winning.
    """
    aim = 1 / (2 * options.beta)
    return (pairs.chosen - aim).square() + (pairs.rejected + aim).square()


class UnpairedOptions(BaseModel):
    """`loss_options.*` of kto and apo_zero_unpaired."""

    beta: float = Field(0.1, gt=0)
    """Weight of the distance from the reference: larger ones stay nearer."""
    desirable_weight: float = Field(1.0, ge=0)
    """Factor of the losses of good responses."""
    undesirable_weight: float = Field(1.0, ge=0)
    """Factor of the losses of bad ones. Balanced are factors whose products with the numbers of good and bad rows are
    as 1 to 1, up to 4 to 3 (arXiv:2402.01306, eq. 8)."""


@declare(rows="mismatched")
def kto(judged: Judged, options: UnpairedOptions) -> Tensor:
    """KTO (arXiv:2402.01306, eq. 7): of a good response 1 - sigmoid(beta (ratio - kl)), of a bad one
    1 - sigmoid(beta (kl - ratio)), each times its factor; [U] float64."""
    return _from_point(judged, judged.kl, options)


@declare(rows="single")
def apo_zero_unpaired(judged: Judged, options: UnpairedOptions) -> Tensor:
    """APO-zero of responses by themselves (arXiv:2408.06266, eq. 7, as TRL has it): KTO's around 0; [U] float64."""
    return _from_point(judged, torch.zeros_like(judged.kl), options)


def _from_point(judged: Judged, point: Tensor, options: UnpairedOptions) -> Tensor:
    """Compute the loss of each response by its distance from a point, good ones above and bad ones below."""
    above = torch.where(judged.good, judged.ratios - point, point - judged.ratios)
    losses = torch.sigmoid(-options.beta * above)
    return torch.where(judged.good, options.desirable_weight * losses, options.undesirable_weight * losses)


def pair_weights(loss: PairLoss, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each pair, and the weights of its log-probs in its gradient; each [P] float64.

    The gradient of a pair's loss is the gradient of -(w_c log p(chosen) + w_r log p(rejected)), with the weights w = -d
    loss / d log-ratio held fixed. So the two responses need not be computed together.
    """
    found, (chosen, rejected) = _weights(
        lambda ratios: loss(pairs._replace(chosen=ratios[0], rejected=ratios[1])), pairs[:2]
    )
    return found, chosen, rejected


def judged_weights(loss: JudgedLoss, judged: Judged) -> tuple[Tensor, Tensor]:
    """Return the loss of each response, and the weight of its log-probs in its gradient, as `pair_weights` does; each
    [U] float64."""
    found, (weights,) = _weights(lambda ratios: loss(judged._replace(ratios=ratios[0])), [judged.ratios])
    return found, weights


def _weights(loss: Callable[[Sequence[Tensor]], Tensor], ratios: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    with torch.enable_grad():
        leaves = [each.detach().double().requires_grad_() for each in ratios]
        found = loss(leaves)
        slopes = torch.autograd.grad(found.sum(), leaves, materialize_grads=True)
    return found.detach(), [-slope for slope in slopes]
