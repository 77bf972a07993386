"""Scores of the tokens of a batch under a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from agentrl.config.declaration import Computed

Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Function of some distributions, log-probs [M, V] float32, and of the places [M] int64 of their tokens. It returns a
number for each, [M] float, differentiable in the log-probs."""


Needs = frozenset[Computed | Literal["experts", "router"]]
"""Scores read from a forward pass in addition to the log-probs. With `experts` its routers choose by themselves."""


class TokenScores(NamedTuple):
    """Numbers of the distribution softmax(logits / temperature) that each token was drawn from.

    They are 0 on tokens that the policy did not sample. A tuple, so that FSDP finds the tensors in it.
    """

    logprobs: torch.Tensor
    """[T] float32, in nats."""
    entropy: torch.Tensor | None = None
    """[T] float32, in nats. None where it was not needed."""
    varentropy: torch.Tensor | None = None
    """[T] float32: variance of -log p under the distribution; the mean of -log p is the entropy. None where it was not
    needed."""
    squared_probs: torch.Tensor | None = None
    """[T] float32: sum of the squared probabilities over the vocabulary. None where it was not needed."""
    divergence: torch.Tensor | None = None
    """[T] float32: the result of a `Compare`. None without a `Compare`."""
    experts: torch.Tensor | None = None
    """[T, L, k] uint8 or int16: the k experts that each token was sent to in the L layers with experts. None where
    nobody asked for them."""
    router: torch.Tensor | None = None
    """[L, E + 1] float32, sums over the T tokens: the probability that the router of each layer gives each of its E
    experts. The last entry is the square of the logsumexp of its logits. None where nobody asked for them."""
