"""Mini-batches of prompts and micro-batches of tokens."""

from __future__ import annotations

import torch

from agentrl.workers.plan import micro_batches, mini_batches, update_plan
from tests.workers.conftest import BatchMaker

GROUP = torch.tensor([5, 5, 2, 2, 9, 9, 7])


def prompts(batches: list[list[int]]) -> list[list[int]]:
    return [sorted(set(GROUP[rows].tolist())) for rows in batches]


def test_all_sequences_of_a_prompt_go_together() -> None:
    batches = mini_batches(GROUP, 2, "1/1/1")
    assert sorted(row for rows in batches for row in rows) == list(range(7))
    found = prompts(batches)
    assert [len(members) for members in found] == [2, 2]
    assert sorted(found[0] + found[1]) == [2, 5, 7, 9]


def test_prompts_are_spread_evenly() -> None:
    """5 prompts in mini-batches of at most 4 are 2 + 3, not 4 + 1."""
    sizes = [len(rows) for rows in mini_batches(torch.arange(5), 4, None)]
    assert sorted(sizes) == [2, 3]


def test_order_follows_from_the_key_alone() -> None:
    group = torch.arange(32)
    first = mini_batches(group, 8, "1/7/1")
    torch.manual_seed(123)
    assert mini_batches(group, 8, "1/7/1") == first
    assert mini_batches(group, 8, "1/8/1") != first
    assert mini_batches(group, 8, None)[0] == list(range(8))


def test_epochs_are_shuffled_anew() -> None:
    plan = update_plan(torch.arange(8), 4, 2, "1/1")
    assert [where for where, _ in plan][2] == "epoch 2 of 2, mini-batch 1 of 2"
    assert plan[0][1] != plan[2][1]


def test_micro_batches_hold_the_budget_and_keep_prompts_together(make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=6, n=3)
    lengths = batch.lengths.tolist()
    largest = max(sum(lengths[row] for row in range(p * 3, p * 3 + 3)) for p in range(6))
    plan = micro_batches(batch, largest)
    assert sorted(row for rows in plan for row in rows) == list(range(18))
    assert all(sum(lengths[row] for row in rows) <= largest for rows in plan)
    assert all(len(rows) % 3 == 0 for rows in plan)


def test_a_sequence_over_the_budget_goes_alone(make_batch: BatchMaker) -> None:
    assert sorted(micro_batches(make_batch(prompts=2, n=2), 1)) == [[0], [1], [2], [3]]
