"""The cost of a sidecar: that the benchmark plays whole episodes and holds a step against a request."""

from __future__ import annotations

from benchmarks.tools.environments import measure


async def test_the_cost_of_a_sidecar_is_told_as_ratios() -> None:
    costs = await measure(at_once=4, rounds=2, steps=3)
    assert (costs.episodes, costs.steps, costs.wrong) == (8, 3, 0)
    step = costs.wall / 24
    assert f"{step / costs.bare:.1f} times a bare request" in "\n".join(costs.lines())
    assert f"{step / 0.005:.2f} of what it may cost" in "\n".join(costs.lines())
