"""The simulation, small: what it shows of 64 servers holds for 8, and a seed repeats."""

import random

import pytest

from agentrl.engines.servers.router import Router
from agentrl.plan.simulated_servers import Clock, Lengths, Request, SimulatedServer, Speed, workload
from labs.cluster.router_simulation import (
    LAUNCH,
    TRANSFER,
    AtRandom,
    EachAlone,
    Fault,
    LeastLoaded,
    NeverMoved,
    Scenario,
)

SMALL = Scenario(servers=8, trajectories=1200, concurrent=800)


def test_a_session_finds_its_whole_context_on_every_turn_and_the_load_stays_even() -> None:
    sticky, least, anywhere = SMALL.play(Router), SMALL.play(LeastLoaded), SMALL.play(lambda: AtRandom(0))
    assert sticky.hits > 0.98
    assert max(least.hits, anywhere.hits) < 0.25
    assert sticky.cached_later > 0.85 > 0.5 > max(least.cached_later, anywhere.cached_later)
    assert 1.3 * sticky.most < min(least.most, anywhere.most)
    assert 1 <= sticky.requests < 1.15
    assert 1 <= sticky.load < 1.3 < anywhere.load


def test_a_group_begun_together_computes_its_prompt_once() -> None:
    together, alone = SMALL.play(Router), SMALL.play(EachAlone)
    assert together.cached > alone.cached + 0.01
    assert together.waited < 0.6 * alone.waited
    assert together.load < alone.load + 0.1


def test_a_slow_server_is_left() -> None:
    moved, kept = SMALL.play(Router, Fault("slow")), SMALL.play(NeverMoved, Fault("slow"))
    assert moved.makespan < kept.makespan
    assert moved.load < 0.8 * kept.load


def test_what_ran_on_a_killed_server_runs_elsewhere_in_seconds_and_it_comes_back() -> None:
    recovery = SMALL.play(fault=Fault("killed", 10.0)).recovery
    assert recovery.moved > 20
    assert recovery.dead is not None and recovery.dead <= 1
    assert recovery.elsewhere is not None and recovery.elsewhere < 10
    assert recovery.serves is not None and LAUNCH + TRANSFER < recovery.serves < LAUNCH + TRANSFER + 5


def test_a_seed_repeats() -> None:
    scenario = Scenario(servers=4, trajectories=160, concurrent=100, seed=3)
    assert scenario.play(fault=Fault("hangs", 5.0)) == scenario.play(fault=Fault("hangs", 5.0))
    assert scenario.play() != Scenario(servers=4, trajectories=160, concurrent=100, seed=4).play()


def test_the_model_of_a_server_by_hand() -> None:
    """Two requests: the second one's prefill stops the first one's steps, then both share the steps."""
    clock = Clock()
    speed = Speed(prefill=1000, prefill_fixed=0.0, step_fixed=0.01, step_each=0.01)
    server = SimulatedServer("server", clock, speed, system=0)
    lengths = Lengths(system=100, question=(100, 0, 100, 100), answer=(100, 0, 100, 100), group_sigma=0)
    sessions = workload(2, 1, lengths, random.Random(0))
    ends: list[float] = []
    for session, at in zip(sessions, (0.0, 0.2 + 50 * 0.02), strict=True):
        request = Request(session, at, lambda request: ends.append(clock.now))
        clock.after(at, lambda request=request: server.submit(request))  # type: ignore[misc]
    clock.run(lambda: len(ends) == 2)
    first = 0.2 + 50 * 0.02 + 0.2 + 50 * 0.03
    assert ends == pytest.approx([first, first + 50 * 0.02])
    assert server.totals.busy == pytest.approx(ends[1])
