"""The floor of `benchmarks.training.async_steps`: the least time that steps can take."""

import pytest

from benchmarks.training.async_steps import least


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(1, 3, 5.0)], 5.0),  # two steps of a bound of 1
        ([(1, 3, 5.0), (2, 4, 4.0)], 5.0),  # the step that they share holds up both
        ([(1, 3, 5.0), (3, 5, 4.0)], 9.0),  # they share none
        ([(0, 2, 5.0)], 3.0),  # a step before took 2 seconds of it
        ([(0, 1, 9.0), (4, 6, 9.0)], 0.0),  # before what is counted, and beyond it
    ],
)
def test_the_floor_is_the_least_time_in_which_every_trajectory_fits(
    spans: list[tuple[int, int, float]], seconds: float
) -> None:
    assert least(spans, [2.0], 4) == seconds
