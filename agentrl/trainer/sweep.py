"""The jobs of a command, one after another, with a table at the end of several."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from agentrl.config import Config, PreferencesConfig, SFTConfig
from agentrl.config.sweep import Job
from agentrl.errors import NothingLeft, UserError, first_line
from agentrl.system.visible import complain

ConfigT = TypeVar("ConfigT", Config, SFTConfig, PreferencesConfig)

SHOWN = (
    "val/success_sampled",
    "val/success_greedy",
    "val/score_sampled",
    "val/score_greedy",
    "sft/loss",
    "preferences/loss",
    "val/loss",
    "val/accuracy",
)
"""Metrics in the table, where jobs have them."""


@dataclass(slots=True)
class Outcome:
    """How a job ended."""

    name: str
    folder: str
    status: str
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    failed: bool = False


def run_jobs(jobs: Sequence[Job[ConfigT]], work: Callable[[ConfigT], Mapping[str, float]]) -> None:
    """Do the work of each job in this process. A job that fails does not keep the next from running.

    Raises the error of a single job's work, and UserError after the last where one of several failed.
    """
    if len(jobs) == 1 and not jobs[0].name:
        work(jobs[0].config)
        return
    outcomes: list[Outcome] = []
    try:
        for number, job in enumerate(jobs, 1):
            print(f"job {number} of {len(jobs)}: {job.name}", flush=True)
            outcomes.append(run_one(job, work))
    finally:
        print(table(outcomes), flush=True)
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        names = "; ".join(outcome.name for outcome in failed)
        raise UserError(f"{len(failed)} of {len(jobs)} jobs failed: {names}. The same command goes on with them")


def run_one(job: Job[ConfigT], work: Callable[[ConfigT], Mapping[str, float]]) -> Outcome:
    """Do one job, and report a UserError of it at once."""
    begun, metrics, failed = time.monotonic(), dict[str, float](), False
    try:
        metrics = dict(work(job.config))
        status = "done"
    except NothingLeft:
        status = "was done before"
    except UserError as error:
        complain(error)
        status, failed = f"failed: {first_line(error)[:80]}", True
    return Outcome(job.name, job.config.trainer.default_local_dir, status, time.monotonic() - begun, metrics, failed)


def table(outcomes: Sequence[Outcome]) -> str:
    """Write a line for each job, in columns."""
    shown = [name for name in SHOWN if any(name in outcome.metrics for outcome in outcomes)]
    rows = [["job", *(name.removeprefix("val/") for name in shown), "seconds", "status", "folder"]]
    for outcome in outcomes:
        numbers = [f"{outcome.metrics[name]:.4g}" if name in outcome.metrics else "-" for name in shown]
        rows.append([outcome.name, *numbers, f"{outcome.seconds:.0f}", outcome.status, outcome.folder])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
