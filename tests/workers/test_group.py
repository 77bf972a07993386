"""Handing a batch out to ranks and putting the results together."""

from __future__ import annotations

import pytest
import torch

from agentrl.workers.group import LocalWorkerGroup, join, reduce_metrics, shares
from tests.workers.conftest import BatchMaker


@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
def test_shares_join_to_what_one_worker_gives(make_batch: BatchMaker, ranks: int) -> None:
    batch = make_batch(prompts=4, n=3)

    def worker(part_ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, float], None]:
        return part_ids * 2.0, {"metric": 3.5}, None

    parts = shares(batch.lengths.tolist(), ranks)
    results = [worker(batch.select(part).ids) for part in parts]
    joined, metrics, nothing = join(results, parts, batch)
    assert torch.equal(joined, batch.ids * 2.0)
    assert metrics == {"metric": 3.5}
    assert nothing is None


def test_shares_are_balanced_by_tokens() -> None:
    assert shares([10, 1, 1, 1, 9, 2], 2) == [[0, 1, 2], [3, 4, 5]]


def test_a_result_of_the_wrong_length_is_refused(make_batch: BatchMaker) -> None:
    batch = make_batch(prompts=2, n=1)
    with pytest.raises(ValueError, match="entries were returned for a share of"):
        join([batch.ids[:3]], [[0, 1]], batch)


def test_metrics_are_averaged_over_ranks() -> None:
    assert reduce_metrics([{"loss": 2.0, "seconds": 1.0}, {"loss": 2.0, "seconds": 3.0}]) == {
        "loss": 2.0,
        "seconds": 2.0,
    }


def test_local_group_calls_its_worker(make_batch: BatchMaker) -> None:
    class Recorder:
        def count(self, batch: object, *, factor: int) -> int:
            return len(batch) * factor  # type: ignore[arg-type]

        def ping(self) -> str:
            return "pong"

    group = LocalWorkerGroup(Recorder())
    assert group.run("count", make_batch(prompts=2, n=2), factor=10) == 40
    assert group.run("ping") == "pong"
