from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tool import ErrorKind
from agentrl.trainer import metrics as module
from agentrl.trainer.metrics import pass_at_k
from agentrl.trajectory import Status, ToolCallRecord, Trajectory
from tests.trainer.written import Writer, tool_trajectory


def step_metrics(trajectories: Sequence[Trajectory], *, turn_reward_coef: float = 1.0) -> dict[str, float]:
    return module.step_metrics([one.outline() for one in trajectories], turn_reward_coef=turn_reward_coef)


def validation_metrics(sampled: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> dict[str, float]:
    return module.validation_metrics([one.outline() for one in sampled], [one.outline() for one in greedy])


def total_reward(trajectory: Trajectory, coef: float = 1.0) -> float:
    return module.total_reward(trajectory.outline(), coef)


def scored(score: float | None, group: int = 0, source: str = "gsm8k") -> Trajectory:
    return Writer("p", group=group, source=source).says("a").ends(score)


def test_rewards_are_score_plus_weighted_turn_rewards() -> None:
    with_turn = Writer("p").says("a", reward=0.5).hears("b").says("c", reward=0.25).ends(1.0)
    metrics = step_metrics([with_turn, scored(0.0)], turn_reward_coef=2.0)
    assert total_reward(with_turn, 2.0) == 2.5
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (1.25, 0.0, 2.5)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(2 * 1.25**2))  # unbiased: divided by n - 1 = 1
    assert metrics["score/mean"] == 0.5


def test_success_is_a_score_of_one_and_unscored_trajectories_do_not_count() -> None:
    failed = Writer("p").ends(None, Status.FAILED, "EngineError: gone")
    metrics = step_metrics([scored(1.0), scored(0.1), scored(0.999), scored(1.0), failed])
    assert metrics["success/rate"] == 0.5
    assert metrics["reward/mean"] == pytest.approx((1 + 0.1 + 0.999 + 1) / 4)


def test_by_data_source() -> None:
    metrics = step_metrics([scored(1.0, source="a/b"), scored(0.0, source="a/b"), scored(1.0, source="c")])
    assert (metrics["reward/a/b/mean"], metrics["reward/c/mean"]) == (0.5, 1.0)
    assert (metrics["success/a/b"], metrics["success/c"]) == (0.5, 1.0)


def test_zero_variance_groups() -> None:
    metrics = step_metrics([scored(1.0, 0), scored(0.0, 0), scored(1.0, 1), scored(1.0, 1), scored(0.0, 2)])
    assert metrics["group/zero_variance"] == pytest.approx(2 / 3)


def test_scorer_extras_are_averaged_over_those_that_have_them() -> None:
    first, second = scored(1.0), scored(0.0)
    first.score_extra = {"f1": 0.5, "em": 1.0}
    second.score_extra = {"f1": 0.0}
    metrics = step_metrics([first, second])
    assert (metrics["score/f1"], metrics["score/em"]) == (0.25, 1.0)


def test_lengths_split_sampled_from_observed() -> None:
    one = Writer("1234").says("abc").hears("de").says("f").ends(1.0)
    two = Writer("12").says("abcdef").ends(0.0)
    metrics = step_metrics([one, two])
    assert (metrics["prompt/mean"], metrics["prompt/max"]) == (3, 4)
    assert (metrics["response/sampled_mean"], metrics["response/sampled_max"]) == (5, 6)
    assert (metrics["response/observed_mean"], metrics["response/observed_max"]) == (1, 2)
    assert (metrics["response/mean"], metrics["response/max"]) == (6, 6)
    assert (metrics["turns/mean"], metrics["turns/max"]) == (1.5, 2)


def test_tools_by_name_and_kind() -> None:
    calls = [
        ToolCallRecord("search", {"q": "x"}, "y", seconds=0.5),
        ToolCallRecord("search", {"q": 1}, "bad", error=ErrorKind.ARGUMENTS, seconds=0.1),
        ToolCallRecord("calculator", {}, "z", error=ErrorKind.TIMEOUT, seconds=2.0, truncated=True),
        ToolCallRecord("", None, "no JSON", error=ErrorKind.PARSE),
        ToolCallRecord("clculator", {}, "unknown", error=ErrorKind.UNKNOWN_TOOL),
    ]
    metrics = step_metrics([Writer("p").says("a", *calls).ends(0.0), scored(1.0)])
    assert (metrics["tool/calls_mean"], metrics["tool/calls_max"]) == (2.5, 5)
    assert metrics["tool/malformed_rate"] == pytest.approx(3 / 5)
    assert metrics["tool/error_rate"] == pytest.approx(4 / 5)
    assert metrics["tool/error/timeout"] == pytest.approx(1 / 5)
    assert metrics["tool/truncated_rate"] == pytest.approx(1 / 5)
    assert metrics["tool/seconds_mean"] == pytest.approx(2.6 / 5)
    assert metrics["tool/seconds_p99"] == 2.0
    assert (metrics["tool/search/calls"], metrics["tool/search/error_rate"]) == (2, 0.5)
    assert metrics["tool/search/seconds_mean"] == pytest.approx(0.3)
    assert not [name for name in metrics if "clculator" in name or name.startswith("tool//")]


def test_p99_is_the_smallest_value_that_99_percent_do_not_exceed() -> None:
    calls = [ToolCallRecord("t", {}, "", seconds=float(place)) for place in range(1, 201)]
    assert step_metrics([Writer("p").says("a", *calls).ends(0.0)])["tool/seconds_p99"] == 198.0


