"""What may not change a result: the order of sequences, the cut into micro-batches, tokens that are masked."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms.advantages import compute_advantages, zero_advantage_sequences
from agentrl.algorithms.aggregate import LossScale, aggregate, with_loss_units
from agentrl.algorithms.kl import kl_penalty
from agentrl.algorithms.value_loss import value_loss
from agentrl.config.declaration import declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from agentrl.trajectory.batch import RaggedBatch, split_by_tokens
from tests.algorithms.batches import Row, algorithm, batch_of, batches, micro_loss, suited

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
POLICIES = POLICY_LOSSES.names()
N = 4


def loss_of(batch: RaggedBatch, logprobs: Tensor, scale: LossScale, policy: Any) -> Tensor:
    """All terms of an update at once."""
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None and batch.advantages is not None
    assert batch.values is not None and batch.returns is not None
    columns = (logprobs, batch.old_logprobs, batch.advantages, batch.mask, batch.offsets)
    by_token = micro_loss(policy, *columns, 0.1, 0.2, 1.5, selected=batch.selected).by_token
    kl = kl_penalty(logprobs, batch.ref_logprobs, "k3")
    by_token = by_token - 0.1 * logprobs.exp() + 0.2 * kl
    by_token = by_token + value_loss(logprobs, batch.values, batch.returns, batch.mask, 0.5)[0]
    return aggregate(by_token, batch.mask, batch.offsets, scale, batch.unit_tokens)


def scale_of(batch: RaggedBatch, mode: Any) -> LossScale:
    """The denominators of a mini-batch with the columns of its units, or without."""
    return LossScale.from_policy_tokens(batch.policy_tokens, mode, 7, batch.loss_unit)


def token_positions(batch: RaggedBatch, rows: list[int]) -> Tensor:
    """Where the tokens of `rows` stand in `batch`."""
    bounds = batch.offsets.tolist()
    return torch.tensor([at for row in rows for at in range(bounds[row], bounds[row + 1])], dtype=torch.int64)


@settings(max_examples=80, deadline=None)
@given(mode=st.sampled_from(MODES), policy=st.sampled_from(POLICIES), batch=batches(), max_tokens=st.integers(1, 30))
def test_micro_batches_add_up_to_the_mini_batch(mode: Any, policy: Any, batch: RaggedBatch, max_tokens: int) -> None:
    """Sequences of one trajectory may lie in several of them."""
    batch = with_loss_units(batch, "trajectory")
    scale = scale_of(batch, mode)
    whole = batch.rollout_logprobs.double().requires_grad_()
    loss = loss_of(batch, whole, scale, policy)
    loss.backward()

    cut = batch.rollout_logprobs.double().requires_grad_()
    total = 0.0
    for rows in split_by_tokens(batch.lengths.tolist(), max_tokens):
        share = loss_of(batch.select(rows), cut[token_positions(batch, rows)], scale, policy)
        share.backward()
        total += share.item()
    assert total == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    torch.testing.assert_close(cut.grad, whole.grad)


@settings(max_examples=100, deadline=None)
@given(
    estimator=st.sampled_from(ADVANTAGE_ESTIMATORS.names()), batch=batches(), order=st.randoms(use_true_random=False)
)
def test_the_order_of_trajectories_does_not_matter(estimator: str, batch: RaggedBatch, order: Any) -> None:
    batch, config = suited(batch, estimator), algorithm(estimator, gamma=0.9, lam=0.8)
    trajectories = batch.trajectory.unique().tolist()
    order.shuffle(trajectories)
    rows = [row for name in trajectories for row in torch.nonzero(batch.trajectory == name).flatten().tolist()]
    first = compute_advantages(batch, config, N)
    second = compute_advantages(batch.select(rows), config, N)
    assert first.advantages is not None and second.advantages is not None
    moved = token_positions(batch, rows)
    torch.testing.assert_close(second.advantages, first.advantages[moved], rtol=1e-4, atol=1e-5)
    if declaration_of(ADVANTAGE_ESTIMATORS.get(estimator)).compares_group:  # then what is 0 is left out of the update
        kept = zero_advantage_sequences(first).nonzero().flatten().tolist()
        assert sorted(rows[row] for row in zero_advantage_sequences(second).nonzero()) == kept


@settings(max_examples=80, deadline=None)
@given(mode=st.sampled_from(MODES), data=st.data(), roles=st.integers(1, 3), max_tokens=st.integers(1, 12))
def test_cutting_trajectories_into_transcripts_changes_no_gradient(
    mode: Any, data: st.DataObject, roles: int, max_tokens: int
) -> None:
    """To the rounding of float64, at any place, over micro-batches; with roles by trajectory and role."""
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=6))
    loss = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(len(lengths)))

    def gradient(cuts: list[list[int]]) -> Tensor:
        rows, owners, of_role = [], [], []
        for owner, (length, places) in enumerate(zip(lengths, cuts, strict=True)):
            for start, end in pairwise([0, *places, length]):
                rows.append(Row("1" * (end - start), trajectory=owner))
                owners.append(owner)
                of_role.append(owner % roles)
        batch = with_loss_units(batch_of(*rows).with_fields(role=torch.tensor(of_role)), "trajectory")
        scale, weights = scale_of(batch, mode), loss.clone().requires_grad_()
        for part in split_by_tokens(batch.lengths.tolist(), max_tokens):
            micro = batch.select(part)
            own = weights[token_positions(batch, part)].square()
            aggregate(own, micro.mask, micro.offsets, scale, micro.unit_tokens).backward()
        assert weights.grad is not None
        return weights.grad

    cuts = [sorted(data.draw(st.sets(st.integers(1, length), max_size=3)) - {length}) for length in lengths]
    torch.testing.assert_close(gradient(cuts), gradient([[] for _ in lengths]), rtol=1e-14, atol=0.0)


def test_the_unit_of_the_mean_by_sequence() -> None:
    """Two trajectories of three equal tokens, one of them in three transcripts, of which two have one role."""
    batch = batch_of(Row("0111", trajectory=4), *(Row("01", trajectory=9) for _ in range(3)))
    loss = torch.ones(batch.num_tokens, dtype=torch.float64)

    def shares(batch: RaggedBatch) -> list[float]:
        scale = scale_of(batch, "seq-mean-token-mean")
        ones = loss.clone().requires_grad_()
        aggregate(ones, batch.mask, batch.offsets, scale, batch.unit_tokens).backward()
        assert ones.grad is not None
        return [float(one.sum()) for one in ones.grad.split(batch.lengths.tolist())]

    assert shares(with_loss_units(batch, "trajectory")) == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert shares(with_loss_units(batch, "transcript")) == pytest.approx([1 / 4] * 4)
    with_roles = batch.with_fields(role=torch.tensor([7, 7, 7, 5]))
    assert shares(with_loss_units(with_roles, "trajectory")) == pytest.approx([1 / 3, 1 / 6, 1 / 6, 1 / 3])


def with_more_masked_tokens(batch: RaggedBatch, extra: list[int]) -> tuple[RaggedBatch, Tensor]:
    """(`batch` with NaN-filled tokens after some of its masked ones, where the old tokens now stand)."""
    take: list[int] = []
    new: list[bool] = []
    lengths = []
    bounds = batch.offsets.tolist()
    for start, end in pairwise(bounds):
        before = len(take)
        for at in range(start, end):
            take.append(at)
            new.append(False)
            if not batch.mask[at]:
                count = extra[at % len(extra)]
                take += [at] * count
                new += [True] * count
        lengths.append(len(take) - before)
    index, added = torch.tensor(take), torch.tensor(new)
    changes = {}
    for name, value in batch.tokens.items():
        longer = value[index].clone()
        if longer.is_floating_point() and name != "rewards":
            longer[added] = float("nan")
        changes[name] = longer
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return replace(batch.with_fields(**changes), offsets=offsets), torch.nonzero(~added).flatten()


@settings(max_examples=100, deadline=None)
@given(
    estimator=st.sampled_from(ADVANTAGE_ESTIMATORS.names()),
    batch=batches(),
    extra=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_more_masked_tokens_change_no_advantage(estimator: str, batch: RaggedBatch, extra: list[int]) -> None:
    batch, config = suited(batch, estimator), algorithm(estimator, gamma=0.9, lam=0.8)
    longer, where = with_more_masked_tokens(batch, extra)
    first, second = compute_advantages(batch, config, N), compute_advantages(longer, config, N)
    assert first.advantages is not None and first.returns is not None
    assert second.advantages is not None and second.returns is not None
    torch.testing.assert_close(second.advantages[where], first.advantages)
    torch.testing.assert_close(second.returns[where], first.returns)
    assert second.advantages.count_nonzero() == first.advantages.count_nonzero()


@settings(max_examples=80, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    policy=st.sampled_from(POLICIES),
    batch=batches(),
    extra=st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
def test_more_masked_tokens_change_no_loss(mode: Any, policy: Any, batch: RaggedBatch, extra: list[int]) -> None:
    longer, where = with_more_masked_tokens(batch, extra)
    results = []
    for each in (batch, longer):
        logprobs = each.rollout_logprobs.double().requires_grad_()
        loss = loss_of(each, logprobs, scale_of(each, mode), policy)
        loss.backward()
        assert logprobs.grad is not None
        results.append((loss.item(), logprobs.grad))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-9, abs=1e-12)
    torch.testing.assert_close(results[1][1][where], results[0][1])


@settings(max_examples=60, deadline=None)
@given(batch=batches())
def test_grpo_gives_a_group_mean_0_and_deviation_1_over_its_trajectories(batch: RaggedBatch) -> None:
    result = compute_advantages(batch, algorithm("grpo"), N)
    assert result.advantages is not None
    trajectory_of = batch.trajectory[batch.sequence_ids()]
    for group in batch.group.unique():
        members = batch.trajectory[batch.group == group].unique()
        found = [result.advantages[(trajectory_of == member) & batch.mask].unique() for member in members]
        assert all(len(values) == 1 for values in found), "all policy tokens of a trajectory share one advantage"
        values = torch.cat(found)
        if len(members) > 1 and values.any():
            assert values.mean().item() == pytest.approx(0, abs=1e-5)
            assert values.std(unbiased=True).item() == pytest.approx(1, abs=1e-4)
