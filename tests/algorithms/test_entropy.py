"""The weight of the entropy bonus."""

from __future__ import annotations

import pytest

from agentrl.algorithms.entropy import EntropyControl
from tests.naming import naming


def test_the_weight_is_steered_and_given_only_below_the_target() -> None:
    """By hand: 0.01 at 0.3; then 0.015, which 0.5 is not given; then 0.01, which the target itself does not change."""
    control = EntropyControl(coef=0.01, target=0.4)
    weights = [control.weight(entropy) for entropy in (0.3, 0.5, 0.4, 0.1, 0.2)]
    assert weights == pytest.approx([0.01, 0.0, 0.01, 0.01, 0.015])
    assert control.coef == pytest.approx(0.02)


def test_the_weight_is_never_negative_and_survives_a_checkpoint() -> None:
    control = EntropyControl(coef=0.004, target=0.4)
    assert control.weight(1.0) == 0 and control.coef == 0
    control.restore(0.25)
    assert control.weight(0.2) == 0.25
    with naming(TypeError, "found None"):
        control.restore(None)
