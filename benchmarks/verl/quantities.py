"""Quantities of a training: what a command makes the trainer do, by our code and by the formulas of verl's code.

verl's releases read some keys otherwise than others do, so that equal keys are no proof. What is computed here is what
is left when names and units are gone: optimizer steps a batch, the reward and the loss of sample tokens, learning
rates, and the steps after which validation runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch

from agentrl.algorithms.columns import LossColumns
from agentrl.algorithms.kl import kl_loss, kl_penalty
from agentrl.algorithms.policy_losses.vanilla import vanilla
from agentrl.config import Config
from agentrl.config.sections.optim import OptimConfig
from agentrl.optim.schedule import lr_factor
from agentrl.system.json_value import JSON
from agentrl.trainer.run import validation_due
from agentrl.trainer.step import build_kl_controller
from agentrl.workers.plan import update_plan
from benchmarks.verl.release_steps import ACTOR, ROLLOUT, Release

Reference = Mapping[str, JSON]
RATIOS, DRIFT, ENTROPY = (0.5, 0.9, 1.1, 1.5, 5.0), 0.3, 1.5
"""Sample tokens: their ratios, the log-ratio of the policy to the reference, and the entropy in nats."""
STEPS = 100
"""Steps of the run whose learning rates and validations are computed, unless it is longer."""

Quantities = dict[str, JSON]


def ours(config: Config) -> Quantities:
    """Compute by our own code what the trainer makes of a config."""
    actor, critic, algorithm, trainer = config.actor_rollout_ref.actor, config.critic, config.algorithm, config.trainer
    group = torch.arange(config.data.train_batch_size).repeat_interleave(config.actor_rollout_ref.rollout.n)
    critics = update_plan(
        group, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs, None
    )
    controller = build_kl_controller(config)
    drift = torch.tensor([DRIFT]), torch.tensor([0.0])
    taken = 0.0 if controller is None else controller.coef * float(kl_penalty(*drift, algorithm.kl_penalty))
    in_loss = actor.kl_loss_coef * float(kl_loss(*drift, actor.kl_loss_type)) if actor.use_kl_loss else 0.0
    has_critic = algorithm.adv_estimator == "gae"
    return {
        "estimator": algorithm.adv_estimator,
        "sequences a batch": len(group),
        "the policy's optimizer steps a batch": len(
            update_plan(group, actor.ppo_mini_batch_size, actor.ppo_epochs, None)
        ),
        "the critic's optimizer steps a batch": len(critics) if has_critic else 0,
        "reward of a token": round(1.0 - taken, 6),
        "the KL's coefficient is steered": controller is not None and algorithm.kl_ctrl.type == "adaptive",
        "loss of tokens": [round(one + in_loss - actor.entropy_coeff * ENTROPY, 6) for one in _clipped(config)]
        if actor.policy_loss.loss_mode == "vanilla"
        else actor.policy_loss.loss_mode,
        "the policy's rates": _rates(partial(_our_rate, actor.optim)),
        "the critic's rates": _rates(partial(_our_rate, critic.optim)) if has_critic else [],
        "validations": [step for step in range(1, STEPS + 1) if validation_due(trainer, step, STEPS)],
    }


def _clipped(config: Config) -> list[float]:
    actor = config.actor_rollout_ref.actor
    ratios = torch.tensor(RATIOS * 2, dtype=torch.float64)
    advantages = torch.tensor([1.0] * len(RATIOS) + [-1.0] * len(RATIOS), dtype=torch.float64)
    zeros, count = torch.zeros_like(ratios), len(ratios)
    numbers = torch.zeros(count, dtype=torch.int32)
    mask, offsets = torch.ones(count, dtype=torch.bool), torch.tensor([0, count])
    columns = LossColumns(
        logprobs=ratios.log(),
        old_logprobs=zeros,
        rollout_logprobs=zeros,
        advantages=advantages,
        mask=mask,
        offsets=offsets,
        turn=numbers,
        version=numbers,
    )
    found: list[float] = vanilla(columns, actor).by_token.tolist()
    return found


def of_verl(values: Reference, release: Release) -> Quantities:
    """Compute from verl's composed values what the code of a release makes of them."""
    old = release != "main"
    prompts, mini = _int(values, "data.train_batch_size"), _int(values, f"{ACTOR}.ppo_mini_batch_size")
    n = _int(values, f"{ROLLOUT}.n_agent" if release == "search_r1" else f"{ROLLOUT}.n")
    each = 1 if release == "search_r1" else n  # trajectories that a "prompt" of the policy's mini-batch stands for
    of_critic = 1 if old else n  # only later releases multiply the critic's
    passes = 1 if old else _int(values, f"{ACTOR}.ppo_epochs")  # 0.2 has no loop over epochs
    critic_mini = values.get("critic.ppo_mini_batch_size", mini)
    assert isinstance(critic_mini, int)
    use_kl_loss = bool(values[f"{ACTOR}.use_kl_loss"])
    in_reward = not use_kl_loss if old else bool(values["algorithm.use_kl_in_reward"])
    taken = _float(values, "algorithm.kl_ctrl.kl_coef") if in_reward else 0.0
    estimator = str(values["algorithm.adv_estimator"]).removesuffix("_vectorized")
    has_critic = estimator == "gae"
    kl_kind, loss_kind = str(values["algorithm.kl_penalty"]), str(values[f"{ACTOR}.kl_loss_type"])
    constant = _float(values, f"{ACTOR}.kl_loss_coef") * _divergence(loss_kind) if use_kl_loss else 0.0
    constant -= _float(values, f"{ACTOR}.entropy_coeff") * ENTROPY
    mode = "vanilla" if old else str(values[f"{ACTOR}.policy_loss.loss_mode"]).replace("-", "_")
    frequency, total = _int(values, "trainer.test_freq"), STEPS
    return {
        "estimator": estimator,
        "sequences a batch": prompts * n,
        "the policy's optimizer steps a batch": math.ceil(prompts * n / (mini * each)) * passes,
        "the critic's optimizer steps a batch": math.ceil(prompts * n / (critic_mini * of_critic)) * passes
        if has_critic
        else 0,
        "reward of a token": round(1.0 - taken * _divergence(kl_kind), 6),
        "the KL's coefficient is steered": in_reward and taken > 0 and values["algorithm.kl_ctrl.type"] == "adaptive",
        "loss of tokens": [
            round(_surrogate(ratio, advantage, values, old=old) + constant, 6)
            for advantage in (1.0, -1.0)
            for ratio in RATIOS
        ]
        if mode == "vanilla"
        else mode,
        "the policy's rates": _rates(partial(_rate, values, f"{ACTOR}.optim", old=old)),
        "the critic's rates": _rates(partial(_rate, values, "critic.optim", old=old)) if has_critic else [],
        "validations": [
            step
            for step in range(1, total + 1)
            if (frequency > 0 and step % frequency == 0) or (step == total and (old or frequency > 0))
        ],
    }


