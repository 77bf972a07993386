from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms.advantages import estimator_columns
from agentrl.algorithms.groups import Groups
from agentrl.observe import metrics as module
from agentrl.reward.prompt_scores import pass_at_k
from agentrl.tool import ErrorKind
from agentrl.trajectory import Cause, Status, ToolAnswer, ToolCallRecord, Trajectory
from agentrl.trajectory.collate import from_trajectories
from tests.trajectory.written import Writer, tool_trajectory


def step_metrics(trajectories: Sequence[Trajectory], **keys: float) -> dict[str, float]:
    keys = {"turn_reward_coef": 1.0, "success_threshold": 1.0} | keys
    return module.step_metrics([one.outline() for one in trajectories], **keys)


def validation_metrics(
    sampled: Sequence[Trajectory], greedy: Sequence[Trajectory] = (), **keys: float
) -> dict[str, float]:
    keys = {"turn_reward_coef": 1.0, "success_threshold": 1.0} | keys
    return module.validation_metrics([one.outline() for one in sampled], [one.outline() for one in greedy], **keys)


def scored(score: float | None, group: int = 0, source: str = "gsm8k", **extra: float) -> Trajectory:
    trajectory = Writer("p", group=group, source=source).says("a").ends(score)
    trajectory.score_extra = extra
    return trajectory


def test_rewards_are_score_plus_weighted_turn_rewards() -> None:
    with_turn = Writer("p").says("a", reward=0.5).hears("b").says("c", reward=0.25).ends(1.0)
    metrics = step_metrics([with_turn, scored(0.0)], turn_reward_coef=2.0)
    assert with_turn.outline().reward(2.0) == 2.5
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (1.25, 0.0, 2.5)
    assert metrics["reward/std"] == pytest.approx(math.sqrt(2 * 1.25**2))  # unbiased: divided by n - 1 = 1
    assert metrics["score/mean"] == 0.5


def test_success_is_a_score_of_one_and_unscored_trajectories_do_not_count() -> None:
    failed = Writer("p").ends(None, Status.FAILED, "EngineError: gone")
    metrics = step_metrics([scored(1.0), scored(0.1), scored(0.999), scored(1.0), failed])
    assert metrics["success/rate"] == 0.5
    assert metrics["reward/mean"] == pytest.approx((1 + 0.1 + 0.999 + 1) / 4)


def test_what_is_not_trained_on_has_no_reward() -> None:
    """A trajectory that was cut before the policy wrote has a score, and nothing that could learn from it."""
    empty = Writer("p").ends(0.0, Status.LENGTH)
    metrics = step_metrics([scored(1.0), scored(1.0), empty])
    assert empty.outline().reward(1.0) is None
    assert (metrics["reward/mean"], metrics["reward/min"]) == (1.0, 1.0)
    assert metrics["score/mean"] == metrics["success/rate"] == pytest.approx(2 / 3)
    assert metrics["group/zero_variance"] == 1.0


def test_success_has_a_threshold() -> None:
    graded = [scored(0.7), scored(0.6), scored(0.9, 1), scored(0.1, 1)]
    assert step_metrics(graded, success_threshold=0.7)["success/rate"] == 0.5
    assert step_metrics(graded)["success/gsm8k"] == 0.0
    metrics = validation_metrics(graded, [scored(0.7)], success_threshold=0.7)
    assert (metrics["val/success_sampled"], metrics["val/success_greedy"]) == (0.5, 1.0)
    assert (metrics["val/gsm8k/pass@1"], metrics["val/gsm8k/pass@2"]) == (0.5, 1.0)
    assert metrics["val/gsm8k/mean@2"] == pytest.approx((0.65 + 0.5) / 2)
    harder = validation_metrics(graded, [scored(0.7)], success_threshold=0.95)
    assert harder["val/gsm8k/pass@2"] == harder["val/gsm8k/success_greedy"] == 0.0
    assert harder["val/gsm8k/mean@2"] == metrics["val/gsm8k/mean@2"], "what a score is worth is no matter of success"


def test_by_data_source() -> None:
    metrics = step_metrics([scored(1.0, source="a/b"), scored(0.0, source="a/b"), scored(1.0, source="c")])
    assert (metrics["reward/a/b/mean"], metrics["reward/c/mean"]) == (0.5, 1.0)
    assert (metrics["success/a/b"], metrics["success/c"]) == (0.5, 1.0)


