"""95 % intervals of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Z = 1.96
"""Standard deviations around the mean that hold 95 % of a normal distribution."""


def of_share(mean: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval of a mean of `count` numbers from 0 to 1 (doi:10.2307/2276774).

    For numbers between 0 and 1 it is wider than needed, as no such numbers vary more than zeros and ones.
    """
    spread = 1 + Z**2 / count
    middle = (mean + Z**2 / (2 * count)) / spread
    half = Z / spread * math.sqrt(max(mean * (1 - mean), 0.0) / count + Z**2 / (4 * count**2))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def of_mean(values: Floats, sizes: Sequence[int]) -> tuple[float, float] | None:
    """Return the interval of the mean of values [n], which are alike within groups of these sizes; None for one group.

    The standard error is that of clusters (doi:10.1093/biomet/73.1.13); groups of one give the usual one.
    """
    groups = len(sizes)
    if groups < 2:
        return None
    mean = float(values.mean())
    sums = np.add.reduceat(values - mean, np.concatenate([[0], np.cumsum(sizes)[:-1]]))
    half = Z * math.sqrt(groups / (groups - 1) * float((sums**2).sum())) / len(values)
    return mean - half, mean + half