def different(config: Config, values: Reference, release: Release) -> list[str]:
    """Write a line for each quantity in which a config of ours is not what verl's code makes of its values."""
    mine, theirs = ours(config), of_verl(values, release)
    return [f"{name}: {mine[name]!r}, verl {theirs[name]!r}" for name in mine if mine[name] != theirs[name]]


def _surrogate(ratio: float, advantage: float, values: Reference, *, old: bool) -> float:
    """Loss of a token: PPO's, with a dual clip in later releases."""
    both = _float(values, f"{ACTOR}.clip_ratio")
    low, high = both, both
    if not old:
        sides = [values.get(f"{ACTOR}.{name}") for name in ("clip_ratio_low", "clip_ratio_high")]
        low, high = (both if side is None else float(str(side)) for side in sides)
    loss = max(-advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high))
    if not old and advantage < 0:
        loss = min(loss, -advantage * _float(values, f"{ACTOR}.clip_ratio_c"))
    return loss


def _divergence(kind: str) -> float:
    """Estimate of the KL divergence of a token by its log-ratio to the reference, `DRIFT`."""
    kind = kind.removesuffix("+")
    if kind in ("kl", "k1"):
        return DRIFT
    if kind == "abs":
        return abs(DRIFT)
    return DRIFT**2 / 2 if kind in ("mse", "k2") else math.exp(-DRIFT) + DRIFT - 1


def _our_rate(optim: OptimConfig, step: int) -> float | None:
    """Learning rate of a step, counted from 1; None in the warm-up, which begins otherwise here (docs/verl.md)."""
    warm_up = optim.lr_warmup_steps or int(optim.lr_warmup_steps_ratio * STEPS)
    return None if step <= warm_up else optim.lr * lr_factor(optim, step, STEPS)


def _rate(values: Reference, section: str, step: int, *, old: bool) -> float | None:
    """Learning rate of a step, None in the warm-up; releases up to 0.3 know constant ones alone."""
    steps, part = values.get(f"{section}.lr_warmup_steps"), values.get(f"{section}.lr_warmup_steps_ratio")
    warm_up = steps if isinstance(steps, int) and steps > 0 else int(float(str(part or 0)) * STEPS)
    rate = _float(values, f"{section}.lr")
    style = values.get(f"{section}.lr_scheduler_type") or values.get(f"{section}.warmup_style")
    if step <= warm_up:
        return None
    if old or style in (None, "constant"):
        return rate
    least = float(str(values.get(f"{section}.min_lr_ratio") or 0.0))
    return rate * ((1 - least) * 0.5 * (1 + math.cos(math.pi * (step - 1 - warm_up) / (STEPS - warm_up))) + least)


def _rates(rate: Callable[[int], float | None]) -> list[JSON]:
    """Rates of some steps, to six digits."""
    found = [rate(step) for step in (1, 11, 51, 75, 100)]
    return [None if one is None else float(f"{one:.6g}") for one in found]


def _int(values: Reference, key: str) -> int:
    value = values[key]
    assert isinstance(value, int), (key, value)
    return value


def _float(values: Reference, key: str) -> float:
    return float(str(values[key]))