def test_groups_without_variance_are_those_of_two_or_more_whose_rewards_are_equal() -> None:
    lost = Writer("p", group=2).ends(None, Status.FAILED, "EngineError: gone")
    pairs = [scored(1.0, 0), scored(0.0, 0), scored(0.1 + 0.2, 1), scored(0.3, 1)]  # equal up to rounding
    metrics = step_metrics([*pairs, scored(0.0, 2), lost, scored(1.0, 3)])
    assert metrics["group/zero_variance"] == 0.5
    assert "group/zero_variance" not in step_metrics([scored(0.0, 2), lost, scored(1.0, 3)])


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.3, 0.1 + 0.2, 1.0, None])), min_size=1))
def test_a_group_is_equal_to_the_metrics_where_it_is_to_the_estimators(written: list[tuple[int, float | None]]) -> None:
    trajectories = [scored(score, group) for group, score in written]
    batch = from_trajectories(trajectories, turn_reward_coef=1.0)
    batch = batch.with_fields(old_logprobs=batch.rollout_logprobs)
    groups = Groups.from_columns(estimator_columns(batch, n=2))
    compared = int((groups.size > 1).sum())
    metrics = step_metrics(trajectories)
    assert ("group/zero_variance" in metrics) == (compared > 0)
    if compared:
        assert metrics["group/zero_variance"] == int(groups.equal(groups.totals).sum()) / compared


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
        ToolCallRecord("search", {"q": "x"}, ToolAnswer("y", seconds=0.5)),
        ToolCallRecord("search", {"q": 1}, ToolAnswer("bad", error=ErrorKind.ARGUMENTS, seconds=0.1)),
        ToolCallRecord("calculator", {}, ToolAnswer("z", error=ErrorKind.TIMEOUT, seconds=2.0, truncated=True)),
        ToolCallRecord("", None, ToolAnswer("no JSON", error=ErrorKind.PARSE)),
        ToolCallRecord("clculator", {}, ToolAnswer("unknown", error=ErrorKind.UNKNOWN_TOOL)),
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
    calls = [ToolCallRecord("t", {}, ToolAnswer(seconds=float(place))) for place in range(1, 201)]
    assert step_metrics([Writer("p").says("a", *calls).ends(0.0)])["tool/seconds_p99"] == 198.0


def test_endings_and_causes() -> None:
    failed = [Writer("p").ends(None, Status.FAILED, f"request {n}: gone", "EngineError") for n in range(2)]
    cut = Writer("p").says("a").ends(0.0, Status.LENGTH)
    metrics = step_metrics([*failed, cut, scored(1.0)])
    assert (metrics["status/failed"], metrics["status/length"], metrics["status/completed"]) == (0.5, 0.25, 0.25)
    assert metrics["failure/EngineError"] == 2
    assert metrics["status/timeout"] == 0.0  # every status has a number in every step


def test_every_trajectory_without_a_score_has_a_cause() -> None:
    late = Writer("p").says("a").ends(None, Status.TIMEOUT, "60 s passed, waiting for: the engine", Cause.TIMEOUT)
    aborted = Writer("p").says("a").ends(None, Status.ABORTED)
    metrics = step_metrics([late, aborted, aborted, scored(1.0)])
    assert {name: value for name, value in metrics.items() if name.startswith("failure/")} == {
        "failure/timeout": 1.0,
        "failure/aborted": 2.0,
    }


def test_no_cause_is_read_out_of_a_message() -> None:
    of_a_loop = Writer("p").ends(None, Status.FAILED, "https://here: gone")
    assert step_metrics([of_a_loop, scored(1.0)])["failure/failed"] == 1


def test_calls_and_turns_are_taken_over_the_same_trajectories() -> None:
    unbegun = Trajectory("u", 0, status=Status.TIMEOUT, failure="timeout: 1 s passed waiting for start")
    metrics = step_metrics([Writer("p").says("a", ToolCallRecord("t", {})).ends(0.0), unbegun])
    assert metrics["tool/calls_mean"] == metrics["turns/mean"] == 1.0


