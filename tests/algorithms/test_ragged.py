"""Sums over sequences and statistics over a mask."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.ragged import masked_mean, masked_whiten, observed, segment_ids, segment_sum, suffix_sums

lengths = st.lists(st.integers(0, 9), max_size=6)


def layout(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(offsets, random values)"""
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.tensor([0, *sizes]).cumsum(0), torch.randn(sum(sizes), generator=generator, dtype=torch.float64)


@given(lengths, st.sampled_from([0.0, 0.5, 0.97, 1.0]))
def test_suffix_sums_is_the_recursion(sizes: list[int], discount: float) -> None:
    offsets, values = layout(sizes)
    expected = torch.zeros_like(values)
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        running = 0.0
        for at in reversed(range(start, end)):
            running = values[at].item() + discount * running
            expected[at] = running
    torch.testing.assert_close(suffix_sums(values, offsets, discount), expected)


@given(lengths)
def test_segment_sum_and_ids(sizes: list[int]) -> None:
    offsets, values = layout(sizes)
    parts = values.split(sizes) if sizes else []
    assert segment_sum(values, offsets).tolist() == pytest.approx([part.sum().item() for part in parts])
    assert segment_ids(offsets).tolist() == [number for number, size in enumerate(sizes) for _ in range(size)]


def test_segment_sum_passes_gradients() -> None:
    values = torch.ones(3, requires_grad=True)
    (segment_sum(values, torch.tensor([0, 2, 2, 3])) * torch.tensor([2.0, 5.0, 3.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [2.0, 2.0, 3.0]


def test_whitening_equal_values_or_one_or_none_gives_zero() -> None:
    values = torch.tensor([0.1, 0.1, 0.1, math.nan])
    for mask in ([True, True, True, False], [True, False, False, False], [False] * 4):
        assert masked_whiten(values, torch.tensor(mask)).tolist() == pytest.approx([0.0] * 4, abs=1e-10)


def test_the_mean_of_an_empty_mask_is_zero() -> None:
    assert masked_mean(torch.tensor([math.nan]), torch.tensor([False])).item() == 0.0


def test_what_is_observed_comes_after_the_first_policy_token_of_its_sequence() -> None:
    # A prompt, a turn, an answer of two tokens, a turn; a prompt alone; a turn at once, and what follows it.
    mask = torch.tensor([0, 1, 0, 0, 1, 0, 0, 1, 0]).bool()
    found = observed(mask, torch.tensor([0, 5, 7, 9]))
    assert found.tolist() == [False, False, True, True, False, False, False, False, True]
    assert observed(mask[:0], torch.tensor([0])).tolist() == []
