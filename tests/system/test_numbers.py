"""Numbers that user code gives beside a score."""

from __future__ import annotations

import math

import pytest

from agentrl.reward.scorer import as_verdict
from agentrl.system.numbers import finite_numbers
from tests.naming import assert_names


def test_what_is_not_finite_is_left_out_and_told_once_a_name(caplog: pytest.LogCaptureFixture) -> None:
    given = {"good": 1, "text": "so", "nothing": None, "bad": math.nan, "worse": -math.inf, "large": 1e300, 3: True}
    for _ in range(3):
        assert finite_numbers("tool of this test", given) == {"good": 1.0, "3": 1.0}
    end = "what is not finite is left out of the metric"
    assert [record.getMessage() for record in caplog.records] == [
        f"tool of this test gave bad=nan: {end}",
        f"tool of this test gave worse=-inf: {end}",
        f"tool of this test gave large=1e+300: {end}",
    ]


def test_a_scorers_further_number_that_is_not_finite_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert as_verdict({"score": 0.5, "depth_of_this_test": math.nan}).extra == {}
    assert_names(caplog.text, "depth_of_this_test=nan")