def test_what_others_name_cannot_take_a_names_place() -> None:
    """Scorers name their numbers and rows their data sources as they like."""
    metrics = step_metrics([scored(0.25, source="rate", mean=7.0), scored(0.75, source="rate", mean=9.0), scored(1.0)])
    assert metrics["score/mean"] == pytest.approx(2 / 3)
    assert metrics["success/rate"] == pytest.approx(1 / 3)


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
    greedy = [scored(1.0, 0), scored(0.1, 1), scored(0.25, 2, "other")]
    metrics = validation_metrics(sampled, greedy)
    assert metrics["val/gsm8k/mean@4"] == pytest.approx((1 / 4 + 0.5 / 4) / 2)
    assert metrics["val/gsm8k/pass@1"] == pytest.approx(1 / 8)
    assert metrics["val/gsm8k/pass@2"] == pytest.approx((0.5 + 0) / 2)
    assert metrics["val/gsm8k/pass@4"] == pytest.approx(0.5)
    assert metrics["val/gsm8k/best@4"] == pytest.approx(0.75)
    assert (metrics["val/gsm8k/greedy"], metrics["val/other/greedy"]) == (0.55, 0.25)
    assert (metrics["val/gsm8k/success_greedy"], metrics["val/other/success_greedy"]) == (0.5, 0.0)
    assert metrics["val/other/mean@1"] == 1.0
    assert metrics["val/success_sampled"] == pytest.approx(2 / 9)
    assert metrics["val/success_greedy"] == pytest.approx(1 / 3)
    assert metrics["val/score_sampled"] == metrics["val/reward_sampled"] == pytest.approx(2.5 / 9)
    assert metrics["val/score_greedy"] == pytest.approx(1.35 / 3)


def test_validation_shows_what_scorers_say_beside_the_score() -> None:
    sampled = [scored(0.0, 0, f1=0.5), scored(0.0, 0, f1=0.25), scored(1.0, 1, f1=1.0), scored(1.0, 2, "other", em=1.0)]
    metrics = validation_metrics(sampled, [scored(0.0, 0, f1=0.2), scored(0.0, 1)])
    assert metrics["val/gsm8k/f1/mean@2"] == pytest.approx((0.375 + 1.0) / 2)
    assert metrics["val/other/em/mean@1"] == 1.0
    assert metrics["val/gsm8k/f1/greedy"] == 0.2
    assert not [name for name in metrics if "other/f1" in name or "gsm8k/em" in name]


def test_validation_counts_failures_and_judges_the_rest() -> None:
    lost = Writer("p", group=0, source="gsm8k").ends(None, Status.FAILED, "EngineError: gone")
    metrics = validation_metrics([scored(0.5, 0), lost, scored(0.0, 1), scored(1.0, 1)])
    assert metrics["val/failed"] == 0.25
    assert metrics["val/gsm8k/mean@2"] == 0.5
    assert metrics["val/gsm8k/pass@2"] == metrics["val/gsm8k/best@2"] == 1.0  # only the prompt that has two
    assert not [name for name in metrics if "greedy" in name]
    alone = validation_metrics([scored(1.0, 0), lost])
    assert alone["val/gsm8k/mean@2"] == 1.0
    assert "val/gsm8k/best@2" not in alone, "the best of one is not the best of two"


def table() -> list[str]:
    """Every name of the module's tables, in full, as a pattern."""
    patterns = []
    for cell in re.findall(r"^\| (`.*?) \|", module.__doc__ or "", re.MULTILINE):
        first, *others = re.findall(r"`(.+?)`", cell)
        stem = first.rpartition("/")[0]
        for name in (first, *(stem + other if other.startswith("/") else other for other in others)):
            pattern = re.escape(name).replace("@n", r"@\d+").replace("@k", r"@\d+")
            patterns.append(re.sub(r"<\w+>", "[^/]+", pattern))
    return patterns


def test_each_name_is_defined_once() -> None:
    """What comes out matches one line of the tables, and no line is there twice."""
    patterns = table()
    assert len(patterns) == len(set(patterns)) > 50
    whole = tool_trajectory()
    whole.data_source, whole.score_extra = "words", {"f1": 0.5}
    whole.metrics = {"retries": 1.0, "drift/fork": 0.5, "tool_seconds": 1.0}
    whole.tool_calls[0].answer = ToolAnswer(error=ErrorKind.TIMEOUT)
    failed = Writer("p", source="words").ends(None, Status.FAILED, "EngineError: gone")
    for name in step_metrics([whole, whole, failed]) | validation_metrics([whole], [whole]):
        literal = re.escape(name) in patterns
        fitting = [pattern for pattern in patterns if re.fullmatch(pattern, name)]
        assert literal or len(fitting) == 1, f"{name} is defined by {fitting or 'nothing'}"
