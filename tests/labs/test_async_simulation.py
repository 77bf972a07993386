"""The simulator of asynchronous training: cases worked by hand, and what must hold of each way."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.plan.many_steps import Draw, Saturated, Seen, Simulation, Way, sampled_alone
from agentrl.plan.simulated_servers import Clock, Request, Session, SimulatedServer, Speed
from agentrl.plan.sizing import ModelShape
from agentrl.plan.step_times import Cluster, Plan, Stage, Training
from labs.cluster import async_simulation
from labs.cluster.async_simulation import WAYS

SHAPE = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocab=10)


class MadeUp(Training):
    """A token takes a second whatever runs, an update 30, and the weights' way 10."""

    def speed(self) -> Speed:
        return Speed(prefill=1e12, prefill_fixed=0.0, step_fixed=1.0, step_each=0.0, kv_tokens=10**6)

    def forward(self, name: str, sessions: Sequence[Session], *, head: bool = True) -> Stage:
        return Stage(name, serial=5.0)

    def update(self, name: str, sessions: Sequence[Session], *, head: bool = True) -> Stage:
        return Stage(name, serial=25.0)

    def sync(self) -> Stage:
        return Stage("sync_weights", serial=10.0)

    def save(self) -> Stage:
        return Stage("save")


def prompts(*lengths: int, tool: float = 0.0) -> Draw:
    """Two trajectories a prompt, of one length, which goes round; with a tool after the first half."""

    def draw(ordinal: int) -> list[Session]:
        length = lengths[ordinal % len(lengths)]
        answers = [length // 2, length // 2] if tool else [length]
        between = len(answers) - 1
        return [
            Session(
                f"train/{ordinal}/{k}", ordinal, 8, answers, [0] * between, [tool] * between, context=8, left=answers[0]
            )
            for k in range(2)
        ]

    return draw


def run(way: Way, draw: Draw, *, steps: int = 12, batch: int = 2) -> tuple[Seen, Simulation]:
    cluster, plan = Cluster(gpus_per_node=4), Plan(prompts=batch, n=2, rollout_gpus=0 if way.shared else 2)
    simulation = Simulation(MadeUp(cluster, plan, SHAPE), way, draw, steps)
    simulation.run()
    return simulation.seen(sampled=plan.n), simulation


def test_in_turn_a_step_is_its_longest_trajectory_and_the_update() -> None:
    seen, _ = run(Way("in turn"), prompts(50, 100))
    assert seen.seconds == pytest.approx(100 + 30 + 10)
    assert (seen.staleness_max, seen.longest, seen.others) == (0, 1.0, 1.0)
    assert seen.trainer_busy == pytest.approx(30 / 140, rel=0.1)


@pytest.mark.slice(0, "long run")
@pytest.mark.parametrize("shared", [False, True])
def test_in_turn_a_thousand_servers_wait_for_one_trajectory(shared: bool) -> None:
    """Overlapped, it is given five versions of time, and the others train meanwhile."""
    draw, cluster = prompts(1000, *[50] * 1023), Cluster(nodes=256)
    plan = Plan(prompts=1024, n=2, rollout_gpus=0 if shared else 1024)

    def step(way: Way) -> float:
        simulation = Simulation(MadeUp(cluster, plan, SHAPE), way, draw, 6)
        simulation.run()
        assert simulation.seen(1.0).staleness_max <= way.bound and all(simulation.trained.values())
        return simulation.seen(1.0).seconds

    assert MadeUp(cluster, plan, SHAPE).servers == (2048 if shared else 1024)
    turn = step(Way("in turn", shared=shared))
    assert turn == pytest.approx(1000 + 30 + 10)
    assert step(Way("K 4, depth 1", 4, 1, shared=shared)) < turn / 3


def test_one_step_off_the_shorter_of_both_costs_nothing() -> None:
    """Two batches are under way at once; one begins when all servers have new weights, half of which come first."""
    seen, _ = run(Way("one step off", 1, 1), prompts(200), steps=13)
    assert seen.seconds == pytest.approx((200 + 10 + 30 + 2 * 10) / 2), "each is held once while it runs"
    seen, _ = run(Way("one step off", 1, 1), prompts(20))
    assert seen.seconds == pytest.approx(30 + 2 * 10, rel=0.05)
    assert seen.staleness_max == 1


def test_a_step_is_compared_with_servers_and_updates_that_never_wait() -> None:
    """Four trajectories of 20 tokens, half a token a second, and updates with one sending of weights to all servers."""
    cluster, plan = Cluster(gpus_per_node=4), Plan(prompts=2, n=2, rollout_gpus=2)
    simulation = Simulation(MadeUp(cluster, plan, SHAPE), Way("one step off", 1, 1), prompts(20), 12)
    simulation.run()
    seen = simulation.seen(sampled=0.5)
    assert (seen.rollout, seen.update) == (2 * 2 * 20 / 0.5, 30 + 10)
    assert seen.reached == pytest.approx(160 / seen.seconds)
    assert replace(seen, way=Way("", shared=True)).reached == pytest.approx((160 + 40) / seen.seconds)
    every_second = Simulation(MadeUp(cluster, plan, SHAPE), Way("K 2", 2, 2, 2), prompts(20), 12)
    every_second.run()
    seen = every_second.seen(sampled=80.0)
    assert seen.update == 30 + 10 / 2
    assert seen.seconds == pytest.approx(30 + 20 / 2, rel=0.1)


def test_a_server_that_never_waits_has_as_many_trajectories_as_suit_it() -> None:
    """A step takes 1 s and .1 s a request; each samples 10 tokens and waits 30 s for a tool in between."""
    speed = Speed(prefill=1e12, prefill_fixed=0.0, step_fixed=1.0, step_each=0.1, max_running=8, kv_tokens=10**6)
    assert Saturated(speed, prompts(10), 1).sampled() == pytest.approx(1 / 1.1)
    assert Saturated(speed, prompts(10), 8).sampled() == pytest.approx(8 / 1.8)
    assert sampled_alone(speed, prompts(10)) == pytest.approx(8 / 1.8)
    assert sampled_alone(speed, prompts(20, tool=30.0)) == pytest.approx(8 / 1.8, rel=0.05), "others run meanwhile"


def test_shared_gpus_sample_nothing_during_an_update_but_tools_go_on() -> None:
    seen, _ = run(Way("partial", 1, 1, shared=True), prompts(20, tool=40))
    assert seen.seconds == pytest.approx((10 + 40 + 10 + 2 * 40) / 2, rel=0.1), "two batches, two updates"
    slow_tool = [Session("", 0, 8, [10, 10], [0], [tool], context=8, left=10) for tool in (0.0, 200.0)]

    def draw(ordinal: int) -> list[Session]:
        return [replace(slow_tool[ordinal % 2], name=f"train/{ordinal}/0", group=ordinal)]

    seen, _ = run(Way("partial", 4, 1, shared=True), draw)
    assert seen.seconds < 0.6 * (10 + 200 + 10 + 40), "the tool's 200 s last over several updates"


def test_what_is_discarded_is_the_longest() -> None:
    seen, _ = run(Way("discarded", discarded=0.5), prompts(10, 10, 10, 90))
    assert seen.seconds == pytest.approx(10 + 30 + 10)
    assert seen.longest == 0.0
    assert seen.others == pytest.approx(13 * 2 / (13 * 4 * 0.9), abs=0.01)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_no_way_passes_its_bound_or_stands_still(way: Way) -> None:
    seen, simulation = run(way, prompts(7, 300, 20, 3, 55, tool=33.0), batch=5)
    assert seen.staleness_max <= way.bound
    assert seen.seconds > 0
    if not way.discarded:
        assert all(simulation.trained.values())


def test_a_server_that_takes_weights_computes_its_contexts_anew_and_forgets_its_cache() -> None:
    clock = Clock()
    speed = Speed(prefill=10.0, prefill_fixed=0.0, step_fixed=1.0, step_each=0.0)
    server, ends = SimulatedServer("one", clock, speed, 0), list[float]()
    session = Session("0/0", 0, 100, [20], [], [], context=100, left=20)
    server.submit(Request(session, 0.0, lambda request: ends.append(clock.now)))
    held: list[float] = []
    clock.after(15.0, lambda: held.append(server.take_weights(3.0)))  # prefill 10 s, 5 tokens sampled
    clock.run(lambda: bool(ends))
    assert [*held, *ends] == pytest.approx([3 + 105 / 10, 10 + 20 + 3 + 105 / 10])


def test_the_command_and_those_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ["--nodes", "1", "--prompts", "4", "--n", "2", "--mini-batch", "4", "--steps", "4", "--division", "0.5"]
    monkeypatch.setattr(sys, "argv", ["async_simulation", *small, "--json"])
    assert async_simulation.main() == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["way"]["name"] for one in told] == [way.name for way in WAYS]
    monkeypatch.setattr(sys, "argv", ["async_simulation", *small, "--ways", "nothing"])
    with pytest.raises(SystemExit):
        async_simulation.main()
    assert "known: in turn" in capsys.readouterr().err
    page = Path(__file__).parents[2] / "docs" / "scale.md"
    lines = re.findall(r"^python -m labs\.cluster\.async_simulation.*$", page.read_text(encoding="utf-8"), re.M)
    assert lines
    for line in lines:  # as written, but for the steps and the size
        monkeypatch.setattr(sys, "argv", [*shlex.split(line)[2:], *small])
        assert async_simulation.main() == 0
