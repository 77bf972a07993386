"""Steps with slow tools: rollouts and updates in turn against rollouts beside updates, on real SGLang on the CPU.

    .venv-sglang/bin/python -m benchmarks.training.async_steps [--medians 0 0.5 2] [--bounds 0 1 2 4 8]

The quickstart's data and its shape of a step (32 prompts x 8 trajectories), a policy that an embedded run of ten steps
has taught to call tools, and one SGLang server. Both tools are delayed log-normally (sigma 1), by a median of 0, 0.5
(at most 5) or 2 seconds (at most 30); the delay of a call depends on its trajectory's name and its arguments alone, so
that every run meets the same ones. Updates change the policy by next to nothing, so that steps are alike. Steps are
counted once a pipeline is full: after the first in turn, and after `max_staleness` + 1 otherwise. As a slow trajectory
holds up one step in so many, whole rounds of them are counted, and a step's time is their mean.

The floor of a step in which nothing is thrown away is the longer of a step in turn with instant tools and the longest
trajectory over `max_staleness` + 1, both as measured here in turn (means). As a mean hides that the longest trajectory
of several steps holds up all of them, a second floor is the least time in which every trajectory fits, with its own
tools and as long at the engine as the longest in turn, into the `max_staleness` + 1 steps that follow the version of
its oldest token. Each run's figures are kept in `--out`, so that the script, begun again, does what is left, and prints
the table of all.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import psutil

import agentrl
from agentrl.engines.servers.start import start_all
from agentrl.engines.sglang.options import SGLangArguments
from agentrl.engines.sglang.process import SGLangProcess
from agentrl.rollouts.local import LocalRollouts
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Numbers
from agentrl.tool import Tool, ToolResponse
from agentrl.train import training
from agentrl.trajectory.parquet import read_trajectories
from benchmarks.forked import forked
from tools.calculator import CalculatorTool
from tools.search import SearchTool

PROMPTS, EACH = 32, 8
MOST = {0.0: 0.0, 0.5: 5.0, 2.0: 30.0}
"""Longest delay of a call by the median."""
LENGTH = 512
"""Tokens of the longest context, prompt and response."""
TAUGHT = 10
"""Steps of the embedded run."""
ENDLESS = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """A run."""

    out: Path
    median: float
    """Seconds of a tool."""
    bound: int
    depth: int
    steps: int
    """Steps that are counted."""
    publish_every: int
    keeps: bool
    """Requests in flight keep the keys and values of older weights."""

    @property
    def folder(self) -> Path:
        ahead = f"-{self.depth}-{self.publish_every}{'-kept' * self.keeps}" if self.bound else ""
        return self.out / f"tools-{1000 * self.median:.0f}-bound-{self.bound}{ahead}"

    @property
    def figures(self) -> Path:
        return self.folder.with_suffix(".json")

    @property
    def warm_up(self) -> int:
        """Steps until the pipeline is full."""
        return self.bound + 1


def shared(out: Path) -> dict[str, JSON]:
    """Return the keys of all runs."""
    return {
        "quickstart.dir": str(out / "assets"),
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": LENGTH // 2,
        "data.max_response_length": LENGTH // 2,
        "data.val_files": None,
        "actor_rollout_ref.rollout.n": EACH,
        "trainer.device": "cpu",
        "trainer.show_trajectory_freq": -1,
        "trainer.resume_mode": "disable",
    }


def teach(out: Path) -> None:
    """Train the policy whose steps are measured."""
    agentrl.train(
        {**shared(out), "trainer.total_training_steps": TAUGHT, "trainer.default_local_dir": str(out / "taught")}
    )


def keys(case: Case, url: str) -> dict[str, JSON]:
    """Return the keys of a run."""
    ahead: dict[str, JSON] = {
        "async_training.max_staleness": case.bound,
        "async_training.depth": case.depth,
        "async_training.publish_every": case.publish_every,
        "async_training.keep_kv_cache": case.keeps,
    }
    return {
        **shared(case.out),
        **(ahead if case.bound else {}),
        "actor_rollout_ref.model.path": str(case.out / "taught" / "policy"),
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.server_urls": [url],
        "actor_rollout_ref.actor.optim.lr": 1e-7,
        "algorithm.filter_groups.enable": False,  # each step learns from all its trajectories
        "trainer.save_freq": ENDLESS,
        "trainer.total_training_steps": ENDLESS,
        "trainer.default_local_dir": str(case.folder),
    }


def delayed(tool: type[Tool], median: float) -> Callable[..., Awaitable[ToolResponse]]:
    """Return the tool's `execute`, which takes its time first."""
    execute = tool.execute

    async def slow(self: Tool, instance_id: str, arguments: dict[str, Any]) -> ToolResponse:
        drawn = random.Random(f"{instance_id} {arguments}").lognormvariate(math.log(median), 1.0)
        await asyncio.sleep(min(drawn, MOST[median]))
        answer = execute(self, instance_id, arguments)
        assert inspect.isawaitable(answer), "tools of the quickstart stream nothing"
        return cast(ToolResponse, await answer)

    return slow


