"""Handing a batch out to ranks and putting the results together."""

from __future__ import annotations

import random

import pytest
import torch

from agentrl.runtime.ranks import LocalRanks, own_method, reduce_metrics, shares
from agentrl.trajectory.batch import RaggedBatch, Sequences
from tests.workers.conftest import BatchMaker


def test_shares_are_balanced_by_tokens() -> None:
    assert sorted(map(sum, loads([10, 1, 1, 1, 9, 2], 2))) == [12, 12]
    assert shares([3, 3], 4) == [[0], [1], [], []]
    assert shares([], 2) == [[], []]


def loads(lengths: list[int], ranks: int) -> list[list[int]]:
    parts = shares(lengths, ranks)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert parts == [sorted(part) for part in parts] == shares(lengths, ranks)
    return [[lengths[index] for index in part] for part in parts]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_shares_of_a_long_tail_are_almost_even(ranks: int) -> None:
    """Lengths as answers have them; a rank more than 1 % above the others would be waited for at every step."""
    rng = random.Random(1)
    lengths = [int(rng.lognormvariate(6, 1)) + 1 for _ in range(512)]
    totals = [sum(part) for part in loads(lengths, ranks)]
    assert max(totals) <= 1.01 * sum(totals) / ranks


def by_lists(lengths: list[int], ranks: int) -> list[list[int]]:
    """Largest differencing as it is told: every partition carries its parts."""
    partitions = [
        (length, -index, [(length, [index]), *((0, []) for _ in range(ranks - 1))])
        for index, length in enumerate(lengths)
    ]
    while len(partitions) > 1:
        partitions.sort(key=lambda partition: partition[:2])
        (_, order, one), (_, _, other) = partitions.pop(), partitions.pop()
        pairs = zip(one, reversed(other), strict=True)
        merged = sorted(((a + b, mine + theirs) for (a, mine), (b, theirs) in pairs), key=lambda part: -part[0])
        partitions.append((merged[0][0] - merged[-1][0], order, merged))
    return [sorted(part) for _, part in partitions[0][2]]


def test_shares_are_those_of_the_plain_algorithm() -> None:
    rng = random.Random(2)
    for _ in range(60):
        most = rng.choice([3, 50, 5000])  # many equal lengths, and few
        lengths = [rng.randint(1, most) for _ in range(rng.randint(1, 60))]
        ranks = rng.randint(1, 12)
        assert shares(lengths, ranks) == by_lists(lengths, ranks)


def test_metrics_are_averaged_over_ranks() -> None:
    assert reduce_metrics([{"loss": 2.0, "seconds": 1.0}, {"loss": 2.0, "seconds": 3.0}]) == {
        "loss": 2.0,
        "seconds": 2.0,
    }


class Counter:
    def count(self, batch: Sequences, *, factor: int) -> dict[str, float]:
        return {"count": float(len(batch) * factor)}

    def values(self, batch: RaggedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.arange(batch.num_tokens), {"tokens": float(batch.num_tokens)}

    def ping(self) -> str:
        return "pong"


class Louder(Counter):
    def ping(self) -> str:
        return "PONG"


def test_one_worker_is_its_ranks(make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=2, n=2)
    ranks = LocalRanks[Counter](Louder())
    assert ranks.metrics(Counter.count, batch, factor=10) == {"count": 40.0}
    assert ranks.broadcast(Counter.ping) == ["PONG"] == [own_method(Louder(), Counter.ping)()]
    known, metrics = ranks.add_columns(("values",), Counter.values, batch)
    assert torch.equal(known.values, torch.arange(batch.num_tokens)) and not batch.has("values")  # type: ignore[arg-type]
    assert metrics == {"tokens": float(batch.num_tokens)}
