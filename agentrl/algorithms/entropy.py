"""The coefficient of the entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.system.json_value import JSON

CHANGE = 0.005
"""Change of the coefficient in a step, as published."""


@dataclass(slots=True)
class EntropyControl:
    """Coefficient that keeps the entropy from falling below `target` (arXiv:2505.22312, adaptive entropy control).

    In step k with entropy e_k the bonus weighs c_k where e_k <= target, else 0. Then c_(k+1) is c_k + CHANGE where e_k
    < target, and c_k - CHANGE, but not below 0, where e_k > target.
    """

    coef: float
    """c_k; the start is `entropy_coeff`."""
    target: float
    """Nats a token."""

    def weight(self, entropy: float) -> float:
        """Return the weight of the bonus in a step whose entropy before the update is `entropy`, and adapt to it."""
        weight = self.coef if entropy <= self.target else 0.0
        if entropy != self.target:
            self.coef = max(0.0, self.coef + (CHANGE if entropy < self.target else -CHANGE))
        return weight

    def restore(self, coef: JSON) -> None:
        """Take over the coefficient of a checkpoint. Raises TypeError for a value that is no number."""
        if not isinstance(coef, int | float):
            raise TypeError(f"expected a number as coefficient of the entropy, found {coef!r:.100}")
        self.coef = coef