def measure(case: Case, url: str, server: int) -> None:
    """Train, and write down what the steps took."""
    opened: list[LocalRollouts] = []

    def opens(*args: Any, **kwargs: Any) -> LocalRollouts:
        opened.append(LocalRollouts(*args, **kwargs))
        return opened[0]

    def idle() -> float:
        return opened[0].loop.run(opened[0].idle_seconds())

    with ExitStack() as stack:
        if case.median:
            for tool in (CalculatorTool, SearchTool):
                stack.enter_context(patch.object(tool, "execute", delayed(tool, case.median)))
        stack.enter_context(patch("agentrl.rollouts.local.LocalRollouts", opens))
        iterator = iter(stack.enter_context(training(keys(case, url))))
        before: list[float] = []
        for _ in range(case.warm_up):
            begun = time.perf_counter()
            next(iterator)
            before.append(time.perf_counter() - begun)
        steps: list[Numbers] = []
        cpu, served, began, idle_before = time.process_time(), cpu_of(server), time.perf_counter(), idle()
        for _ in range(case.steps):
            begun = time.perf_counter()
            metrics = next(iterator)
            steps.append({**metrics, "wall": time.perf_counter() - begun})
        wall = time.perf_counter() - began
        found = {
            "wall": wall,
            "engine_idle": (idle() - idle_before) / wall,
            "trainer_cpu": (time.process_time() - cpu) / case.steps,
            "server_cpu": (cpu_of(server) - served) / case.steps,
        }
    case.figures.write_text(json.dumps({**found, "steps": steps, **lengths(case, before)}))


