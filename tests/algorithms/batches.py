"""Small ragged batches, written out by hand or drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms.policy_loss import MicroLoss, PolicyLoss
from agentrl.config.sections.actor import ActorConfig
from agentrl.config.sections.algorithm import AlgorithmConfig, PolicyLossConfig
from agentrl.trajectory.batch import RaggedBatch
from tests.trained import trained_batch

LOSS_OPTIONS: dict[str, dict[str, Any]] = {"dro": {"dro_beta": 0.5}}
"""Options of the losses that do not go without."""


@dataclass(frozen=True)
class Row:
    """One sequence. `mask` as text, e.g. "0110"; `rewards` and `values` by position in it."""

    mask: str
    rewards: dict[int, float] = field(default_factory=dict)
    group: int = 0
    trajectory: int | None = None
    """None: the row's position."""
    values: Sequence[float] | None = None


def batch_of(*rows: Row) -> RaggedBatch:
    """The batch of `rows`; ids are 0, 1, 2, ..."""
    lengths = [len(row.mask) for row in rows]
    total = sum(lengths)
    return RaggedBatch.from_columns(
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        state=torch.tensor(turns_of(rows)),
        ids=torch.arange(total),
        mask=torch.tensor([char == "1" for row in rows for char in row.mask], dtype=torch.bool),
        rollout_logprobs=torch.zeros(total),
        version=torch.tensor([0 if char == "1" else -1 for row in rows for char in row.mask], dtype=torch.int32),
        turn=torch.tensor(turns_of(rows), dtype=torch.int32),
        rewards=torch.tensor([row.rewards.get(at, 0.0) for row in rows for at in range(len(row.mask))]),
        group=torch.tensor([row.group for row in rows], dtype=torch.int64),
        trajectory=torch.tensor(
            [index if row.trajectory is None else row.trajectory for index, row in enumerate(rows)], dtype=torch.int64
        ),
        policy=torch.zeros(len(rows), dtype=torch.int32),
        policies=("policy",),
        old_logprobs=torch.zeros(total),
        values=torch.tensor([value for row in rows for value in row.values or [0.0] * len(row.mask)]),
        squared_probs=torch.full((total,), 0.5),
        greedy_rewards=torch.zeros(len(rows)),
        running_returns=torch.zeros(len(rows), dtype=torch.float64),
        ref_logprobs=torch.zeros(total),
        teacher=torch.zeros(total, dtype=torch.int32),
        teacher_scores=torch.zeros(total, 1),
    )


def micro_loss(
    mode: str,
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    offsets: Tensor,
    low: float = 0.2,
    high: float = 0.28,
    dual: float = 3.0,
    selected: Tensor | None = None,
) -> MicroLoss:
    """The policy loss `mode` of these columns, with these clip bounds. Without `selected` it selects by `logprobs`."""
    sequences = len(offsets) - 1
    batch = trained_batch(
        offsets,
        torch.zeros(len(mask), dtype=torch.int64),
        mask,
        torch.arange(sequences),
        rollout_logprobs=old_logprobs,
        old_logprobs=old_logprobs,
        advantages=advantages,
        selected=selected,
    )
    chosen = PolicyLossConfig(loss_mode=mode, options=LOSS_OPTIONS.get(mode, {}))
    config = ActorConfig(policy_loss=chosen, clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual)
    loss = PolicyLoss.from_config(config)
    if loss.declaration.select is not None and selected is None:
        batch = batch.with_fields(selected=loss.select(batch, logprobs.detach(), 0))
    return loss(batch, logprobs)


def turns_of(rows: Sequence[Row]) -> list[int]:
    """By token: each run of policy tokens is a turn of its trajectory, as each stretch of observed tokens is."""
    counts: dict[int, int] = {}
    turns = []
    for index, row in enumerate(rows):
        trajectory = index if row.trajectory is None else row.trajectory
        for place, char in enumerate(row.mask):
            if place == 0 or row.mask[place - 1] != char:
                counts[trajectory] = counts.get(trajectory, -1) + 1
            turns.append(counts[trajectory] if char == "1" else -1)
    return turns


def algorithm(estimator: str, **keys: Any) -> AlgorithmConfig:
    """The config of one estimator."""
    return AlgorithmConfig.model_validate({"adv_estimator": estimator, **keys})


@st.composite
def batches(draw: st.DrawFn, max_trajectories: int = 6) -> RaggedBatch:
    """Trajectories of one to two sequences in up to three groups, every token field filled with random numbers.

    Every sequence begins with an observed token and has a policy token; rewards are on policy tokens only. A group's
    rewards come from a small set, so that equal groups are common.
    """
    count = draw(st.integers(1, max_trajectories))
    rows: list[Row] = []
    for trajectory in range(count):
        group = draw(st.integers(0, 2))
        for _ in range(draw(st.integers(1, 2))):
            tail = draw(st.text("01", min_size=0, max_size=6))
            mask = "0" + tail + "1" + draw(st.sampled_from(["", "0", "00"]))
            policy = [at for at, char in enumerate(mask) if char == "1"]
            rewards = {
                at: draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0]))
                for at in draw(st.sets(st.sampled_from(policy), max_size=2))
            }
            rows.append(Row(mask, rewards, group, trajectory))
    batch = batch_of(*rows)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal() -> torch.Tensor:
        return torch.randn(batch.num_tokens, generator=generator)

    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs")
    batch = batch.with_fields(**{name: -normal().abs() for name in names})
    batch = batch.with_fields(**{name: normal() for name in ("values", "advantages", "returns")})
    batch = batch.with_fields(squared_probs=normal().sigmoid())
    batch = batch.with_fields(teacher_scores=-normal().abs()[:, None])
    batch = batch.with_fields(state=torch.where(batch.mask, batch.turn % 3, -1).long())
    batch = batch.with_fields(greedy_rewards=0.5 * (batch.group == 1))
    batch = batch.with_fields(selected=(normal() > 0) & batch.mask)
    return batch


def suited(batch: RaggedBatch, estimator: str) -> RaggedBatch:
    """The batch with rewards that the estimator takes: none below 0 for maxrl."""
    return batch.with_fields(rewards=batch.rewards.abs()) if estimator == "maxrl" else batch