def test_endings_and_causes() -> None:
    failed = [Writer("p").ends(None, Status.FAILED, f"EngineError: request {n}") for n in range(2)]
    cut = Writer("p").says("a").ends(0.0, Status.LENGTH)
    metrics = step_metrics([*failed, cut, scored(1.0)])
    assert (metrics["status/failed"], metrics["status/length"], metrics["status/completed"]) == (0.5, 0.25, 0.25)
    assert metrics["failure/EngineError"] == 2
    assert metrics["status/timeout"] == 0.0  # every status has a number in every step


def test_what_loops_measured() -> None:
    first, second = scored(1.0), scored(0.0)
    first.metrics = {"retries": 2.0, "drift/clean": 1.0, "drift/fork": 0.0, "generate_seconds": 1.0}
    second.metrics = {"retries": 1.0, "generate_seconds": 3.0}
    metrics = step_metrics([first, second])
    assert metrics["trajectory/retries"] == 3.0
    assert (metrics["drift/clean"], metrics["drift/fork"]) == (1.0, 0.0)
    assert metrics["trajectory/generate_seconds"] == 2.0


def test_nothing_to_take_a_number_over() -> None:
    assert step_metrics([]) == {}
    assert validation_metrics([], []) == {}
    only_failed = step_metrics([Trajectory("u", 0, status=Status.FAILED, failure="ToolInfrastructureError: x")])
    assert only_failed["status/failed"] == 1.0
    assert "reward/mean" not in only_failed


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_fraction_of_subsets_with_a_success(case: tuple[int, int, int]) -> None:
    n, successes, k = case
    subsets = list(itertools.combinations([True] * successes + [False] * (n - successes), k))
    assert pass_at_k(n, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "successes", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0)])
def test_pass_at_k_refuses_what_makes_no_sense(n: int, successes: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass_at_k"):
        pass_at_k(n, successes, k)


def test_validation_by_source_and_k() -> None:
    by_prompt = [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.5]]
    sampled = [scored(score, group) for group, scores in enumerate(by_prompt) for score in scores]
    sampled.append(scored(1.0, 2, "other"))
    greedy = [scored(1.0, 0), scored(0.0, 1), scored(0.0, 2, "other")]
    metrics = validation_metrics(sampled, greedy)
    assert metrics["val/gsm8k/mean@4"] == pytest.approx(1 / 8)
    assert metrics["val/gsm8k/pass@1"] == pytest.approx(1 / 8)
    assert metrics["val/gsm8k/pass@2"] == pytest.approx((0.5 + 0) / 2)
    assert metrics["val/gsm8k/pass@4"] == pytest.approx(0.5)
    assert metrics["val/gsm8k/best@4"] == pytest.approx(0.75)
    assert (metrics["val/gsm8k/greedy"], metrics["val/other/greedy"]) == (0.5, 0.0)
    assert metrics["val/other/mean@1"] == 1.0
    assert metrics["val/success_sampled"] == pytest.approx(2 / 9)
    assert metrics["val/success_greedy"] == pytest.approx(1 / 3)
    assert metrics["val/reward_sampled"] == pytest.approx(2.5 / 9)


def test_validation_counts_failures_and_judges_the_rest() -> None:
    lost = Writer("p", group=0, source="gsm8k").ends(None, Status.FAILED, "EngineError: gone")
    metrics = validation_metrics([scored(1.0, 0), lost, scored(0.0, 1), scored(1.0, 1)], [])
    assert metrics["val/failed"] == 0.25
    assert metrics["val/gsm8k/mean@2"] == pytest.approx((1 + 0.5) / 2)
    assert metrics["val/gsm8k/pass@2"] == 1.0  # only the prompt that has two
    assert not [name for name in metrics if "greedy" in name]


def test_the_module_documents_every_name() -> None:
    """Names in the docstring's tables are what comes out (with <source> and so on filled in)."""
    from agentrl.trainer import metrics as module

    documented = module.__doc__ or ""
    trajectory = tool_trajectory()
    for name in step_metrics([trajectory]) | validation_metrics([trajectory], [trajectory]):
        stem = name.replace("quickstart/calculator", "<source>").replace("tool/calculator", "tool/<name>")
        stem = "status/<status>" if stem.startswith("status/") else stem.replace("@1", "@n").replace("pass@n", "pass@k")
        prefix, _, last = stem.rpartition("/")
        assert f"`{stem}`" in documented or f"`/{last}`" in documented, f"{name} (as {stem}) is not documented"
        assert prefix


def test_numbers_of_several_rollout_workers() -> None:
    """Counts are added up, a worker that never called a tool counts in no mean."""
    pytest.importorskip("ray")
    from agentrl.trainer.ray_rollouts import merged

    one = {"engine/servers_healthy": 2.0, "tool/search/retries": 3.0, "tool/search/queue_seconds_mean": 1.0}
    other = {"engine/servers_healthy": 1.0, "tool/search/fault/timeout": 1.0, "tool/search/queue_seconds_mean": 2.0}
    assert merged([one, other, {"engine/servers_healthy": 1.0}]) == {
        "engine/servers_healthy": 4.0,
        "tool/search/retries": 3.0,
        "tool/search/fault/timeout": 1.0,
        "tool/search/queue_seconds_mean": 1.5,
    }
