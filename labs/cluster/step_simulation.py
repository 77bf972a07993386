"""Simulated training step on a cluster: seconds by stage, memory by part, and what dominates.

    python -m labs.cluster.step_simulation --model Qwen2.5-7B --nodes 1 --prompts 128 --n 8
    python -m labs.cluster.step_simulation --model path/to/config.json --trajectories runs/my-run/trajectories
    python -m labs.cluster.step_simulation --help

Every number of a cluster and of a plan is an option. The rollouts are simulated trajectory by trajectory on servers
with slots, a KV cache and the real router; the rest is arithmetic (`sizing.py`, `step_times.py`). Lengths, turns and
the tools' latencies are drawn from log-normal distributions, or taken from a run's trajectories or a file of lengths.
No GPU is needed, and none has been asked: see docs/scale.md for how far the figures can be trusted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from pathlib import Path
from typing import Any, TypeVar, get_args

from rich import box
from rich.console import Console
from rich.table import Table

from agentrl.plan import rollout_times
from agentrl.plan.many_steps import Trajectories
from agentrl.plan.one_step import Forecast, bound_by, forecast
from agentrl.plan.sizing import ModelShape
from agentrl.plan.step_times import Cluster, Memory, Options, Plan, Training, host_memory

Kind = TypeVar("Kind", bound=Options)

MODELS = {
    "Qwen2.5-0.5B": ModelShape(24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "Qwen2.5-1.5B": ModelShape(28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "Qwen2.5-7B": ModelShape(28, 3584, 28, 4, 128, 18944, 152064),
    "Qwen2.5-32B": ModelShape(64, 5120, 40, 8, 128, 27648, 152064),
    "Llama-3.3-70B": ModelShape(80, 8192, 64, 8, 128, 28672, 128256),
}
"""Shapes of known models, from their config.json; any other is given by its path."""


def tree(found: Forecast) -> dict[str, Any]:
    """Return all figures as the object that --json prints."""
    return {
        "cluster": found.training.cluster.model_dump(),
        "plan": found.training.plan.model_dump(),
        "parameters": found.training.shape.params,
        "trained_parameters": found.training.trained,
        "tokens": found.tokens,
        "longest": found.longest,
        "sampled": found.sampled,
        "rollout": dataclasses.asdict(found.rollout),
        "stages": {stage.name: dataclasses.asdict(stage) | {"seconds": stage.seconds} for stage in found.stages},
        "seconds": found.seconds,
        "tokens_per_second": found.tokens / found.seconds,
        "dominates": found.dominates.name,
        "memory": found.memory.moments,
        "fits": found.memory.fits,
        "kv_tokens_per_server": found.training.kv_tokens,
        "host": host_memory(found.training, found.tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", default="Qwen2.5-7B", help=f"{', '.join(MODELS)}, or the path of a config.json")
    parser.add_argument("--trajectories", type=Path, help="a run's trajectories: a parquet file, or their folder")
    parser.add_argument(
        "--lengths", type=Path, help="a file of tokens a response, one a line: trajectories of one turn"
    )
    parser.add_argument("--seed", type=int, default=1, help="of what is drawn")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    for kind in (Cluster, Plan, Trajectories):
        add_options(parser, kind)
    given = parser.parse_args()
    cluster, plan, drawn = made(Cluster, given), made(Plan, given), made(Trajectories, given)
    try:
        shape, teacher = shape_of(given.model), shape_of(plan.teacher) if plan.teacher else None
        rng, system = random.Random(given.seed), 0
        if given.trajectories:
            sessions = next(rollout_times.recorded(given.trajectories))
            plan = plan.model_copy(update={"prompts": len({session.group for session in sessions})})
        elif given.lengths:
            sessions = rollout_times.listed(given.lengths, plan.prompts * plan.n, plan.n, drawn.prompt, rng)
        else:
            sessions, system = drawn.draw(plan, rng), drawn.system
        found = forecast(Training(cluster, plan, shape, teacher), sessions, system=system)
    except (OSError, ValueError, KeyError, IndexError, StopIteration) as error:
        parser.error(f"{type(error).__name__}: {error}")
    if given.json:
        print(json.dumps(tree(found), indent=1))
    else:
        show(found, Console(width=120))


def shape_of(model: str) -> ModelShape:
    """Return the shape of a known model, or of a config.json."""
    return MODELS[model] if model in MODELS else ModelShape.read(Path(model))


def made(kind: type[Kind], given: argparse.Namespace) -> Kind:
    """Make a `kind` from the options that `add_options` declared."""
    return kind(**{name: getattr(given, name) for name in kind.model_fields})


def add_options(parser: argparse.ArgumentParser, kind: type[Options]) -> None:
    """An option for each field, with its default and its docstring."""
    group = parser.add_argument_group(kind.__name__.lower(), (kind.__doc__ or "").splitlines()[0])
    for name, field in kind.model_fields.items():
        flag, text = "--" + name.replace("_", "-"), (field.description or " ").replace("%", "%%")
        if field.annotation is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=field.default, help=text)
        else:
            choices = get_args(field.annotation) or None
            group.add_argument(flag, type=type(field.default), choices=choices, default=field.default, help=text)


def show(found: Forecast, console: Console) -> None:
    training = found.training
    plan, gpus = training.plan, training.cluster.gpus
    console.print(
        f"{training.shape.params / 1e9:.2f} billion parameters, {training.trained / 1e9:.3g} billion learn;"
        f" {gpus} GPUs: {training.trainers} train, {training.servers} servers of {plan.tp} GPUs generate"
        f" ({'separate' if plan.rollout_gpus else 'the same GPUs, in turn'}), {training.kv_tokens:,} tokens of KV"
        f" cache each\n{plan.prompts} x {plan.n} trajectories, {found.tokens:,} tokens, {found.sampled:,} sampled, the"
        f" longest of {found.longest:,}"
    )
    console.print(stage_table(found))
    console.print(memory_table(found.memory))
    parts = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in host_memory(training, found.tokens).items())
    console.print(f"A machine's own memory: {parts}")
    first = found.dominates
    console.print(
        f"{first.name} dominates: {first.seconds / found.seconds:.0%} of the step, bound by {bound_by(first)}"
    )
    if not found.memory.fits:
        console.print("[bold red]It does not fit.[/]")


def stage_table(found: Forecast) -> Table:
    table = Table(box=box.SIMPLE, title="seconds by stage")
    for column in ("stage", "seconds", "part", "compute", "gathering", "other", ""):
        table.add_column(column, justify="left" if column in ("stage", "") else "right")
    for stage in found.stages:
        table.add_row(
            stage.name,
            f"{stage.seconds:.3g}",
            f"{stage.seconds / found.seconds:.0%}",
            *(f"{value:.3g}" if value else "" for value in (stage.compute, stage.traffic, stage.serial)),
            stage.note,
        )
    rate = f"{found.tokens / found.seconds:,.0f} tokens/s, {found.sampled / found.seconds:,.0f} sampled"
    table.add_row("step", f"{found.seconds:.3g}", "", "", "", "", rate, style="bold")
    return table


def memory_table(memory: Memory) -> Table:
    table = Table(box=box.SIMPLE, title=f"GB of a GPU that trains, of {memory.capacity / 1e9:g}")
    table.add_column("part")
    for moment in memory.moments:
        table.add_column(moment, justify="right")
    for part in dict.fromkeys(part for parts in memory.moments.values() for part in parts):
        sizes = [parts.get(part, 0.0) for parts in memory.moments.values()]
        table.add_row(part, *(f"{size / 1e9:.2f}" if size else "" for size in sizes))
    totals = [memory.total(moment) for moment in memory.moments]
    shown = [f"{total / 1e9:.1f}" + ("" if total <= memory.capacity else " too much") for total in totals]
    table.add_row("together", *shown, style="bold")
    return table


if __name__ == "__main__":
    main()
