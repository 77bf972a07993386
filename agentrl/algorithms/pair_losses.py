"""Losses of pairs of responses, one preferred over the other.

Each is a function of `Pairs`, P pairs, and returns the loss of each pair, [P], differentiable in the log-ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn.functional import logsigmoid


class Pairs(NamedTuple):
    """Log-ratios of P pairs: log p(y) - log p_ref(y), summed over the policy tokens of a response y."""

    chosen: Tensor  # [P] float64
    rejected: Tensor  # [P] float64
    chosen_tokens: Tensor  # [P] float64, the policy tokens of each
    rejected_tokens: Tensor  # [P] float64


PairLoss = Callable[[Pairs], Tensor]
"""Function of pairs that returns the loss of each, [P]."""


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


def pair_weights(loss: PairLoss, pairs: Pairs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of each pair, and the weights of its log-probs in its gradient; each [P] float64.

    The gradient of a pair's loss is the gradient of -(w_c log p(chosen) + w_r log p(rejected)), with the weights w = -d
    loss / d log-ratio held fixed. So the two responses need not be computed together.
    """
    with torch.enable_grad():
        chosen, rejected = (each.detach().double().requires_grad_() for each in pairs[:2])
        found = loss(pairs._replace(chosen=chosen, rejected=rejected))
        slopes = torch.autograd.grad(found.sum(), (chosen, rejected), materialize_grads=True)
    return found.detach(), -slopes[0], -slopes[1]
