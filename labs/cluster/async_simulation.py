"""Simulated training over many steps: rollouts and updates in turn, overlapped, and with slow trajectories thrown away.

    python -m labs.cluster.async_simulation --nodes 8 --prompts 512 --steps 12
    python -m labs.cluster.async_simulation --help

Which prompts begin and which batch takes them is decided by the trainer's own schedule
(`agentrl/rollouts/staleness_scheduler.py`), which server runs a request by its own router. Servers, trajectories and
the arithmetic of an update are those of `step_simulation.py`; with GPUs of their own for rollouts, each way is tried
with several divisions of the GPUs and the fastest is shown. No GPU is needed, and none has been asked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from agentrl.plan.many_steps import Draw, Seen, Simulation, Trajectories, Way, drawn, sampled_alone
from agentrl.plan.step_times import Cluster, Options, Plan, Training
from labs.cluster.step_simulation import add_options, made, shape_of

DIVISIONS = (0.25, 0.5, 0.75)
"""Parts of the GPUs that only generate, of which the best is shown."""


WAYS = (
    Way("in turn, shared GPUs", shared=True),
    Way("in turn", 0),
    Way("in turn, the slowest fifth discarded", discarded=0.2),
    Way("partial: K 1, shared GPUs", 1, 1, shared=True),
    Way("partial: K 4, depth 1, shared GPUs", 4, 1, shared=True),
    Way("one step off: K 1", 1, 1),
    Way("asynchronous: K 2", 2, 2),
    Way("asynchronous: K 4, depth 1", 4, 1),
    Way("asynchronous: K 4", 4, 4),
    Way("asynchronous: K 8, depth 2", 8, 2),
    Way("asynchronous: K 16, depth 8, every 4th version published", 16, 8, 4),
    Way("asynchronous: K 24, depth 12, every 4th version published", 24, 12, 4),
)


class Steps(Options):
    """Extent of the simulation."""

    steps: int = 16
    """Steps that are run. The first ones, of which more batches are begun than taken, are not counted."""
    ways: str = ""
    """Only ways whose names have this in them."""
    division: float = 0.0
    """Part of the GPUs that only generate; 0: the best of several."""


class Comparison:
    """Ways of one training on one cluster, over the same prompts."""

    def __init__(self, cluster: Cluster, plan: Plan, model: str, draw: Draw, given: Steps) -> None:
        self._cluster, self._plan, self._shape, self._draw, self._given = cluster, plan, shape_of(model), draw, given
        self._sampled: dict[float, float] = {}
        """By the part of a GPU that a server takes: tokens that it samples in a second if it never waits."""

    def best(self, way: Way) -> Seen:
        """Run a way on shared GPUs, or on each division of them; the fastest."""
        gpus, tp = self._cluster.gpus, self._plan.tp
        parts = [self._given.division] if self._given.division else DIVISIONS
        apart = sorted({min(max(tp, round(part * gpus / tp) * tp), gpus - 1) for part in parts})
        return min((self._run(way, one) for one in ([0] if way.shared else apart)), key=lambda one: one.seconds)

    def _run(self, way: Way, rollout_gpus: int) -> Seen:
        # GPUs that only generate have nothing else to hold.
        memory = 0.85 if rollout_gpus else self._plan.engine_memory
        plan = self._plan.model_copy(update={"rollout_gpus": rollout_gpus, "engine_memory": memory})
        training = Training(self._cluster, plan, self._shape)
        simulation = Simulation(training, way, self._draw, self._given.steps)
        simulation.run()
        if plan.engine_memory not in self._sampled:
            self._sampled[plan.engine_memory] = sampled_alone(training.speed(), self._draw)
        return simulation.seen(training.servers * self._sampled[plan.engine_memory])


def table(runs: Sequence[Seen]) -> Table:
    made = Table(box=box.SIMPLE)
    for title in (
        "",
        "GPUs that generate",
        "step, s",
        "against in turn",
        "rollouts alone, s",
        "update alone, s",
        "reached",
        "servers busy",
        "trainer busy",
    ):
        made.add_column(title, justify="right" if title else "left")
    for title in ("stale mean", "most", "longest tenth trained", "others"):
        made.add_column(title, justify="right")
    turn = min((one.seconds for one in runs if not one.way.bound and not one.way.discarded), default=runs[0].seconds)
    for one in runs:
        made.add_row(
            one.way.name,
            str(one.rollout_gpus) if not one.way.shared else "all",
            f"{one.seconds:.3g}",
            f"{turn / one.seconds:.2f}",
            f"{one.rollout:.3g}",
            f"{one.update:.3g}",
            f"{one.reached:.2f}",
            f"{one.engine_busy:.0%}",
            f"{one.trainer_busy:.0%}",
            f"{one.staleness_mean:.2f}",
            str(one.staleness_max),
            f"{one.longest:.0%}",
            f"{one.others:.0%}",
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-7B", help="as of step_simulation, or the path of a config.json")
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    for kind in (Cluster, Plan, Trajectories, Steps):
        add_options(parser, kind)
    arguments = parser.parse_args()
    cluster, plan, given = made(Cluster, arguments), made(Plan, arguments), made(Steps, arguments)
    ways = [way for way in WAYS if given.ways in way.name]
    if not ways:
        parser.error(f"--ways {given.ways!r} is in no name; known: {'; '.join(way.name for way in WAYS)}")
    draw = drawn(made(Trajectories, arguments), plan, arguments.seed)
    runs = []
    try:
        comparison = Comparison(cluster, plan, arguments.model, draw, given)
        for way in ways:
            print(f"simulating: {way.name}", file=sys.stderr)
            runs.append(comparison.best(way))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if arguments.json:
        print(json.dumps([dataclasses.asdict(one) | {"reached": one.reached} for one in runs], indent=1))
    else:
        Console(width=180).print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
