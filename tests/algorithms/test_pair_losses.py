"""Losses of pairs in cases small enough to work out by hand."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.pair_losses import PairLoss, Pairs, pair_weights
from agentrl.config.registries import PAIR_LOSSES
from agentrl.system.registry import configured


def pairs(chosen: float, rejected: float, tokens: tuple[int, int] = (4, 2)) -> Pairs:
    return Pairs(*(torch.tensor([one], dtype=torch.float64) for one in (chosen, rejected, *tokens)))


def found(name: str, given: Pairs, **options: Any) -> list[float]:
    """Loss, weight of the chosen one, weight of the rejected one."""
    loss = configured(cast(PairLoss, PAIR_LOSSES.get(name)), options, "loss_options")
    return [one.item() for one in pair_weights(loss, given)]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        # beta (2 - (-1)) = 0.3, and sigmoid(-0.3) = 0.42556.
        ("sigmoid", {}, [math.log(1 + math.exp(-0.3)), 0.042556, -0.042556]),
        # The loss the other way round is log(1 + e^0.3), its weights those of sigmoid(0.3) = 0.57444, turned around.
        (
            "sigmoid",
            {"label_smoothing": 0.1},
            [0.9 * math.log(1 + math.exp(-0.3)) + 0.1 * math.log(1 + math.exp(0.3)), 0.0325557, -0.0325557],
        ),
        # By token 2 / 4 = 0.5 and -1 / 2 = -0.5, a margin of 1; 1 / (2 beta) is 5. Slope 2 (1 - 5), by token.
        ("ipo", {}, [16.0, 8 / 4, -8 / 2]),
        # 1 / (2 beta) is 5: (2 - 5)^2 + (-1 + 5)^2, slopes -6 and 8.
        ("sppo", {"beta": 0.1}, [25.0, 6.0, -8.0]),
    ],
)
def test_a_pair(name: str, options: dict[str, Any], expected: list[float]) -> None:
    assert found(name, pairs(2, -1), **options) == pytest.approx(expected, abs=1e-6)


def test_an_equal_pair_begins_at_log_2() -> None:
    assert found("sigmoid", pairs(0, 0), beta=0.5) == pytest.approx([math.log(2), 0.25, -0.25])


def test_weights_are_the_gradient_by_log_probs() -> None:
    """Also where no gradient is wanted around it, and for a loss that reads one of the two alone."""

    def only_chosen(given: Pairs) -> Tensor:
        return -given.chosen

    with torch.no_grad():
        assert [one.item() for one in pair_weights(only_chosen, pairs(3, 1))] == [-3, 1, 0]
