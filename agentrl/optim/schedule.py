"""Learning rates as a pure function of the step: a resumed run needs no state to continue with the same rates."""

from __future__ import annotations

import math

from agentrl.config.sections.optim import OptimConfig


def lr_factor(config: OptimConfig, step: float, total_steps: int) -> float:
    """Factor of the learning rates at `step` of `total_steps`, both counted from 1.

    With a fraction, `step` is a place between two training steps: the mini-batch at place i of n in step s is at
    s + i / n.

    Warm-up rises in `lr_warmup_steps` equal parts (with lr_warmup_steps_ratio: in that part of `total_steps`). It
    reaches 1 at the step after them (step s: s / (warmup + 1)), so no step is spent at rate 0. With lr_warmup_from_zero
    it starts at 0 (step s: (s - 1) / warmup), which is the rule of `transformers`. From there constant stays at 1,
    linear and cosine fall so that they would reach `min_lr_ratio` one step after the last. Steps past the last get
    `min_lr_ratio`.

    Raises ValueError when `step` is below 1.
    """
    if step < 1:
        raise ValueError(f"lr_factor: steps are counted from 1, found step {step}")
    warmup = config.lr_warmup_steps or int(config.lr_warmup_steps_ratio * total_steps)
    if step - 1 < warmup:
        return (step - 1) / warmup if config.lr_warmup_from_zero else step / (warmup + 1)
    if config.lr_scheduler_type == "constant":
        return 1.0
    left = total_steps - warmup
    done = min(1.0, (step - 1 - warmup) / left) if left > 0 else 1.0
    fall = done if config.lr_scheduler_type == "linear" else 0.5 * (1 - math.cos(math.pi * done))
    return 1.0 - (1.0 - config.min_lr_ratio) * fall
