"""Divergences of the policy's distributions from a teacher's.

Each is a function of `student` and `teacher` [M, S], the log-probs of S categories at M tokens, and returns the
divergence of each row, [M] in nats; `student` carries the gradient. The categories are a vocabulary, or some of its
tokens and all others together (see `agentrl.algorithms.distillation`).
"""

from __future__ import annotations

import math

import torch
from pydantic import BaseModel, Field
from torch import Tensor


class ForwardKLOptions(BaseModel):
    """`divergence_options.*` of forward_kl."""

    min_logprob: float | None = Field(None, lt=0)
    """Log-probs below count as it, the policy's then without a gradient; null: no bound."""


WHOLE = ForwardKLOptions()


def forward_kl(student: Tensor, teacher: Tensor, options: ForwardKLOptions = WHOLE) -> Tensor:
    """KL(teacher || student) = sum of p_T (log p_T - log p_S), which covers every token that the teacher may say.

    student and teacher [R, V]: log-probs; the result is [R].
    """
    if options.min_logprob is not None:
        student, teacher = (one.clamp(min=options.min_logprob) for one in (student, teacher))
    return (teacher.exp() * (teacher - student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) = sum of p_S (log p_S - log p_T), which leaves out tokens that the teacher would not say.

    student and teacher [R, V]: log-probs; the result is [R].
    """
    return (student.exp() * (student - teacher)).sum(-1)


class JSOptions(BaseModel):
    """`divergence_options.*` of js."""

    beta: float = Field(0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture; divided by it the divergence goes to forward_kl as it goes to 0."""


def js(student: Tensor, teacher: Tensor, options: JSOptions) -> Tensor:
    """Generalised Jensen-Shannon divergence (GKD, arXiv:2306.13649, section 2).

    beta KL(teacher || M) + (1 - beta) KL(student || M) with M = beta p_T + (1 - beta) p_S; at most log 2.
    student and teacher [R, V]: log-probs; the result is [R].
    """
    beta = options.beta
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * forward_kl(mixture, teacher) + (1 - beta) * reverse_kl(student, mixture)
