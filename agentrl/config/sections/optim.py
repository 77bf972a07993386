"""Keys of `*.optim.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Section


class OptimConfig(Section):
    """`*.optim.*`"""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: matrices by Muon at `lr`, everything else by AdamW at `adamw_lr`."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate."""
    adamw_lr: Annotated[float | None, OnlyWith("name=muon")] = Field(None, gt=0)
    """Learning rate of AdamW beside Muon; null: `lr`."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of AdamW's first and second moments."""
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled weight decay."""
    decay_vectors: bool = True
    """False: vectors, which are the weights of norms and the biases, have no weight decay, as in transformers."""
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
