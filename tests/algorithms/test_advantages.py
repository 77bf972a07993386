"""Advantages in cases small enough to work out by hand, beside those of test_reference, and what all of them share."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.advantages import (
    compute_advantages,
    group_counts,
    zero_advantage_sequences,
)
from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.estimate import Settings, estimate
from agentrl.algorithms.estimators import decoupled_gae
from agentrl.algorithms.groups import all_equal
from agentrl.config.declaration import declaration_of
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.config.sections.algorithm import AlgorithmConfig
from agentrl.errors import CodeError, TrainingError
from agentrl.system.throttle import ThrottledWarnings
from agentrl.trajectory.batch import RaggedBatch
from tests.algorithms.batches import Row, algorithm, batch_of, batches, suited
from tests.naming import naming

GROUP_ESTIMATORS = [
    name for name in ADVANTAGE_ESTIMATORS.names() if declaration_of(ADVANTAGE_ESTIMATORS.get(name)).compares_group
]
LEAST = {"online_dpo": 0.04}
"""Least advantage of the better of two trajectories, where it is not 0.1: a pair's weight is beta / 2 or less."""
KNOW_PROMPTS = {
    *GROUP_ESTIMATORS,
    "reinforce_plus_plus_baseline",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "gigpo",
    "gdpo",
}
"""These compare the trajectories of a prompt; those that are no GROUP_ESTIMATORS also where their rewards are equal."""
N = 4
"""Trajectories asked for of each prompt; the groups here may have fewer, as if some had failed, or more."""


def advantages(batch: RaggedBatch, estimator: str, n: int = N, **keys: object) -> list[list[float]]:
    """By sequence, the advantages of its policy tokens; checks that the others have none."""
    result = compute_advantages(batch, algorithm(estimator, **keys), n)
    assert result.advantages is not None and result.returns is not None
    assert result.advantages.dtype == result.returns.dtype == torch.float32
    assert not result.advantages[~batch.mask].any() and not result.returns[~batch.mask].any()
    return by_sequence(result, result.advantages)


def returns(batch: RaggedBatch, estimator: str, **keys: object) -> list[list[float]]:
    result = compute_advantages(batch, algorithm(estimator, **keys), N)
    assert result.returns is not None
    return by_sequence(result, result.returns)


def by_sequence(batch: RaggedBatch, values: torch.Tensor) -> list[list[float]]:
    bounds = batch.offsets.tolist()
    return [values[start:end][batch.mask[start:end]].tolist() for start, end in pairwise(bounds)]


def outcome(*scores: float, groups: list[int] | None = None) -> RaggedBatch:
    """One sequence of two policy tokens and a trailing tool token a score."""
    return batch_of(*(Row("0110", {2: score}, groups[i] if groups else 0) for i, score in enumerate(scores)))


def approx(*rows: list[float]) -> list[object]:
    return [pytest.approx(row, rel=1e-5, abs=1e-7) for row in rows]


def test_online_dpo_pairs_the_best_with_the_worst() -> None:
    # Two policy tokens each, one of them in another sequence of the same trajectory. The log-ratios to the reference
    # are 0.2 + 0.4 for the best and -0.5 for the worst, and what stands beside tool tokens does not count.
    batch = batch_of(
        Row("010", {1: 1.0}, trajectory=0), Row("01", trajectory=0), Row("01", {1: 0.5}), Row("010", {1: -1.0})
    )
    batch = batch.with_fields(old_logprobs=torch.tensor([9.0, 0.2, 9, 9, 0.4, 9, 3.0, 9, -0.5, 9]))
    batch = batch.with_fields(ref_logprobs=torch.zeros(10))
    weight = 0.1 / (1 + math.exp(0.1 * 1.1))
    assert advantages(batch, "online_dpo") == approx([weight], [weight], [0], [-weight])
    squared = {"loss": "sppo", "loss_options": {"beta": 0.5}}  # (0.6 - 1)^2 + (-0.5 + 1)^2
    assert advantages(batch, "online_dpo", adv_options=squared) == approx([0.8], [0.8], [0], [-1.0])


