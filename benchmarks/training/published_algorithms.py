"""Compares estimators, policy losses and corrections with the functions that verl publishes, on random ragged batches.

Prints, for each algorithm, the largest difference over all batches: of advantages, of a loss's gradient by log-prob and
of a correction's weights (0: rejected) relative to the largest of the batch, and of a loss's scalar, whose terms are of
the order of 1. All is computed in float64; advantages are then float32. verl (Apache-2.0) stays in a folder of its own:

    pip install --no-deps --target /tmp/verl verl==0.9.1 tensordict==0.10.0 codetiming pyvers importlib_metadata zipp
    PYTHONPATH=/tmp/verl python -m benchmarks.training.published_algorithms

Inputs avoid what is different on purpose (see docs/algorithms.md): groups of one, groups of equal rewards, and for
geo_mean advantages that differ within a sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.algorithms.advantages import compute_advantages
from agentrl.algorithms.aggregate import LossScale, aggregate
from agentrl.algorithms.policy_loss import PolicyLoss
from agentrl.algorithms.ragged import segment_sum
from agentrl.algorithms.rollout_correction import correct, correction_metrics, tally
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import AlgorithmConfig, LossAggMode, PolicyLossConfig, RolloutCorrectionConfig
from agentrl.trajectory.batch import RaggedBatch

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
MODES: tuple[LossAggMode, ...] = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
LOSSES: Mapping[str, Mapping[str, float]] = {
    "vanilla": {},
    "gspo": {},
    "cispo": {},
    "dppo_tv": {},
    "dppo_kl": {},
    "gpg": {},
    "sapo": {"tau_pos": 1.0, "tau_neg": 1.05},
    "geo_mean": {},
    "dro": {"dro_beta": 0.5},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0},
}
"""Losses with the options that are set."""
GDPO: Mapping[str, list[Any]] = {"reward_keys": ["right", "form"], "reward_weights": [1.0, 0.5]}
BY_SEQUENCE = ("sapo", "geo_mean")
"""Losses of which verl always takes the mean by sequence."""


GEOMETRIC = {"geometric": (1 / 1.3, 1 / 0.8)}
CORRECTIONS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "token, truncated": ({"rollout_is": "token"}, {"rollout_is": "token"}),
    "sequence, truncated": ({"rollout_is": "sequence"}, {"rollout_is": "sequence"}),
    "token, masked": (
        {"rollout_is": "token", "rollout_is_lower": 0.5, "rollout_is_outside": "mask"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_2.0"},
    ),
    "token, normalized": (
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
        {"rollout_is": "token", "rollout_is_batch_normalize": True},
    ),
    "sequence, normalized": (
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    ),
    "reject token": (
        {"reject": {"token": (1 / 3, 2.0)}},
        {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_3.0"},
    ),
    "reject sequence": (
        {"reject": {"sequence": (1 / 3, 2.0)}},
        {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_3.0"},
    ),
    "reject geometric": ({"reject": GEOMETRIC}, {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.3"}),
    "weigh and reject": (
        {"rollout_is": "sequence", "reject": {**GEOMETRIC, "seq_max_k3": 2.0}},
        {"rollout_is": "sequence", "rollout_rs": "seq_mean_k1,seq_max_k3", "rollout_rs_threshold": "0.8_1.3,2.0"},
    ),
    **{
        f"reject {name}": ({"reject": {name: bound}}, {"rollout_rs": name, "rollout_rs_threshold": bound})
        for name, bound in {
            "token_k2": 0.5,
            "token_k3": 0.5,
            "seq_sum_k2": 4.0,
            "seq_sum_k3": 4.0,
            "seq_mean_k2": 0.5,
            "seq_mean_k3": 0.5,
            "seq_max_k2": 2.0,
            "seq_max_k3": 2.0,
        }.items()
    },
}
"""Corrections: our keys, and verl's arguments."""


