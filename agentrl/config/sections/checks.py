"""Keys of the checks of every step: `trainer.checks.*`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.registries import WATCHES
from agentrl.config.rules import Names
from agentrl.config.section import Section

Reaction = Literal["warn", "stop", "checkpoint_then_stop"]


class UpdateChecksConfig(Section):
    """`trainer.checks.*` of every training: observers of its updates, and the reactions to their findings."""

    on_fault: Reaction = "warn"
    """Reaction to what cannot be in a sound run, such as a reward in the batch that is not the trajectory's: warn and
    go on; stop with an error; or save a checkpoint of the step, then stop. In each case it is in alarms.jsonl, too."""
    on_sign: Reaction = "warn"
    """Reaction to what may be right and seldom is, such as answers that have become repetitions: likewise."""
    watches: Annotated[list[str], Names(WATCHES)] = []
    """Further observers of each update, where the model learns, and of trajectories, where they run: subclasses of
    agentrl.observe.watch.Watch. An error of one ends the run."""


class ChecksConfig(UpdateChecksConfig):
    """`trainer.checks.*`: conditions of every step, and the reactions where they do not hold (docs/reliability.md)."""

    trajectories: int = Field(16, ge=0)
    """Trajectories of each step and rollout worker whose record is read token by token; the other checks see all."""
    weights_mb: float = Field(16.0, ge=0)
    """Size, in 10^6 bytes, of the tensors whose checksums are compared after each update of the engine's weights: other
    ones each time. 0: none."""
    gap: float | None = Field(None, gt=0)
    """Mean distance in nats between the trainer's and the engine's log-probs of one trajectory's tokens, of the same
    weights, from which on something is wrong; null: 0.001 with model.dtype=float32, 0.25 with bfloat16."""
    gap_growth: float = Field(20.0, gt=1)
    """The same over a whole step, as a multiple of its median over the steps before."""
    barren_steps: int = Field(5, ge=0)
    """Steps in a row in which rewards teach nothing from which on the run is told to be at a standstill; 0: never."""
    low_entropy: float = Field(1e-4, ge=0)
    """Mean entropy in nats below which the policy has nothing left to try; 0: never."""
    repeated: float = Field(0.5, gt=0, le=1)
    """Share of sampled tokens in repetitions, and of characters that are no text, from which on answers are garbled,
    where it was below half of it in the first steps."""
    tool_errors: float = Field(0.5, gt=0, le=1)
    """Share of a tool's calls that fail by the tool's own fault, or its server's, from which on it is told."""
    cut_answers: float = Field(0.9, gt=0, le=1)
    """Share of answers that end at a limit of length from which on it is told, where it was below half of it in the
    first steps."""
