"""Keys of `*.optim.*`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Section

Beta = Annotated[float, Field(ge=0, lt=1)]


class GroupConfig(Section):
    """`*.optim.groups.*`"""

    match: str
    """Pattern of the parameters' names in Hugging Face's format, with * for any characters."""
    lr_factor: float = Field(1.0, ge=0)
    """Factor of the learning rate, through the whole schedule."""
    weight_decay: float | None = Field(None, ge=0)
    """Decoupled weight decay; null: that of the others."""


class OptimConfig(Section):
    """`*.optim.*`"""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: matrices by Muon at `lr`, everything else by AdamW at `adamw_lr`."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate."""
    adamw_lr: Annotated[float | None, OnlyWith("name=muon")] = Field(None, gt=0)
    """Learning rate of AdamW beside Muon; null: `lr`."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay of AdamW's first and second moments."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    decay_vectors: bool = True
    """False: vectors, which are the weights of norms and the biases, have no weight decay, as in transformers."""
    groups: dict[str, GroupConfig] = {}
    """Parameters with a rate (`lr_factor`) or a weight decay of their own, e.g. `{norms: {match: "*norm*",
    weight_decay: 0}}`. A parameter belongs to the first group whose `match` fits its name. A group without a parameter
    is an error."""
    lr_warmup_steps: float = Field(0, ge=0)
    """Steps in which the rate rises to `lr`. The whole schedule counts the training steps in which the role learns: the
    policy's begins after trainer.critic_warmup. With lr_by_mini_batch they may have a fraction."""
    lr_warmup_steps_ratio: Annotated[float, OnlyWith("lr_warmup_steps=0")] = Field(0.0, ge=0, le=1)
    """The same as a part of all steps of the schedule, rounded down."""
    lr_warmup_from_zero: bool = False
    """True: the warm-up's first step has the rate 0, as in transformers; false: no step is spent at rate 0."""
    lr_by_mini_batch: bool = False
    """True: the rate follows its course from mini-batch to mini-batch, as in transformers; false: the mini-batches of a
    step have one rate."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after the warm-up."""
    min_lr_ratio: Annotated[float, OnlyWith("lr_scheduler_type=cosine or linear")] = Field(0.0, ge=0, le=1)
    """Final learning rate of cosine and linear, as a fraction of `lr`."""

    def of(self, name: str, ndim: int) -> tuple[float, float]:
        """Return the rate's factor and the weight decay of the parameter `name` with `ndim` dimensions."""
        decay = self.weight_decay if self.decay_vectors or ndim > 1 else 0.0
        if (key := self.group_of(name)) is None:
            return 1.0, decay
        group = self.groups[key]
        return group.lr_factor, decay if group.weight_decay is None else group.weight_decay

    def group_of(self, name: str) -> str | None:
        """Return the first of `groups` that fits the parameter `name`."""
        return next((key for key, group in self.groups.items() if fnmatchcase(name, group.match)), None)