@dataclass(frozen=True)
class Drawn:
    """A batch of R rows, padded to W tokens as verl takes it."""

    mask: Tensor  # [R, W] float64, 1 where the policy sampled
    lengths: Tensor  # [R] int64
    group: Tensor  # [R] int64
    outcome: Tensor  # [R, W] float64, rewards on each row's last policy token
    rewards: Tensor  # [R, W] float64, on all policy tokens
    values: Tensor  # [R, W] float64
    old: Tensor  # [R, W] float64, log-probs
    new: Tensor  # [R, W] float64
    squared_probs: Tensor  # [R, W] float64
    advantages: Tensor  # [R, W] float64
    greedy: Tensor  # [R] float64
    numbers: Tensor  # [R, 2] float64, rewards of a scorer that gives two

    def unpad(self, values: Tensor) -> Tensor:
        """Put rows [R, W] after one another: [T]."""
        return values[torch.arange(values.shape[1]) < self.lengths[:, None]]

    @property
    def weights(self) -> Tensor:
        """Importance weights, truncated: [R, W] float64."""
        return (self.new - self.old).exp().clamp(max=2.0)

    def ragged(self, rewards: Tensor, *, corrected: bool = False) -> RaggedBatch:
        """Build our batch of these rows, with `rewards` [R, W]; `corrected`: and with the weights."""
        rows = len(self.lengths)
        mask = self.unpad(self.mask).bool()
        return RaggedBatch.from_columns(
            offsets=torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)]),
            ids=torch.zeros(len(mask), dtype=torch.int64),
            mask=mask,
            rollout_logprobs=self.unpad(self.old),
            version=mask.int() - 1,
            turn=mask.int() - 1,
            rewards=self.unpad(rewards),
            group=self.group,
            trajectory=torch.arange(rows),
            policy=torch.zeros(rows, dtype=torch.int32),
            policies=("policy",),
            old_logprobs=self.unpad(self.old),
            values=self.unpad(self.values),
            squared_probs=self.unpad(self.squared_probs),
            advantages=self.unpad(self.advantages),
            greedy_rewards=self.greedy,
            correction=self.unpad(self.weights) if corrected else None,
        )