def cpu_of(pid: int) -> float:
    """Return the CPU-seconds of a server's processes."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def lengths(case: Case, before: Sequence[float]) -> dict[str, JSON]:
    """Look at the trajectories of the counted steps: how long they took, how late they were, which never came.

    before: seconds of the steps that are not counted.
    """
    spans: dict[int, float] = {}
    longest: list[tuple[float, float]] = []
    rows: list[tuple[float, int]] = []
    trained: set[int] = set()
    last = case.warm_up + case.steps
    for step in range(1, last + 1):
        lasted = []
        for one in read_trajectories(case.folder / "trajectories" / f"train_{step:06}.parquet"):
            _, of_step, number, _ = one.uid.split("/")
            trained.add((int(of_step) - 1) * PROMPTS + int(number))
            tools, generating = one.metrics.get("tool_seconds", 0.0), one.metrics.get("generate_seconds", 0.0)
            lasted.append((tools + generating, generating))
            oldest = min(span.version for transcript in one.transcripts for span in transcript.versions)
            spans[oldest] = max(tools, spans.get(oldest, 0.0))
            if step > case.warm_up:
                rows.append((tools + generating, step - 1 - oldest))
        if step > case.warm_up:
            longest.append(max(lasted))
    rows.sort()
    tenth = rows[-len(rows) // 10 :]
    due = range(PROMPTS * (last - case.bound))
    return {
        "before": list(before),
        "spans": [[oldest, oldest + case.bound + 1, tools] for oldest, tools in sorted(spans.items())],
        "longest": statistics.mean(lasted for lasted, _ in longest),
        "longest_generating": statistics.mean(generating for _, generating in longest),
        "lag": statistics.mean(lag for _, lag in rows),
        "lag_of_the_longest": statistics.mean(lag for _, lag in tenth),
        "most_lag": max(lag for _, lag in rows),
        "due": len(due),
        "due_and_trained": sum(one in trained for one in due),
    }


def least(spans: Iterable[tuple[int, int, float]], before: Sequence[float], steps: int) -> float:
    """Return the least seconds of the steps behind those that took `before`.

    spans: (first, end, seconds): the steps from `first` on, of all, to before `end` take as long or longer. What a
    span lacks is added to its last step, which most others share; those that end behind the last step are left out.
    """
    taken = [*before, *[0.0] * steps]
    for first, end, seconds in sorted(spans, key=lambda span: span[1]):
        if len(before) < end <= len(taken):
            taken[end - 1] += max(0.0, seconds - sum(taken[first:end]))
    return sum(taken[len(before) :])


def table(out: Path) -> str:
    """Write all runs in `out` as a table."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("tools-*.json"))}
    columns = (
        "tools, s | bound | depth | published every | caches | step, s | times as fast | floor, s | floor over step | "
        "second floor, s | over step | engine idle | trainer idle | CPU, s: trainer, server | "
        "lag: mean, longest tenth, most | due and trained"
    )
    lines = [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    instant = found.get("tools-0-bound-0")
    for name, one in found.items():
        _, median, _, bound, *ahead = name.split("-")
        ahead += [""] * (3 - len(ahead))
        base = found.get(f"tools-{median}-bound-0")
        if instant is None or base is None:
            continue
        step = one["wall"] / len(one["steps"])
        in_turn = base["wall"] / len(base["steps"])
        alone = instant["wall"] / len(instant["steps"])
        floor = max(alone, base["longest"] / (int(bound) + 1))
        spans = [(first, end, tools + base["longest_generating"]) for first, end, tools in one["spans"]]
        second = max(alone, least(spans, one["before"], len(one["steps"])) / len(one["steps"]))
        waits = statistics.mean(it.get("async/trainer_idle", it["time/rollout"] / it["wall"]) for it in one["steps"])
        cells = [
            f"{int(median) / 1000:g}",
            bound,
            *ahead,
            f"{step:.2f}",
            f"{in_turn / step:.2f}",
            f"{floor:.2f}",
            f"{floor / step:.2f}",
            f"{second:.2f}",
            f"{second / step:.2f}",
            f"{one['engine_idle']:.0%}",
            f"{waits:.0%}",
            f"{one['trainer_cpu']:.2f}, {one['server_cpu']:.2f}",
            f"{one['lag']:.2f}, {one['lag_of_the_longest']:.2f}, {one['most_lag']}",
            f"{one['due_and_trained']} of {one['due']}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def counted(steps: int, bound: int) -> int:
    """Return how many steps are counted of a run."""
    return math.ceil(steps / (bound + 1)) * (bound + 1) if bound else math.ceil(steps * 2 / 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/async-steps"))
    parser.add_argument("--medians", type=float, nargs="+", choices=list(MOST), default=[0.0, 0.5, 2.0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--depth", type=int, default=8, help="at most; it is no more than the bound")
    parser.add_argument("--publish-every", type=int, default=1, help="versions; for bounds above 0")
    parser.add_argument("--keep-kv-cache", action="store_true", help="of requests in flight, over changes of weights")
    parser.add_argument("--steps", type=int, default=6, help="that are counted at least; in turn two thirds of them")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    publishing = given.publish_every, given.keep_kv_cache
    cases = [
        Case(out, median, bound, min(given.depth, bound), counted(given.steps, bound), *publishing)
        for median in given.medians
        for bound in given.bounds
    ]
    cases = [case for case in cases if not case.figures.exists()]
    if not (out / "taught" / "policy").exists() and forked(partial(teach, out), out / "taught.log"):
        raise SystemExit(f"the policy was not taught, see {out / 'taught.log'}")
    if cases:
        model = str(out / "taught" / "policy")
        server = SGLangProcess(SGLangArguments(model, device="cpu", context_length=LENGTH), None, out / "server.log")
        try:
            asyncio.run(start_all([server], 600.0, print))
            assert server.pid is not None
            for case in cases:
                began = time.monotonic()
                if forked(partial(measure, case, server.url, server.pid), case.folder.with_suffix(".log")):
                    raise SystemExit(f"{case.folder} failed, see {case.folder.with_suffix('.log')}")
                print(f"{case.folder.name}: {time.monotonic() - began:.0f} s", flush=True)
        finally:
            server.stop()
    print(table(out))


if __name__ == "__main__":
    main()
