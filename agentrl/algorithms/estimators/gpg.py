"""GPG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.columns import Advantages, EstimatorColumns
from agentrl.algorithms.groups import Groups
from agentrl.config.declaration import declare

if TYPE_CHECKING:
    from agentrl.config.sections.algorithm import AlgorithmConfig


@declare(compares_group=True)
def gpg(columns: EstimatorColumns, config: AlgorithmConfig) -> Advantages:
    """GPG (arXiv:2504.02546): A_i = alpha (R_i - mean(R)), alpha = trajectories / trajectories of groups that teach.

    Groups of equal rewards have no gradient and still count in the loss's denominators; alpha makes up for them. Lone
    survivors count nowhere in alpha. With n = 1 the mean is 0. verl 0.9.1 counts rewards that are not 0 in place of
    trajectories that teach. The two agree where every wrong answer's group is wrong as a whole.
    """
    groups = Groups.from_columns(columns)
    centred = groups.centred(groups.totals, groups.mean(groups.totals))
    compared = groups.size[groups.teaches].sum()
    teaching = groups.size[groups.teaches & ~groups.equal(groups.totals)].sum()
    return groups.spread(centred * (compared / teaching.clamp(min=1)), columns)
