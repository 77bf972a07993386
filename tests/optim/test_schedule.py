"""Learning rates by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from agentrl.checks.optimizer_step import rate
from agentrl.config.sections.optim import OptimConfig
from agentrl.optim.schedule import lr_factor


def factors(total: int, **config: object) -> list[float]:
    settings = OptimConfig(**config)
    return [lr_factor(settings, step, total) for step in range(1, total + 1)]


def test_linear_with_warm_up() -> None:
    assert factors(6, lr_scheduler_type="linear", lr_warmup_steps=2) == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]
    )


def test_cosine_ends_at_its_floor() -> None:
    values = factors(4, lr_scheduler_type="cosine", min_lr_ratio=0.2)
    assert values == pytest.approx([1.0, 0.2 + 0.8 * 0.853553, 0.6, 0.2 + 0.8 * 0.146447], abs=1e-5)


def test_constant_after_warm_up() -> None:
    assert factors(4, lr_warmup_steps=1) == [0.5, 1.0, 1.0, 1.0]


def test_past_the_last_step_the_floor_holds() -> None:
    config = OptimConfig(lr_scheduler_type="linear", min_lr_ratio=0.1)
    assert lr_factor(config, 11, 10) == pytest.approx(0.1)
    assert lr_factor(config, 500, 10) == pytest.approx(0.1)


def test_warm_up_as_long_as_the_run() -> None:
    assert factors(2, lr_scheduler_type="linear", lr_warmup_steps=2) == pytest.approx([1 / 3, 2 / 3])


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="counted from 1, found step 0"):
        lr_factor(OptimConfig(), 0, 10)


def test_warm_up_may_be_a_part_of_all_steps() -> None:
    by_ratio, by_steps = OptimConfig(lr_warmup_steps_ratio=0.285), OptimConfig(lr_warmup_steps=28)
    assert [lr_factor(by_ratio, step, 100) for step in range(1, 101)] == [
        lr_factor(by_steps, step, 100) for step in range(1, 101)
    ], "rounded down"


def test_a_warm_up_from_zero_has_the_rates_of_transformers() -> None:
    """The rates are read from the scheduler that `transformers.Trainer` steps."""
    for kind, name in (("linear", "linear"), ("cosine", "cosine"), ("constant", "constant_with_warmup")):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        theirs = get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=9)
        rates = []
        for _ in range(9):
            rates.append(theirs.get_last_lr()[0])
            optimizer.step()
            theirs.step()
        assert factors(9, lr_scheduler_type=kind, lr_warmup_steps=3, lr_warmup_from_zero=True) == pytest.approx(rates)
        config = OptimConfig(lr_scheduler_type=kind, lr_warmup_steps=3, lr_warmup_from_zero=True)
        assert [rate(config, step, 9) for step in range(1, 10)] == pytest.approx(rates)


@pytest.mark.parametrize("updates", [2, 3, 4])
@pytest.mark.parametrize("warmup", [0, 3, 5])
@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_rates_by_mini_batch_are_those_of_transformers(kind: Any, warmup: int, updates: int) -> None:
    """A run of several optimizer steps a training step, at a place between two training steps each."""
    steps = 6
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    name = "constant_with_warmup" if kind == "constant" else kind
    theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=steps * updates)
    config = OptimConfig(
        lr_scheduler_type=kind,
        lr_by_mini_batch=True,
        lr_warmup_steps=warmup / updates,
        lr_warmup_from_zero=True,
    )
    for step in range(1, steps + 1):
        for place in range(updates):
            wanted = pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
            assert lr_factor(config, step + place / updates, steps) == wanted
            assert rate(config, step + place / updates, steps) == wanted
            optimizer.step()
            theirs.step()
