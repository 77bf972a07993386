"""Metrics are merged by their kinds, and read as plain numbers."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.system.metrics import Metrics
from tests.naming import naming


def worker(servers: int, waited: list[float]) -> Metrics:
    metrics = Metrics()
    metrics.sum("servers", servers)
    if waited:
        metrics.mean("seconds", sum(waited) / len(waited), len(waited))
        metrics.max("longest", max(waited))
    return metrics


def test_numbers_of_several_workers_become_one_by_their_kinds() -> None:
    """One that measured nothing counts in no mean."""
    parts = [worker(2, [1.0]), worker(1, [2.0, 3.0]), worker(1, [])]
    assert Metrics.merged(parts) == {"servers": 4.0, "seconds": 2.0, "longest": 3.0}
    assert [dict(part) for part in parts[1:]] == [{"servers": 1.0, "seconds": 2.5, "longest": 3.0}, {"servers": 1.0}]


def test_plain_numbers_are_averaged_and_prefixes_are_put_before_names() -> None:
    metrics = Metrics.merged([{"x": 1, "y": True}])
    metrics.add({"x": 2}, "tool/")
    metrics.add({"x": 4}, "tool/")
    assert metrics == {"x": 1.0, "y": 1.0, "tool/x": 3.0}
    assert {"a": 0.0} | dict(metrics) == {"a": 0.0, **metrics}
    assert all(type(value) is float for value in metrics.values())


def test_a_name_has_one_kind() -> None:
    metrics = worker(1, [])
    with naming(ValueError, "'servers'"):
        metrics.mean("servers", 2.0)
    with naming(ValueError, "convert"):
        Metrics.merged([{"x": "much"}])  # type: ignore[dict-item]


@given(st.lists(st.lists(st.integers(0, 1000).map(float)), max_size=5))
def test_how_work_is_split_makes_no_difference(split: list[list[float]]) -> None:
    parts = [pickle.loads(pickle.dumps(worker(1, waited))) for waited in split]
    whole = [value for waited in split for value in waited]
    merged, alone = Metrics.merged(parts), worker(len(split), whole)
    assert {name: value for name, value in alone.items() if name != "servers"} == pytest.approx(
        {name: value for name, value in merged.items() if name != "servers"}
    )