def test_several_best_or_worst_make_all_their_pairs() -> None:
    # Equal log-probs: each pair weighs 0.05, of the best ones each is in half of the pairs.
    found = advantages(outcome(1, 0, 1), "online_dpo")
    assert found == approx([0.025, 0.025], [-0.05, -0.05], [0.025, 0.025])


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_one_trajectory_a_prompt_has_mean_0_and_std_1(estimator: str) -> None:
    found = advantages(outcome(0.7, 2, groups=[5, 2]), estimator, n=1)
    assert found == (approx([0, 0], [0, 0]) if estimator == "online_dpo" else approx([0.7, 0.7], [2, 2]))


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_lone_survivor_teaches_nothing(estimator: str) -> None:
    # Of the trajectories of prompt 5 all but one failed; its raw reward would be an advantage of 100.
    batch = outcome(100, 0, 1, groups=[5, 2, 2])
    for by_std in (True, False):
        found = advantages(batch, estimator, norm_adv_by_std_in_grpo=by_std)
        assert found[0] == [0.0, 0.0]
        assert found[1][0] <= 0 < LEAST.get(estimator, 0.1) < found[2][0]
    assert group_counts(batch, N)["groups_of_one"] == 1


@settings(max_examples=60, deadline=None)
@given(estimator=st.sampled_from(ADVANTAGE_ESTIMATORS.names()), batch=batches(), n=st.integers(2, 8))
def test_only_what_can_be_compared_teaches(estimator: str, batch: RaggedBatch, n: int) -> None:
    """An estimator compares the trajectories of a prompt, and a lone survivor teaches nothing; or knows no prompts."""
    batch, config = suited(batch, estimator), algorithm(estimator, gamma=0.9, lam=0.8)
    found = compute_advantages(batch, config, n).advantages
    assert found is not None
    if estimator not in KNOW_PROMPTS:
        apart = compute_advantages(batch.with_fields(group=torch.arange(len(batch.group))), config, n).advantages
        assert apart is not None and torch.equal(apart, found)
        return
    members = torch.zeros(3, dtype=torch.int64)
    for trajectory in batch.trajectory.unique():
        members[batch.group[batch.trajectory == trajectory][0]] += 1
    lone = (members[batch.group] == 1)[batch.sequence_ids()]
    assert not found[lone].any()
    rest = [row for row, group in enumerate(batch.group.tolist()) if members[group] > 1]
    others = compute_advantages(batch.select(rest), config, n).advantages
    assert others is not None, "nor does it change what others teach"
    torch.testing.assert_close(others, found[~lone], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_equal_rewards_give_exactly_nothing(estimator: str) -> None:
    # The mean of three times 0.1 is not 0.1 in floating point; over 1e-6 the difference would be an advantage.
    batch = outcome(0.1, 0.1, 0.1, 1, 0, groups=[0, 0, 0, 1, 1])
    found = advantages(batch, estimator)
    assert found[:3] == [[0.0, 0.0]] * 3
    assert found[3][0] > LEAST.get(estimator, 0.1), "the best of its group"


def test_equal_up_to_the_rounding_of_a_sum_is_equal() -> None:
    # 0.1 + 0.2 and 0.3 differ in the last digit.
    batch = batch_of(Row("0111", {1: 0.1, 2: 0.2}), Row("0111", {3: 0.3}))
    assert batch.rewards[1].double() + batch.rewards[2].double() != batch.rewards[7].double()
    assert advantages(batch, "grpo") == [[0.0] * 3] * 2


@pytest.mark.parametrize("estimator", GROUP_ESTIMATORS)
def test_a_score_that_the_rewards_of_turns_cancel_is_equal_to_none(estimator: str) -> None:
    cancelled = Row("01111", {1: -0.1, 2: -0.1, 3: -0.1, 4: 0.3})
    batch = batch_of(cancelled, Row("01111", {4: 0.0}))
    assert sum(batch.rewards[:5].double().tolist()) != 0
    assert advantages(batch, estimator) == [[0.0] * 4] * 2
    assert all_equal([0.3 - 0.1 - 0.1 - 0.1, 0.0]) and not all_equal([1e-6, 0.0])


def test_groups_need_not_stand_together() -> None:
    found = advantages(outcome(0, 10, 2, 30, groups=[7, 3, 7, 3]), "grpo", norm_adv_by_std_in_grpo=False)
    assert found == approx([-1, -1], [-10, -10], [1, 1], [10, 10])


def test_a_trajectory_of_two_sequences_counts_once() -> None:
    # By sequence the scores would be 0, 1, 0 with mean 1/3; by trajectory they are 1, 0.
    batch = batch_of(Row("011", trajectory=4), Row("01", {1: 1.0}, trajectory=4), Row("01", trajectory=9))
    half = math.sqrt(0.5)
    assert advantages(batch, "grpo") == approx([half, half], [half], [-half])
    assert advantages(batch, "rloo") == approx([1, 1], [1], [-1])
    # 3 policy tokens with reward 1 and 1 with reward 0.
    assert advantages(batch, "opo") == approx([0.25, 0.25], [0.25], [-0.75])


def test_a_lone_survivor_takes_no_part_in_whitening() -> None:
    batch = batch_of(Row("01"), Row("01", {1: 2.0}), Row("0111", {1: 50.0}, 1))
    half = math.sqrt(0.5)
    assert advantages(batch, "reinforce_plus_plus_baseline") == approx([-half], [half], [0, 0, 0])


def test_gpg_makes_up_for_groups_that_teach_nothing() -> None:
    # Two of six trajectories are of an equal group, and one of a lone survivor: alpha = 5 / 3.
    batch = outcome(1, 0, 0, 1, 1, 1, groups=[0, 0, 0, 1, 1, 2])
    up, down = 5 / 3 * 2 / 3, -5 / 3 / 3
    assert advantages(batch, "gpg") == approx([up] * 2, [down] * 2, [down] * 2, [0, 0], [0, 0], [0, 0])


def test_grpo_passk_teaches_the_best_of_a_group_alone() -> None:
    # std([0.2, 1, 0.5]) = 0.404; two equal best ones would do without each other.
    batch = outcome(0.2, 1, 0.5, 1, 1, 0, groups=[0, 0, 0, 1, 1, 1])
    found = advantages(batch, "grpo_passk", norm_adv_by_std_in_grpo=False)
    assert found == approx([0, 0], [0.5, 0.5], [0, 0], [0, 0], [0, 0], [0, 0])
    assert advantages(batch, "grpo_passk")[1] == pytest.approx([0.5 / 0.404145] * 2, rel=1e-5)


def test_maxrl_divides_by_the_share_of_successes() -> None:
    # One of four: (1 - 1/4) / (1/4) = 3, and -1 for the others; a group without success teaches nothing.
    batch = outcome(1, 0, 0, 0, 0, 0, groups=[0, 0, 0, 0, 1, 1])
    assert advantages(batch, "maxrl") == approx([3, 3], *[[-1.0, -1.0]] * 3, [0, 0], [0, 0])
    with pytest.raises(TrainingError, match=r"maxrl divides .* found -0\.5"):
        advantages(outcome(1, -0.5), "maxrl")


def test_the_optimal_token_baseline_weighs_by_the_energy_of_the_gradient() -> None:
    # p = 1 and sum p^2 = 0.5 (batch_of): w = 1 - 2 + 0.5 < 0 would be no energy, so p is 0.5 and w = 0.5 here.
    batch = batch_of(Row("0101", {1: 0.5, 3: 1.0}), Row("011", {2: 0.0}), Row("01", {1: 1.0}))
    batch = batch.with_fields(old_logprobs=torch.full((batch.num_tokens,), math.log(0.5)))
    batch = batch.with_fields(squared_probs=torch.where(batch.sequence_ids() == 2, 1.5, 0.5))
    # t = 1: G = 1.5, 0, 1 and W = 0.5, 0.5, 1.5: B = (0.75 + 1.5) / 2.5 = 0.9.  t = 2: G = 1, 0 and W = 1, 1: B = 0.5.
    found = advantages(batch, "optimal_token_baseline")
    assert found == approx([0.6, 0.5], [-0.9, -0.5], [0.1])
    assert returns(batch, "optimal_token_baseline") == approx([1.5, 1], [0, 0], [1])
    # Tokens of the first weigh 2, the square is a factor: W = 2, 0.5, 1.5, B = (3 + 1.5) / 4; then W = 4, 1, B = 0.8.
    batch = batch.with_fields(correction=torch.where(batch.sequence_ids() == 0, 2.0, 1.0))
    found = advantages(batch, "optimal_token_baseline")
    assert found == approx([0.375, 0.2], [-1.125, -0.8], [-0.125])


def test_remax_compares_with_the_greedy_trajectory_of_the_prompt() -> None:
    # Rewards to go: 0.5 + 1 and 1, less 0.2; 0.1 as float32 is not 0.1 and equal all the same; NaN: it failed.
    batch = batch_of(Row("01001", {1: 0.5, 4: 1.0}), Row("01", {1: 0.1}, 1), Row("011", {2: 1.0}, 2))
    batch = batch.with_fields(greedy_rewards=torch.tensor([0.2, 0.1, math.nan]))
    assert advantages(batch, "remax", n=1) == [pytest.approx([1.3, 0.8]), [0.0], [0.0, 0.0]]
    assert returns(batch, "remax") == approx([1.5, 1], [0.1], [1, 1])


def test_gigpo_compares_turns_that_were_taken_in_the_same_state() -> None:
    # Both begin in state 7; the first goes by 8 and is right, the second stays in 7, then gives up in 9.
    batch = batch_of(Row("01101", {4: 1.0}), Row("010101"))
    batch = batch.with_fields(state=torch.tensor([-1, 7, 7, -1, 8, -1, 7, -1, 7, -1, 9]))
    options = {"step_gamma": 0.5, "step_advantage_w": 2.0}
    found = advantages(batch, "gigpo", norm_adv_by_std_in_grpo=False, adv_options=options)
    # Trajectories: 0.5 and -0.5. State 7: rewards to go of 0.5, 0 and 0, mean 1/6. States 8 and 9 are met once.
    own, other = 2 * (0.5 - 1 / 6), 2 * (0 - 1 / 6)
    assert found == approx([0.5 + own] * 2 + [0.5], [-0.5 + other, -0.5 + other, -0.5])
    half, deviation = math.sqrt(0.5), math.sqrt(((1 / 3) ** 2 + 2 * (1 / 6) ** 2) / 2)
    found = advantages(batch, "gigpo", adv_options=options)
    assert found[0] == pytest.approx([half + own / deviation] * 2 + [half], rel=1e-5)
    # Over turns, two of reward 1 and three of 0: mean 2/5, deviation sqrt(0.3).
    options["over_turns"] = True
    found = advantages(batch, "gigpo", norm_adv_by_std_in_grpo=False, adv_options=options)
    assert found == approx([0.6 + own] * 2 + [0.6], [-0.4 + other, -0.4 + other, -0.4])
    found = advantages(batch, "gigpo", adv_options=options)
    assert found[0][2] == pytest.approx(0.6 / math.sqrt(0.3), rel=1e-5)
    assert advantages(batch_of(Row("0101", {3: 1.0})), "gigpo", adv_options=options) == [[0.0, 0.0]], "a lone survivor"


def test_gigpo_compares_states_of_one_prompt_only() -> None:
    batch = batch_of(*(Row("01", {1: score}, group) for score, group in ((1.0, 0), (0.0, 0), (1.0, 1), (1.0, 1))))
    found = advantages(batch, "gigpo", norm_adv_by_std_in_grpo=False)
    assert found == approx([1.0], [-1.0], [0], [0])


@pytest.mark.parametrize(("alone", "expected"), [(True, 1.0), (False, 0.0)])
def test_the_tail_of_the_longest_trajectory_has_nothing_to_be_compared_with(alone: bool, expected: float) -> None:
    batch = batch_of(Row("011", {2: 1.0}), Row("01"))
    batch = batch.with_fields(old_logprobs=torch.full((batch.num_tokens,), math.log(0.5)))
    found = advantages(batch, "optimal_token_baseline", adv_options={"handle_zero_tail": alone})
    assert found == [pytest.approx([0.5, expected], abs=1e-6), pytest.approx([-0.5])]


def test_gae_ends_with_a_trajectory_and_goes_on_through_its_sequences() -> None:
    values = [0.0, 0.0]
    apart = batch_of(Row("01", values=values, trajectory=0), Row("01", {1: 1.0}, values=values, trajectory=1))
    assert returns(apart, "gae") == approx([0], [1])
    together = batch_of(
        Row("01", values=values, trajectory=0),
        Row("01", trajectory=1),
        Row("01", {1: 1.0}, values=values, trajectory=0),
    )
    assert returns(together, "gae") == approx([1], [0], [1])


def test_gae_of_one_token_is_no_nan() -> None:
    batch = batch_of(Row("01", {1: 1.0}))
    assert advantages(batch, "gae") == [[0.0]]
    assert advantages(batch, "reinforce_plus_plus") == [[0.0]]


def test_grpo_turn_credits_a_turn_with_what_comes_after() -> None:
    # G = (1.5, 1) and (1, 1); c = (0.25, 0) and (-0.25, 0); s^2 = 0.25^2 / 2 + 0.25^2 / 2 = 0.25^2.
    batch = batch_of(Row("0110010", {2: 0.5, 5: 1.0}), Row("010011", {5: 1.0}))
    assert advantages(batch, "grpo_turn") == approx([1, 1, 0], [-1, 0, 0])
    found = advantages(batch, "grpo_turn", norm_adv_by_std_in_grpo=False)
    assert found == approx([0.25, 0.25, 0], [-0.25, 0, 0])


def test_grpo_turn_compares_with_the_last_turn_of_a_trajectory_that_has_ended() -> None:
    # A malformed call costs 0.1 and a third turn: G = (0.9, 0.9, 1) against (1, 1, and 1 again for the turn not taken).
    batch = batch_of(Row("0101010", {3: -0.1, 5: 1.0}), Row("01010", {3: 1.0}))
    found = advantages(batch, "grpo_turn", norm_adv_by_std_in_grpo=False)
    assert found == approx([-0.05, -0.05, 0], [0.05, 0.05])


def test_grpo_turn_is_grpo_when_rewards_come_at_the_end() -> None:
    rows = [Row("0101011", {6: 1.0}), Row("011", {2: 0.2}), Row("01010", {3: 0.0}), Row("01", {1: 0.6}, group=1)]
    assert advantages(batch_of(*rows), "grpo_turn") == approx(*advantages(batch_of(*rows), "grpo"))


def test_grpo_turn_tells_turns_apart_by_the_record() -> None:
    """Two assistant turns without a token between them, and two transcripts whose turns take turns."""
    batch = batch_of(Row("0110", {1: 1.0}), Row("0110"))
    batch = batch.with_fields(turn=torch.tensor([-1, 0, 1, -1] * 2, dtype=torch.int32))
    found = advantages(batch, "grpo_turn", norm_adv_by_std_in_grpo=False)
    assert found == approx([0.5, 0], [-0.5, 0])
    # Turns 0 and 2 are in the first transcript, turn 1 in the second: the reward of turn 1 is not turn 2's.
    rows = [Row("01010", trajectory=0), Row("01", {1: 1.0}, trajectory=0)]
    batch = batch_of(*rows, Row("01010", trajectory=1), Row("01", trajectory=1))
    batch = batch.with_fields(turn=torch.tensor([-1, 0, -1, 2, -1, -1, 1] * 2, dtype=torch.int32))
    found = advantages(batch, "grpo_turn", norm_adv_by_std_in_grpo=False)
    assert found == approx([0.5, 0], [0.5], [-0.5, 0], [-0.5])


def test_grpo_turn_rewards_no_turn_of_equal_trajectories() -> None:
    # Every turn earns the same, so none is better than another, early or late.
    row = Row("0101010", {1: 0.1, 3: 0.1, 5: 1.1})
    assert advantages(batch_of(row, row, row), "grpo_turn") == [[0.0] * 3] * 3


def test_grpo_turn_goes_on_through_the_sequences_of_a_trajectory() -> None:
    batch = batch_of(Row("01", trajectory=0), Row("01", {1: 1.0}, trajectory=0), Row("0101", trajectory=1))
    found = advantages(batch, "grpo_turn", norm_adv_by_std_in_grpo=False)
    assert found == approx([0.5], [0.5], [-0.5, -0.5])


def test_gdpo_normalises_each_reward_apart() -> None:
    # right: (2, -1, -1) / 3 over a deviation of 1 / sqrt(3); form: the second one alone. With half the weight for form
    # the sums are 0.866, 0 and -0.866, whose deviation is 0.866.
    batch = batch_of(Row("01"), Row("01"), Row("01"))
    form, nothing = torch.tensor([0.0, 1.0, 0.0]), math.nan
    batch = batch.with_fields(**{"score/right": torch.tensor([1.0, 0.0, 0.0]), "score/form": form})
    options = {"reward_keys": ["right", "form"], "reward_weights": [1.0, 0.5]}
    found = compute_advantages(batch, algorithm("gdpo", adv_options=options), 3)
    assert found.advantages is not None
    assert by_sequence(found, found.advantages) == approx([1], [0], [-1])
    # As one reward the second would be worth half of the first, and better than the third by the same.
    with naming(TrainingError, "'form'"):
        without = batch.with_fields(**{"score/form": torch.tensor([0.0, 1.0, nothing])})
        compute_advantages(without, algorithm("gdpo", adv_options=options), 3)


def test_gdpo_of_the_whole_reward_is_grpo_whitened() -> None:
    batch = outcome(1, 0, 0, 3, groups=[0, 0, 1, 1])
    half, eight = math.sqrt(0.5), [1.0, -1.0, -1.0, 1.0]
    deviation = math.sqrt(sum(half**2 for _ in range(8)) / 7)
    assert advantages(batch, "gdpo") == approx(*([sign * half / deviation] * 2 for sign in eight))


def test_bi_level_gae_estimates_turns_then_tokens() -> None:
    # d_2 = 1 - 0.4 = A_2; d_1 = 0.5 + 0.9 * 0.4 - 0.2 = 0.66 and A_1 = 0.66 + 0.9 * 0.5 * 0.6 = 0.93.
    # First tokens: 0.5 * 0.2 - 0.1 = 0 and 0.25 * 0.93; 0.5 * 0.4 - 0.3 = -0.1, and -0.1 + 0.25 * 0.6 = 0.05.
    batch = batch_of(Row("011011", {2: 0.5, 5: 1.0}, values=[9, 0.1, 0.2, 7, 0.3, 0.4]))
    options = {"turn_gamma": 0.9, "turn_lam": 0.5}
    raw = [0.2325, 0.93, 0.05, 0.6]
    found = returns(batch, "bi_level_gae", gamma=0.5, lam=0.5, adv_options=options)
    assert found == approx([value + own for value, own in zip((0.1, 0.2, 0.3, 0.4), raw, strict=True)])
    mean = sum(raw) / 4
    deviation = math.sqrt(sum((x - mean) ** 2 for x in raw) / 3)
    found = advantages(batch, "bi_level_gae", gamma=0.5, lam=0.5, adv_options=options)
    assert found == approx([(x - mean) / deviation for x in raw])


def test_bi_level_gae_of_one_turn_is_gae_and_goes_on_through_sequences() -> None:
    keys: dict[str, Any] = {"gamma": 0.9, "lam": 0.8}
    one = batch_of(Row("01110", {1: -0.1, 3: 1.0}, values=[9, 0.1, 0.5, 0.2, 9]), Row("011", {2: 0.3}))
    assert advantages(one, "bi_level_gae", **keys) == approx(*advantages(one, "gae", **keys))
    together = batch_of(Row("01", trajectory=0), Row("01", trajectory=1), Row("01", {1: 1.0}, trajectory=0))
    assert returns(together, "bi_level_gae") == approx([1], [0], [1])


@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_bi_level_gae_is_its_two_recursions(batch: RaggedBatch) -> None:
    options = {"turn_gamma": 0.7, "turn_lam": 0.6}
    found = compute_advantages(batch, algorithm("bi_level_gae", gamma=0.9, lam=0.8, adv_options=options), N).returns
    assert found is not None and batch.values is not None
    owner = batch.trajectory[batch.sequence_ids()]
    for trajectory in owner.unique():
        turns: dict[int, list[int]] = {}
        for place in torch.nonzero(batch.mask & (owner == trajectory)).flatten().tolist():
            turns.setdefault(int(batch.turn[place]), []).append(place)
        later, later_value = 0.0, 0.0
        for turn in sorted(turns, reverse=True):
            *before, last = turns[turn]
            value, reward = float(batch.values[last]), float(batch.rewards[last])
            later = reward + 0.7 * later_value - value + 0.7 * 0.6 * later
            advantage, later_value, following = later, value, value
            assert float(found[last]) == pytest.approx(later + value, abs=1e-5)
            for place in reversed(before):
                value = float(batch.values[place])
                advantage = float(batch.rewards[place]) + 0.9 * following - value + 0.9 * 0.8 * advantage
                following = value
                assert float(found[place]) == pytest.approx(advantage + value, abs=1e-5)


def test_decoupled_gae_has_a_lambda_for_each_of_critic_and_policy() -> None:
    # delta = 0.4 - 0.2 and 1 - 0.4.
    batch = batch_of(Row("0110", {2: 1.0}, values=[9, 0.2, 0.4, 7]))
    options = {"lam_policy": 0.5, "lam_critic": 1.0}
    assert returns(batch, "decoupled_gae", adv_options=options) == approx([1.0, 1.0])
    half = math.sqrt(0.5)
    assert advantages(batch, "decoupled_gae", adv_options=options) == approx([-half, half])  # 0.5 and 0.6


def test_the_lambda_by_length_of_decoupled_gae() -> None:
    # alpha = 0.5: 1 - 1 / (0.5 * 4) = 0.5 with four tokens, 0 with two, and not below 0 with one.
    batch = batch_of(Row("01111", {4: 1.0}), Row("0101", {3: 1.0}), Row("01", {1: 1.0}))
    raw = [0.125, 0.25, 0.5, 1, 0, 1, 1]
    mean = sum(raw) / 7
    white = [(x - mean) / math.sqrt(sum((y - mean) ** 2 for y in raw) / 6) for x in raw]
    found = advantages(batch, "decoupled_gae", adv_options={"length_alpha": 0.5})
    assert found == approx(white[:4], white[4:6], white[6:])
    assert returns(batch, "decoupled_gae", adv_options={"length_alpha": 0.5}) == approx([1] * 4, [1] * 2, [1])


def test_a_lambda_by_length_that_short_answers_leave_nothing_of_is_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the warning says to set ends it."""
    batch = batch_of(*[Row("0" + "1" * 8, {8: 1.0}) for _ in range(3)], Row("0" + "1" * 50, {50: 1.0}))

    def warned(**options: float) -> str:
        caplog.clear()
        monkeypatch.setattr(decoupled_gae, "warnings", ThrottledWarnings(decoupled_gae.warnings.logger))
        advantages(batch, "decoupled_gae", adv_options=options)
        return caplog.text

    text = warned()
    assert "below 0.5 in 75% of the trajectories (median 8 tokens)" in text
    said = dict(re.findall(r"algorithm\.adv_options\.(\w+)=([\d.]+)", text))
    assert said == {"lam_policy": "0.95", "length_alpha": "1.2"}
    for name, value in said.items():
        assert not warned(**{name: float(value)})
    assert not warned(length_alpha=2 / 8), "0.5 is not below 0.5"


def test_sequences_without_advantage_are_told() -> None:
    # Group 0 is all equal, group 2 is alone with a reward, and group 1 has a trajectory at its mean.
    batch = outcome(1, 0, 1, 0.5, 1, 1, groups=[0, 1, 1, 1, 0, 2])
    batch = compute_advantages(batch, algorithm("grpo"), N)
    assert zero_advantage_sequences(batch).nonzero().flatten().tolist() == [0, 3, 4, 5]
    assert group_counts(batch, N) == {"groups": 3, "groups_of_one": 1, "groups_equal": 1}


def test_an_advantage_that_is_not_finite_is_not_zero() -> None:
    batch = outcome(1, 1)
    batch = batch.with_fields(advantages=torch.where(batch.mask & (batch.sequence_ids() == 1), math.nan, 0.0))
    assert zero_advantage_sequences(batch).nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS.names())
def test_an_empty_batch_stays_empty(estimator: str) -> None:
    batch = compute_advantages(batch_of(), algorithm(estimator), N)
    assert batch.advantages is not None and batch.advantages.shape == (0,)
    assert zero_advantage_sequences(batch).nonzero().flatten().tolist() == []


def raises(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    return Advantages(columns.rewards[1:] * columns.mask, columns.rewards)


def gives_a_tensor(columns: EstimatorColumns, config: AlgorithmConfig) -> torch.Tensor:
    return columns.rewards


def gives_a_number_a_sequence(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    return Advantages(columns.group.float(), columns.group.float())


def gives_metrics(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    return Advantages(columns.rewards, columns.rewards, {"share": torch.tensor(0.25), "rewards": 3})


def gives_texts(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    return Advantages(columns.rewards, columns.rewards, {"share": "most"})  # type: ignore[dict-item]


def test_metrics_of_a_users_estimator_are_metrics_of_the_step() -> None:
    batch = outcome(1.0, 0.0).with_fields(old_logprobs=torch.zeros(8))
    _, metrics = estimate(batch, algorithm(f"{__name__}:gives_metrics"), Settings(N))
    assert {name: one for name, one in metrics.items() if name.startswith("estimator/")} == {
        "estimator/share": 0.25,
        "estimator/rewards": 3.0,
    }
    _, metrics = estimate(batch, algorithm("grpo"), Settings(N))
    assert not any(name.startswith("estimator/") for name in metrics)


@pytest.mark.parametrize(
    ("estimator", "error", "says"),
    [
        (gives_texts, CodeError, r"metrics of its Advantages must be a mapping of names to numbers, found {'share'"),
        (raises, CodeError, r"raises\): RuntimeError: The size of tensor a .*\n  .*test_advantages.py:\d+ in raises: "),
        (gives_a_tensor, CodeError, r"expected Advantages\(advantages, returns\) of two tensors, found Tensor"),
        (gives_a_number_a_sequence, CodeError, r"expected advantages of shape \[8\], one a token, found \[2\]"),
    ],
)
def test_a_users_estimator_that_fails_is_named(estimator: Any, error: type[Exception], says: str) -> None:
    name = f"{__name__}:{estimator.__name__}"
    with pytest.raises(error, match=rf"algorithm.adv_estimator={name}.*{says}"):
        compute_advantages(outcome(1.0, 0.0), algorithm(name), N)