def draw(generator: torch.Generator) -> Drawn:
    """Draw 2 to 4 groups of 2 to 5 rows of 3 to 24 tokens, with gaps as tool answers leave them."""

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    group = torch.cat([torch.full((number(2, 5),), index) for index in range(number(2, 4))])
    rows, width = len(group), 24
    lengths = torch.randint(3, width + 1, (rows,), generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = (torch.rand(rows, width, generator=generator) < 0.6).double()
    mask[:, 0], mask[:, 1] = 0.0, 1.0
    mask *= torch.arange(width) < lengths[:, None]
    outcome = torch.zeros(rows, width, dtype=torch.float64)
    outcome[torch.arange(rows), (mask * torch.arange(width)).argmax(-1)] = normal(rows)
    old = -normal(rows, width).abs() - 0.01
    probs = old.exp()
    return Drawn(
        mask=mask,
        lengths=lengths,
        group=group,
        outcome=outcome,
        rewards=outcome + 0.1 * normal(rows, width) * mask,
        values=normal(rows, width),
        old=old,
        new=(old + normal(rows, width)).clamp(max=-0.01),
        squared_probs=probs**2 + (1 - probs) ** 2 * torch.rand(rows, width, generator=generator),
        advantages=normal(rows, width) * mask,
        greedy=normal(int(group.max()) + 1)[group],
        numbers=normal(rows, 2),
    )


def their_advantages(name: str, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """([R, W] rewards that were given, [R, W] advantages)"""
    from verl.trainer.ppo import core_algos  # type: ignore[import-not-found]

    function: Callable[..., tuple[Tensor, Tensor]] = core_algos.get_adv_estimator_fn(name)
    index = drawn.group.numpy().astype(np.int64)
    arguments: dict[str, Any] = {"response_mask": drawn.mask}
    rewards = drawn.rewards if name in ("gae", "reinforce_plus_plus", "tir_optimal_token_baseline") else drawn.outcome
    if name == "gae":
        arguments |= {"values": drawn.values, "gamma": 0.9, "lam": 0.8}
    elif name == "reinforce_plus_plus":
        arguments["config"] = type("Config", (), {"gamma": 0.9})
    elif name == "remax":
        arguments["reward_baselines"] = drawn.greedy
    elif name == "gdpo":
        places = {"prompts": drawn.mask[:, :0], "attention_mask": drawn.mask.long()}
        numbers = {key: drawn.numbers[:, place].numpy() for place, key in enumerate(GDPO["reward_keys"])}
        config = {f"gdpo_{key}": value for key, value in GDPO.items()}
        arguments |= {"index": index, "config": config, "non_tensor_batch": numbers, "batch": places}
    elif name == "tir_optimal_token_baseline":
        arguments |= {"index": index, "old_log_probs": drawn.old, "sum_pi_squared": drawn.squared_probs}
        arguments["rollout_is_weights"] = drawn.weights
    else:
        arguments["index"] = index
        if name == "grpo_passk":
            arguments["config"] = {"norm_adv_by_std_in_grpo": True}
    return rewards, function(token_level_rewards=rewards.clone(), **arguments)[0] * drawn.mask


def estimator_difference(name: str, drawn: Drawn) -> float:
    """Difference of the advantages, relative to the largest."""
    rewards, theirs = their_advantages(name, drawn)
    options = GDPO if name == "gdpo" else {}
    keys = {"adv_estimator": name, "adv_options": options, "gamma": 0.9, "lam": 0.8}
    numbers = {f"score/{key}": drawn.numbers[:, place].double() for place, key in enumerate(GDPO["reward_keys"])}
    batch = drawn.ragged(rewards, corrected=True).with_fields(**numbers)
    ours = compute_advantages(batch, AlgorithmConfig.model_validate(keys), 5).advantages
    assert ours is not None
    return relative(ours.double(), drawn.unpad(theirs))


def loss_difference(name: str, drawn: Drawn) -> float:
    """Largest difference of the scalar and of the gradient, over all ways to average."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig as TheirConfig  # type: ignore[import-not-found]
    from verl.workers.config import PolicyLossConfig as TheirLossConfig

    low, high, dual = CLIP.values()
    options = LOSSES[name]
    their_options = {key: value for key, value in options.items() if not key.startswith("tau")}
    theirs_config = TheirConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=TheirLossConfig(loss_mode=name, **their_options),
        **CLIP,
        **{key: value for key, value in options.items() if key.startswith("tau")},
    )
    ours_config = ActorConfig(
        policy_loss=PolicyLossConfig(loss_mode=name, options=dict(options)),
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
    )
    advantages = drawn.advantages
    if name == "geo_mean":
        advantages = drawn.greedy[:, None] * drawn.mask
    batch = drawn.ragged(drawn.outcome)
    batch = batch.with_fields(advantages=drawn.unpad(advantages))
    ours_loss = PolicyLoss.from_config(ours_config)
    if ours_loss.declaration.select is not None:  # verl selects in each micro-batch, by the policy that is trained
        batch = batch.with_fields(selected=ours_loss.select(batch, drawn.unpad(drawn.new), 0))
    worst = 0.0
    for mode in MODES[-1:] if name in BY_SEQUENCE else MODES:
        leaf = drawn.new.clone().requires_grad_()
        loss, _ = core_algos.get_policy_loss_fn(name)(drawn.old, leaf, advantages, drawn.mask, mode, theirs_config)
        loss.backward()
        own = drawn.unpad(drawn.new).requires_grad_()
        by_token = ours_loss(batch, own).by_token
        counts = segment_sum(batch.mask.double(), batch.offsets)
        found = aggregate(by_token, batch.mask, batch.offsets, LossScale.from_policy_tokens(counts, mode))
        found.backward()
        assert own.grad is not None and leaf.grad is not None
        worst = max(worst, abs(float(found.detach() - loss.detach())))
        worst = max(worst, relative(own.grad, drawn.unpad(leaf.grad)))
    return worst


def correction_difference(name: str, drawn: Drawn) -> float:
    """Difference of the weights, and of their effective sample size where verl has one."""
    from verl.trainer.ppo import rollout_corr_helper

    keys, arguments = CORRECTIONS[name]
    given, kept, metrics = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        drawn.new, drawn.old, drawn.mask, **arguments
    )
    theirs = kept if given is None else kept * given.batch["rollout_is_weights"]
    batch, config = drawn.ragged(drawn.outcome), RolloutCorrectionConfig.model_validate(keys)
    gap = drawn.unpad(drawn.new - drawn.old)
    ours = correct(gap, batch.mask, batch.offsets, config)
    worst = relative(ours.weight, drawn.unpad(theirs))
    if "rollout_rs" not in arguments:
        sums = tally(gap, ours, batch.mask, torch.zeros_like(batch.ids))
        found = correction_metrics({key: value.item() for key, value in sums.items()}, config)
        worst = max(worst, abs(found["correction/ess"] - metrics["rollout_corr/rollout_is_eff_sample_size"]))
    return worst


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference of two [k], relative to the largest of `theirs`."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-12))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=200)
    batches = parser.parse_args().batches
    names = ["gae", "gdpo", "gpg", "grpo", "grpo_passk", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
    names += ["remax", "rloo", "tir_optimal_token_baseline"]
    for kind, measure, chosen in (
        ("estimator", estimator_difference, names),
        ("loss", loss_difference, list(LOSSES)),
        ("correction", correction_difference, list(CORRECTIONS)),
    ):
        for name in chosen:
            generator = torch.Generator().manual_seed(0)
            worst = max(measure(name, draw(generator)) for _ in range(batches))
            print(f"{kind:10} {name:30} {worst:.1e}")


if __name__ == "__main__":
    main()
