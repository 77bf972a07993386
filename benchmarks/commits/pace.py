"""CPU time of training steps on both sides, in pairs of new processes that run at the same time.

What disturbs the machine meets both sides of a pair alike. Two processes of one commit differ by 3 to 5 % for as long
as they live (seen on two cores: 30 pairs of stretches of the same two processes gave 1.029 and .954 with intervals
that exclude 1). So the interval is that of processes, and each pair has its own.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks.commits.sides import Side
from benchmarks.commits.verl import INSIDE
from benchmarks.commits.weights import ARRANGEMENTS, make_assets
from benchmarks.training.clean_steps import other_words

KINDS = ("quickstart", "bound-1", "ray", "sglang")
WARM, STRETCH = 4, 20
"""Steps of a process before its reading, and of the reading: disturbances of the machine are longer than a step."""
BOUND = 0.02
"""Extra CPU time, as a share, that the interval may reach."""


class Stretch(NamedTuple):
    """CPU seconds of some steps."""

    whole: float
    checks: float
    """The part of `whole` that the steps' own checks took."""


class Ratio(NamedTuple):
    """Geometric mean of the pairs' ratios with its interval of 95 %."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4f} ({self.low:.4f} to {self.high:.4f})"


def ratio(pairs: Sequence[Sequence[float]]) -> Ratio:
    """Estimate NEW over OLD of pairs (old, new), at least two, by the normal distribution of the ratios' logarithms."""
    logs = [math.log(new / old) for old, new in pairs]
    mean, half = statistics.fmean(logs), 2.0 * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def words_of(kind: str, side: Side, run: Path, steps: int) -> list[str]:
    """Write the overrides of a run that is long enough."""
    make = make_assets(side.assets)
    words = other_words(kind, side.assets, None, None) if kind == "quickstart" else None
    if words is None:
        words = make.words(ARRANGEMENTS[kind].words, steps)
    return [*words, f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={run}"]


@dataclass(frozen=True, slots=True)
class Run:
    """A process that trains."""

    process: subprocess.Popen[str]
    folder: Path
    """Folder of its output."""

    def ask(self, steps: int) -> None:
        """Have it do its next steps."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()

    def read(self) -> Stretch:
        """Wait for the CPU seconds of steps. Raises RuntimeError where the run ends instead."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("CPU "):
                return Stretch(*map(float, line.split()[1:]))
        raise RuntimeError(f"a run ended: see {self.folder}/output.log")


@contextmanager
def stepping(side: Side, kind: str, steps: int) -> Iterator[Run]:
    """Start a run that does as many steps as it is asked for, in a folder of its own."""
    folder = side.results / "pace" / kind
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    python = side.sglang_python if ARRANGEMENTS.get(kind, ARRANGEMENTS["grpo"]).sglang else side.python
    words = [str(python), str(INSIDE / "paced.py"), *words_of(kind, side, folder / "run", steps)]
    with (folder / "output.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=side.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            yield Run(process, folder)
        finally:
            process.terminate()
            process.wait(60)


def pair(old: Side, new: Side, kind: str) -> list[Stretch]:
    """Have a new process of each side do its steps at the same time; return their CPU seconds, OLD's first."""
    with ExitStack() as stack:
        runs = list[Run]()
        for side in (old, new):
            runs.append(stack.enter_context(stepping(side, kind, WARM + STRETCH + 2)))
            runs[-1].read()  # The first step, one after the other: both sides share the data and the warm-up.
        for steps in (WARM, STRETCH):
            for run in runs:
                run.ask(steps)
            readings = [run.read() for run in runs]
    return readings


def measure(old: Side, new: Side, kind: str, file: Path, pairs: int) -> None:
    """Add pairs to the file until it has so many."""
    file.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(len(read_pairs(file)), pairs):
        readings = pair(old, new, kind)
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(readings) + "\n")


def read_pairs(file: Path) -> list[tuple[Stretch, Stretch]]:
    """Read the pairs that were measured, OLD's first."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [(Stretch(*early), Stretch(*late)) for early, late in map(json.loads, lines)]


def check(old: Side, new: Side, kinds: Sequence[str], pairs: int) -> Iterator[str]:
    """Measure kinds of training, print the ratio of each, and say which cost more."""
    for kind in kinds:
        if kind == "sglang" and old.sglang_python is None:
            yield "sglang: not run: --sglang-python is not given"
            continue
        file = new.results / "pace" / f"{kind}-{old.results.name}.jsonl"
        measure(old, new, kind, file, pairs)
        read_now = read_pairs(file)
        found = ratio([(early.whole, late.whole) for early, late in read_now])
        without = ratio([(early.whole - early.checks, late.whole - late.checks) for early, late in read_now])
        shares = [
            sum(one.checks for one in side) / sum(one.whole for one in side) for side in zip(*read_now, strict=True)
        ]
        text = (
            f"{kind}: new over old {found}, {pairs} pairs; checks take {shares[0]:.1%} and {shares[1]:.1%}, "
            f"without them {without}"
        )
        print(f"  {text}", flush=True)
        if found.high > 1 + BOUND:
            yield f"{text}: want an upper end of at most {1 + BOUND}; where the interval is wide, give more --pairs"
