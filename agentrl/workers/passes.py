"""A micro-batch's way through a model that learns and back, in works that can be done again.

The loss is computed of copies of the model's scores. So its gradients by the scores are known before the model's
backward pass begins, and a work that fails for want of memory is done again without the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch

from agentrl.model.scores import TokenScores
from agentrl.observe.watch import UpdateWatch
from agentrl.trajectory.batch import RaggedBatch

Found = TypeVar("Found")


class States:
    """Hidden states of each part of a micro-batch, cut from the graph of the layers that made them."""

    def __init__(self, forward: Callable[[], Sequence[torch.Tensor]]) -> None:
        """forward: runs the layers, and returns the states of each part."""
        self._forward = forward
        self._made: Sequence[torch.Tensor] = ()
        self.copies: Sequence[torch.Tensor] = ()
        """They take the gradients of the parts' backward passes."""

    def run(self) -> None:
        self._made = self._forward()
        self.copies = copied(self._made)

    def run_back(self) -> None:
        """Run the backward pass of the layers, and forget their graph."""
        made, copies = self._made, self.copies
        self.forget()
        go_back(made, [one.grad for one in copies])

    def forget(self) -> None:
        self._made, self.copies = (), ()


class Part(Generic[Found]):
    """Whole sequences of a micro-batch, whose loss is computed at once."""

    def __init__(self, batch: RaggedBatch, forward: Callable[[], Found]) -> None:
        self.batch = batch
        self._forward = forward
        self._found: list[Found] = []
        self.copies: list[torch.Tensor] = []
        """The scores, which take the loss's gradients."""

    def run(self) -> None:
        self._found = [self._forward()]

    def scores(self) -> Found:
        """Copy the result of the forward pass."""
        (found,) = self._found
        self.copies = copied(_tensors(found))
        return _with(found, self.copies)

    def run_back(self) -> None:
        """Run the backward pass by the loss's gradients, and forget the graph."""
        (found,), self._found = self._found, []
        go_back(_tensors(found), [one.grad for one in self.copies])


@dataclass(frozen=True, slots=True)
class Pass(Generic[Found]):
    """A micro-batch's way: through the layers, through the head and back part by part, and back through the layers."""

    micro: RaggedBatch
    """On its device; the parts' sequences in their order."""
    parts: Sequence[Part[Found]]
    states: States | None = None
    """None: the one part goes through the whole model."""

    def show(self, watches: Sequence[UpdateWatch[Found]], like: Found, factor: float) -> None:
        """Show watches the scores of all parts as one result of the micro-batch, and then their gradients.

        like: the scores of a part. factor: of the loss before its backward pass.
        """
        columns = list(zip(*(part.copies for part in self.parts), strict=True))
        joined = copied([torch.cat(column) for column in columns])
        for watch in watches:
            watch.scored(_with(like, joined), self.micro, factor)
        go_back(joined, [_joined_grads(column) for column in columns])


def copied(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors without their graph; they take gradients where the originals have a graph."""
    return [one.detach().requires_grad_(one.requires_grad) for one in tensors]


def go_back(tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    """Run the backward pass of tensors by their gradients; None: nothing was learnt by this tensor."""
    learnt = [(one, grad) for one, grad in zip(tensors, grads, strict=True) if grad is not None]
    torch.autograd.backward([one for one, _ in learnt], [grad for _, grad in learnt])


def _joined_grads(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if all(one.grad is None for one in parts):
        return None
    return torch.cat([torch.zeros_like(one) if one.grad is None else one.grad for one in parts])


def _tensors(found: object) -> list[torch.Tensor]:
    """List the tensors of a forward pass's result."""
    return [one for one in (found if isinstance(found, tuple) else [found]) if isinstance(one, torch.Tensor)]


def _with(found: Found, tensors: Sequence[torch.Tensor]) -> Found:
    """Put other tensors in the place of a result's."""
    if isinstance(found, torch.Tensor):
        return cast(Found, tensors[0])
    names = [name for name, one in cast(TokenScores, found)._asdict().items() if one is not None]
    return cast(Found, TokenScores(**dict(zip(names, tensors, strict=True))))
