"""Containers that a machine carries: the numbers of the plan's line, worked by hand."""

from __future__ import annotations

import pytest

from agentrl.plan.containers import MIB, described
from tests.plan.test_memory import planned, words

__all__ = ["words"]
AGENT = "actor_rollout_ref.rollout.agent"
PROXY = f"{AGENT}.openai_proxy"
CONTAINER = (f"{PROXY}.start=container", f"{PROXY}.command=[agent]", f"{PROXY}.container.image=some")


def test_a_run_without_containers_has_no_line(words: list[str]) -> None:
    assert list(described(planned(words), 1e9, 4)) == []


@pytest.mark.parametrize(("memory", "carried", "bounded"), [(33.5, 33, None), (32.5, 32, 31), (2.5, 2, 1), (0.5, 0, 1)])
def test_memory_and_cores_bound_the_containers(
    words: list[str], memory: float, carried: int, bounded: int | None
) -> None:
    """32 sequences of a step and one of the pool, with 1 GB each; two and a half cores each of 16."""
    more = (f"{PROXY}.container.memory_megabytes=1024", f"{PROXY}.container.cpus=2.5", f"{PROXY}.container.pool=1")
    plan = planned(words, *CONTAINER, *more, device="cuda")
    line, *advice = described(plan, memory * 1024 * MIB, 16)
    assert "up to 33 at once, each of at most 1.07 GB and 2.5 cores" in line
    assert f"carries {carried} by memory" in line and "16 cores run 6 at full speed" in line
    assert [f"max_concurrent={bounded} " in one for one in advice] == [True] * (bounded is not None)


def test_on_a_cpu_the_run_itself_takes_memory(words: list[str]) -> None:
    plan = planned(words, *CONTAINER, f"{AGENT}.max_concurrent=3")
    own = plan.moments[0].total
    (line,) = described(plan, own + 3 * 2048 * MIB, 2)
    assert "up to 3 at once" in line and "carries 3 by memory" in line
