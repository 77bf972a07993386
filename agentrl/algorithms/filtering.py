"""Which groups teach: the rule by which dynamic sampling keeps a prompt's trajectories, or samples another prompt.

A rule is a function of the outlines of a prompt's trajectories and `AlgorithmConfig` that returns true where they are
trained on. The trajectories are at least two: all of the prompt that can be trained on, without a greedy baseline. A
rule may have a parameter `options` annotated with a pydantic model. Configs name rules by the registry `GROUP_FILTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from agentrl.algorithms.groups import all_equal
from agentrl.config.registries import GROUP_FILTERS
from agentrl.errors import TrainingError
from agentrl.system.registry import configured
from agentrl.system.user_code import contract_error, user_code
from agentrl.trajectory import Outline

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig

GroupFilter = Callable[[Sequence[Outline], "AlgorithmConfig"], bool]
KEYS = "algorithm.filter_groups"


def differ(group: Sequence[Outline], config: AlgorithmConfig) -> bool:
    """Check whether the trajectories differ in `filter_groups.metric`."""
    return not all_equal([value_of(one, config) for one in group])


def value_of(outline: Outline, config: AlgorithmConfig) -> float:
    """Return the number `filter_groups.metric` of a trajectory that can be trained on.

    Raises TrainingError when its scorer gave no such number.
    """
    metric, reward = config.filter_groups.metric, outline.reward(config.turn_reward_coef)
    assert reward is not None and outline.score is not None, "a trajectory that can be trained on"
    if metric == "reward":
        return reward
    if metric in outline.score_extra:
        return outline.score_extra[metric]
    if metric in ("score", "acc"):
        return outline.score
    raise TrainingError(
        f"{KEYS}.metric={metric}: the scorer of data_source {outline.data_source!r} gave no number of "
        f"that name, found {', '.join(sorted({'reward', 'score', *outline.score_extra}))}"
    )


def load_filter(config: AlgorithmConfig) -> Callable[[Sequence[Outline]], bool] | None:
    """Load the rule of groups; None where groups are trained on without a filter.

    Raises ConfigError for a rule that cannot be loaded; the returned filter raises CodeError for errors of the rule.
    """
    keys = config.filter_groups
    if not keys.refill:
        return None
    found = cast(GroupFilter, GROUP_FILTERS.get(keys.rule))
    rule = configured(found, keys.options, f"{KEYS}.options")

    def teaches(group: Sequence[Outline]) -> bool:
        with user_code(f"{KEYS}.rule={keys.rule}", found):
            answer = rule(group, config)
            is_answer = answer in (True, False)
        if not is_answer:
            raise contract_error(f"{KEYS}.rule={keys.rule}", found, f"expected true or false, found {answer!r:.100}")
        return bool(answer)

    return teaches
