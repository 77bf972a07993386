"""The ragged batch: choosing sequences, and packing them into micro-batches."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.trajectory.batch import RaggedBatch, split_by_tokens
from tests.algorithms.batches import batches


@settings(max_examples=60, deadline=None)
@given(batch=batches(), data=st.data())
def test_select_takes_every_field_of_the_chosen_sequences(batch: RaggedBatch, data: st.DataObject) -> None:
    batch = batch.with_fields(old_logprobs=None)
    rows = data.draw(st.lists(st.integers(0, len(batch) - 1), max_size=8))
    chosen = batch.select(rows)
    bounds = batch.offsets.tolist()
    assert chosen.old_logprobs is None
    assert chosen.lengths.tolist() == [bounds[row + 1] - bounds[row] for row in rows]
    assert int(chosen.offsets[0]) == 0 and int(chosen.offsets[-1]) == chosen.num_tokens
    assert chosen.tokens.keys() == batch.tokens.keys() and chosen.sequences.keys() == batch.sequences.keys()
    for name, before in batch.sequences.items():
        after, expected = chosen.sequences[name], [before[row].item() for row in rows]
        assert after.tolist() == expected and after.dtype == before.dtype, name
    for name, before in batch.tokens.items():
        after = chosen.tokens[name]
        expected = [value for row in rows for value in before[bounds[row] : bounds[row + 1]].tolist()]
        assert after.tolist() == expected and after.dtype == before.dtype, name


def test_select_keeps_empty_sequences() -> None:
    batch = RaggedBatch.from_columns(
        offsets=torch.tensor([0, 2, 2, 3]),
        ids=torch.tensor([7, 8, 9]),
        mask=torch.tensor([False, True, True]),
        rollout_logprobs=torch.zeros(3),
        version=torch.tensor([-1, 4, 5], dtype=torch.int32),
        turn=torch.tensor([-1, 0, 0], dtype=torch.int32),
        rewards=torch.zeros(3),
        group=torch.tensor([0, 1, 2]),
        trajectory=torch.tensor([0, 1, 2]),
        policy=torch.zeros(3, dtype=torch.int32),
        policies=("policy",),
    )
    chosen = batch.select([2, 1, 0])
    assert chosen.offsets.tolist() == [0, 1, 1, 3] and chosen.ids.tolist() == [9, 7, 8]
    assert chosen.sequence_ids().tolist() == [0, 2, 2]
    shown = repr(chosen).splitlines()
    assert shown[0] == "RaggedBatch of 3 sequences and 3 tokens"
    assert "mask bool" in shown[1] and shown[2] == "by sequence: group int64, policy int32, trajectory int64"


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 60))
def test_split_by_tokens_places_every_sequence_once_within_the_budget(lengths: list[int], max_tokens: int) -> None:
    bins = split_by_tokens(lengths, max_tokens)
    assert sorted(index for part in bins for index in part) == list(range(len(lengths)))
    sizes = [sum(lengths[index] for index in part) for part in bins]
    assert all(size <= max_tokens or len(part) == 1 for size, part in zip(sizes, bins, strict=True))
    assert all(bins), "no micro-batch is empty"
    # First fit: of any two micro-batches together, something would not have fitted into one.
    assert all(a + b > max_tokens for n, a in enumerate(sizes) for b in sizes[:n])


def test_split_by_tokens_fills_a_micro_batch_to_the_last_token() -> None:
    assert split_by_tokens([5, 3, 12, 2, 10], 10) == [[2], [4], [0, 1, 3]]
