"""Trainings of the arena, each in a process of its own, forked from one that has imported torch."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import agentrl
from agentrl.config.sections.trainer import QuickstartConfig
from agentrl.observe.plain import PlainDisplay
from agentrl.observe.tracking import read_metrics
from agentrl.quickstart.assets import make_data, make_policy
from agentrl.system.json_value import JSON
from benchmarks.forked import forked
from examples.gigpo import walk
from labs.arena.contenders import Contender

Task = Literal["calls", "walk"]
TASKS: tuple[Task, ...] = get_args(Task)
UNGROUPED = ("reinforce_plus_plus", "remax", "gae", "bi_level_gae", "decoupled_gae")
"""Estimators that compare no trajectories of a prompt: they see as many, of more prompts."""
DONE, EXPLAINED = "done.json", "critic/explained_variance"


@dataclass(frozen=True, slots=True)
class Match:
    """One contender on one task."""

    task: Task
    contender: Contender
    seed: int
    steps: int

    @property
    def label(self) -> str:
        return f"{self.task}, {self.contender.ray} {self.contender.name}, seed {self.seed}"

    def folder(self, out: Path) -> Path:
        name = self.contender.name.replace(" ", "_").strip("()")
        return out / f"{self.task}-{self.seed}" / f"{self.contender.ray}-{name}-{self.steps}"


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a finished training."""

    success: list[tuple[int, float]]
    """(trajectories sampled for training until then, validation success), before the first step and later."""
    training: float
    """Mean over the steps of the training trajectories' success."""
    cpu_seconds: float
    explained: float | None = None
    """Variance of the returns that the critic explains, mean over the last half of the steps; None: no critic."""

    @staticmethod
    def from_folder(match: Match, out: Path) -> Result | None:
        """Read a finished run's; None where there is none."""
        folder = match.folder(out)
        try:
            cpu = json.loads((folder / DONE).read_text())["cpu_seconds"]
        except FileNotFoundError:
            return None
        lines = read_metrics(folder / "metrics.jsonl")
        success = [
            (int(number(line["step"])) * 256, number(line["val/success_sampled"]))
            for line in lines
            if "val/success_sampled" in line
        ]
        rates = [number(line["success/rate"]) for line in lines if "success/rate" in line]
        seen = [number(line[EXPLAINED]) for line in lines if EXPLAINED in line]
        half = seen[len(seen) // 2 :]
        return Result(success, sum(rates) / len(rates), cpu, sum(half) / len(half) if half else None)


def number(value: JSON) -> float:
    assert isinstance(value, int | float)
    return float(value)


def finish(matches: Sequence[Match], out: Path, processes: int) -> list[Match]:
    """Run what is not finished; returns those that failed."""
    for task, seed in dict.fromkeys((match.task, match.seed) for match in matches):
        log = out / f"{task}-{seed}" / "assets.log"
        if forked(partial(_prepare, task, seed, out), log) != 0:
            raise SystemExit(f"the tasks could not be made, see {log}")
    waiting = [match for match in matches if not (match.folder(out) / DONE).exists()]
    with ThreadPoolExecutor(processes) as threads:
        ended = threads.map(lambda match: _run(match, out), waiting)
        return [match for match, status in zip(waiting, ended, strict=True) if status != 0]


def _run(match: Match, out: Path) -> int:
    folder = match.folder(out)
    shutil.rmtree(folder, ignore_errors=True)  # what was interrupted begins anew
    status = forked(partial(_train, match, out), folder.with_suffix(".log"))
    print(f"{match.label}: {'done' if status == 0 else 'failed'}", flush=True)
    return status


def assets(task: Task, seed: int, out: Path) -> Path:
    return out / f"{task}-{seed}" / "assets"


def keys(match: Match, out: Path) -> dict[str, JSON]:
    """Return the keys of a training."""
    many = 256 if match.contender.name in UNGROUPED else 32
    mini = 128 if many == 256 else 16
    own: dict[str, JSON] = {
        "trainer.seed": match.seed,
        "data.seed": match.seed,
        "data.train_batch_size": many,
        "actor_rollout_ref.rollout.n": 256 // many,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.actor.clip_ratio_low": 0.2,
        "actor_rollout_ref.actor.clip_ratio_high": 0.28,
        "actor_rollout_ref.actor.optim.lr": 5e-4,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "linear",
        "trainer.total_training_steps": match.steps,
        "trainer.test_freq": 5,
        "trainer.save_freq": -1,
        "trainer.device": "cpu",
        "trainer.logger": ["jsonl"],
        "trainer.default_local_dir": str(match.folder(out)),
    }
    place = assets(match.task, match.seed, out)
    quickstart: dict[str, JSON] = {"quickstart.dir": str(place), "quickstart.seed": match.seed}
    task = quickstart if match.task == "calls" else walk.keys(place)
    return own | task | dict(match.contender.keys)


def _prepare(task: Task, seed: int, out: Path) -> None:
    place, display = assets(task, seed, out), PlainDisplay("assets")
    if task == "walk":
        walk.make(place, seed, display)
    else:
        own = QuickstartConfig(dir=str(place), seed=seed)
        make_data(place, own, display)
        make_policy(place, own, "cpu", display)


def _train(match: Match, out: Path) -> None:
    agentrl.train(keys(match, out))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    cpu = sum(one.ru_utime + one.ru_stime for one in used)
    (match.folder(out) / DONE).write_text(json.dumps({"cpu_seconds": cpu}))
