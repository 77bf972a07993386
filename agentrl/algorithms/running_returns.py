"""Running means of returns by data source and role, which `rae` compares returns with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from agentrl.algorithms.estimators.rae import RaeOptions
from agentrl.config.columns import role_number
from agentrl.system.json_value import JSON, as_mapping
from agentrl.trajectory import ROLE, Outline

if TYPE_CHECKING:
    from agentrl.trajectory.batch import Sequences


@dataclass(slots=True)
class RunningReturns:
    """Exponential moving average of the returns of each data source and role, from 0. Part of the checkpoint."""

    decay: float
    turn_reward_coef: float
    means: dict[str, float] = field(default_factory=dict)
    """By `name_of`."""

    @staticmethod
    def from_options(options: Mapping[str, object], turn_reward_coef: float) -> RunningReturns:
        """Make the means, with the decay of an estimator's options."""
        return RunningReturns(RaeOptions.model_validate(options).decay, turn_reward_coef)

    def column(self, batch: Sequences, outlines: Sequence[Outline]) -> torch.Tensor:
        """Move the means by a step's returns, in the batch's order: the mean after each, by sequence [N] float64.

        Sequences of one trajectory and role have one return.
        """
        roles = batch.sequences["role"].tolist() if batch.has("role") else [0] * len(batch)
        found: dict[tuple[int, int], float] = {}
        for key in zip(batch.trajectory.tolist(), roles, strict=True):
            if key not in found:
                found[key] = self._move(outlines[key[0]], key[1])
        return torch.tensor(
            [found[key] for key in zip(batch.trajectory.tolist(), roles, strict=True)], dtype=torch.float64
        )

    def state(self) -> dict[str, JSON]:
        """Return the means for a checkpoint."""
        return dict(self.means)

    def restore(self, state: JSON) -> None:
        """Take over the result of `state`."""
        means = {} if state is None else as_mapping(state)  # a run may choose the estimator when it resumes
        self.means = {name: mean for name, mean in means.items() if isinstance(mean, int | float)}

    def _move(self, outline: Outline, role: int) -> float:
        name, value = self._return_of(outline, role)
        self.means[name] = self.decay * self.means.get(name, 0.0) + (1 - self.decay) * value
        return self.means[name]

    def _return_of(self, outline: Outline, role: int) -> tuple[str, float]:
        """Return (the name of the mean, the return): of a role its score, else the trajectory's reward."""
        for name, score in scores_by_role(outline.score_extra).items():
            if role_number(name) == role:
                return f"{outline.data_source}/{name}", score
        reward = outline.reward(self.turn_reward_coef)
        assert reward is not None, "the batch holds trajectories that can be trained on"
        return outline.data_source, reward


def scores_by_role(numbers: Mapping[str, float]) -> dict[str, float]:
    """Take the scores of roles out of a scorer's numbers."""
    return {name.removeprefix(ROLE): score for name, score in numbers.items() if name.startswith(ROLE)}
