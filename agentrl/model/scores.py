"""Scores of the tokens of a batch under a policy."""

from __future__ import annotations

from typing import NamedTuple

import torch


class TokenScores(NamedTuple):
    """Numbers of the distribution softmax(logits / temperature) that each token was drawn from.

    They are 0 on tokens that the policy did not sample. A tuple, so that FSDP finds the tensors in it.
    """

    logprobs: torch.Tensor
    """[T] float32, in nats."""
    entropy: torch.Tensor | None = None
    """[T] float32, in nats. None where it was not needed."""
    squared_probs: torch.Tensor | None = None
    """[T] float32: sum of the squared probabilities over the vocabulary. None where it was not needed."""
