"""What the source of trajectories keeps to at every bound, 0 included."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.agent_loop.base import Episode
from agentrl.errors import CodeError, TrainingError
from agentrl.rollouts.local import LocalRollouts
from agentrl.rollouts.prompts import Prompts
from agentrl.rollouts.staleness_scheduler import PromptStatus
from tests.rollouts.test_async_source import (
    B,
    Bench,
    N,
    Opened,
    assert_each_once,
    config,
    opened,
    rarely,
    teaches_nothing,
    uneven,
)

__all__ = ["config", "opened"]  # fixtures
pytestmark = pytest.mark.slice(9, "matrix")
STEPS = 4


def assert_nothing_is_left(bench: Bench) -> None:
    """Nothing runs, and each prompt that was begun has one status."""
    source = bench.source
    assert not source._running and not bench.rollouts.scheduler.running and source.schedule.groups == ()
    assert not bench.rollouts._ended, "nor are trajectories kept"
    assert source.record.ledger.counts.total() == source.schedule.next_ordinal == source.record.ledger.before


@pytest.mark.parametrize("bound", [0, 1, 2])
class TestSource:
    def test_each_group_is_trained_once_or_cancelled_once(self, opened: Opened, bound: int) -> None:
        with opened(bound, bound, steps=STEPS + 2) as bench:
            for step in range(1, STEPS + 1):
                bench.step(step)
                begun = bench.source.schedule.next_ordinal
                assert begun > step * B if bound else begun == step * B, "with 0 nothing is admitted ahead"
            bench.source.next_batch(STEPS + 1)
            bench.source.close()
            assert_nothing_is_left(bench)
            counts = bench.source.record.ledger.counts
        assert counts[PromptStatus.TRAINED] == (STEPS + 1) * B
        assert counts[PromptStatus.CANCELLED] == counts.total() - counts[PromptStatus.TRAINED] == (B if bound else 0)
        prompts = [uid.rsplit("/", 1)[0] for uids in bench.uids for uid in uids[::N]]
        assert len(set(prompts)) == len(prompts) == STEPS * B
        assert max(map(max, bench.staleness())) <= bound

    def test_a_run_that_resumes_takes_each_prompt_once(self, opened: Opened, bound: int, tmp_path: Path) -> None:
        with opened(bound, bound) as bench:
            for step in (1, 2):
                bench.step(step)
            state = {"step": 2, "version": 2, **bench.source.state()}
            bench.source.saved()
        with opened(bound, bound) as resumed:
            resumed.goes_on(state, 2)
            for step in range(3, 7):
                resumed.step(step)
        assert_each_once(bench.uids + resumed.uids, 6)

    def test_dynamic_sampling_fills_a_batch_with_groups_that_teach(self, opened: Opened, bound: int) -> None:
        with opened(bound, bound, refill=99, scorer=rarely) as bench:
            for step in range(1, 4):
                bench.step(step)
            counts = bench.source.record.ledger.counts
        assert counts[PromptStatus.TRAINED] >= 3 * B and counts[PromptStatus.FILTERED]
        for batch in bench.batches:
            rewards: dict[int, set[float]] = {}
            for row, group in enumerate(batch.group.tolist()):
                tokens = slice(*batch.offsets[row : row + 2].tolist())
                rewards.setdefault(group, set()).add(float(batch.rewards[tokens].sum()))
            assert len(rewards) == B and all(len(one) == N for one in rewards.values())

    def test_where_no_group_teaches_it_says_why(self, opened: Opened, bound: int) -> None:
        with opened(bound, bound, refill=2, scorer=teaches_nothing) as bench:
            with pytest.raises(TrainingError, match=r"step 1: \d groups were replaced .* 0 of the 3 .* too hard or"):
                bench.step(1)
            assert_nothing_is_left(bench)

    @pytest.mark.parametrize("place", ["loop", "data", "packing"])
    def test_an_error_at_any_place_ends_all(
        self, opened: Opened, bound: int, place: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Injected in step 2."""

        async def careless(episode: Episode) -> None:
            if place == "loop" and episode.trajectory.uid == "train/2/1/0":
                raise KeyError("injected")
            await uneven(episode)

        def full(*given: object, **more: object) -> None:
            raise TrainingError("injected")

        with opened(bound, bound, loop=careless) as bench:
            with pytest.raises((CodeError, TrainingError), match="injected"):
                for step in range(1, 5):
                    bench.step(step)
                    if place == "data":
                        monkeypatch.setattr(Prompts, "draw_to", full)
                    if place == "packing":
                        monkeypatch.setattr(LocalRollouts, "pack_groups", full)
            assert_nothing_is_left(bench)
