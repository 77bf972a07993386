"""The place of a trajectory in its run: split, step, prompt, number among its prompt's, and row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "val", "generate"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Place of a trajectory in its run, the same for every agent loop. No two of a run are equal."""

    split: Split
    step: int
    """Training step that drew the prompt, or that a validation follows; 0 for `generate`."""
    prompt_number: int
    """Number of the prompt among those of its step, from 0."""
    rollout: int
    """Number among the trajectories of its prompt, from 0."""
    greedy: bool = False
    """True: decoded greedily, as a validation without `do_sample` is, or a training's baseline, the last rollout."""
    file: str = ""
    """File of the prompt's row."""
    row: int = 0
    """Row of that file; the first is 0."""

    @property
    def uid(self) -> str:
        """Name of the trajectory: SPLIT/STEP/PROMPT/ROLLOUT, e.g. `train/12/3/1`.

        A greedy validation's SPLIT is `greedy`, and a training's greedy ROLLOUT. `generate` has no STEP.
        """
        split, rollout = str(self.split), str(self.rollout)
        if self.greedy and self.split == "val":
            split = "greedy"
        if self.greedy and self.split == "train":
            rollout = "greedy"
        step = () if self.split == "generate" else (str(self.step),)
        return "/".join((split, *step, str(self.prompt_number), rollout))
