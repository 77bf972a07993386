"""Reports of suites: numbers with intervals, and two reports in one table."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from agentrl.errors import DataError
from agentrl.offline.intervals import of_mean, of_share
from agentrl.suites.contract import Suite
from agentrl.system.json_value import JSON
from agentrl.system.publish import published

REPORT, SCORES = "report.json", "scores.jsonl"
COMPARED = ("suite", "version")
"""Fields in which two reports must agree."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A task with its number: the mean over its responses. None: no response could be scored."""

    part: str
    id: str
    score: float | None


@dataclass(frozen=True, slots=True)
class Number:
    """The number of a part or of a group."""

    mean: float | None
    """None: no task is scored."""
    interval: tuple[float, float] | None
    """Ends of the 95 % interval of a part."""
    scored: int
    tasks: int
    members: tuple[str, ...] = ()
    """Members of a group."""


def numbers_of(suite: Suite, scored: Sequence[Scored], wanted: Mapping[str, int]) -> dict[str, Number]:
    """Return the numbers of each part and group; `wanted`: tasks of each part."""
    found: dict[str, Number] = {}
    for part, count in wanted.items():
        scores = [one.score for one in scored if one.part == part and one.score is not None]
        mean = fmean(scores) if scores else None
        found[part] = Number(mean, None if mean is None else of_share(mean, len(scores)), len(scores), count)
    for name, group in suite.groups.items():
        members = [found[member] for member in group.members if member in found]
        means = [member.mean for member in members if member.mean is not None]
        if len(means) == len(group.members):
            weights = [member.scored if group.by_rows else 1 for member in members]
            mean = sum(value * weight for value, weight in zip(means, weights, strict=True)) / sum(weights)
            scored_of, tasks = sum(one.scored for one in members), sum(one.tasks for one in members)
            found[name] = Number(mean, None, scored_of, tasks, tuple(group.members))
    return found


def write(folder: Path, report: Mapping[str, JSON], scored: Sequence[Scored]) -> None:
    """Write the report, and the score of each task. Raises TrainingError on a full disk."""
    with published(folder / SCORES) as temporary:
        lines = (json.dumps({"part": one.part, "id": one.id, "score": one.score}) for one in scored)
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    with published(folder / REPORT) as temporary:
        temporary.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read(folder: Path) -> tuple[dict[str, JSON], dict[tuple[str, str], float | None]]:
    """Read what `write` wrote. Raises DataError for a folder without it."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        lines = (folder / SCORES).read_text(encoding="utf-8").splitlines()
        scores = {(one["part"], one["id"]): one["score"] for one in map(json.loads, lines)}
        if not all(isinstance(report[name], str) for name in COMPARED):
            raise ValueError("a field of the report is missing")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder}: expected {REPORT} and {SCORES} of agentrl.evaluate --suite, and they cannot be read ({error})"
        ) from error
    return report, scores


def rows_of(numbers: Mapping[str, Number]) -> Iterator[list[str]]:
    """Make the lines of a report's table, without its head."""
    for name, one in numbers.items():
        mean = "-" if one.mean is None else f"{one.mean:.4f}"
        ends = "-" if one.interval is None else f"{one.interval[0]:.4f} to {one.interval[1]:.4f}"
        about = f"of {', '.join(one.members)}" if one.members else ends
        yield [name, f"{one.scored} of {one.tasks}", mean, about]


def compare(first: Path, second: Path) -> list[list[str]]:
    """Make the lines of the table of two reports, over the tasks that both have scored.

    The difference is of pairs; its interval is 1.96 standard errors of their mean wide on each side. Raises DataError
    for reports of other suites or versions.
    """
    (one, scores), (other, others) = read(first), read(second)
    for name in COMPARED:
        if one[name] != other[name]:
            raise DataError(
                f"two reports of one suite are compared: {first} has {name} {one[name]}, {second} {other[name]}"
            )
    lines = []
    for part in dict.fromkeys(part for part, _ in scores):
        pairs = [
            (score, another)
            for key, score in scores.items()
            if key[0] == part and score is not None and (another := others.get(key)) is not None
        ]
        if pairs:
            differences = np.array([another - score for score, another in pairs])
            low, high = of_mean(differences, [1] * len(pairs)) or (-math.inf, math.inf)
            means = [f"{fmean(score for score, _ in pairs):.4f}", f"{fmean(another for _, another in pairs):.4f}"]
            lines.append([part, str(len(pairs)), *means, f"{differences.mean():+.4f}", f"{low:+.4f} to {high:+.4f}"])
    if not lines:
        raise DataError(f"{first} and {second} have no scored task in common")
    return lines
