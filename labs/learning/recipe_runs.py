"""A recipe's runs, one a seed, as a table and a picture: validation before, during and after training.

    python -m labs.learning.recipe_runs runs/smollm2/quickstart/seed-* [--document PAGE --picture PNG]

Each folder is the run of one seed. The table has the share of validation problems that are solved greedily, with the
95 % interval (Wilson's), by data source, too, and the hours of the training steps by the clock. `--document` puts the
table into PAGE, between `<!-- NAME -->` and `<!-- end of NAME -->` with `--name NAME`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from agentrl.observe.plot import plot_runs
from agentrl.observe.tracking import read_metrics
from agentrl.offline.intervals import of_share
from agentrl.system.json_value import JSON
from benchmarks.marked import replace_text
from benchmarks.training.quickstart_seeds import GREEDY, number

TIME = "time/step"


@dataclass(frozen=True, slots=True)
class Run:
    """The lines of a run's `metrics.jsonl` that validate, and its steps' seconds."""

    folder: Path
    validations: tuple[Mapping[str, JSON], ...]
    problems: Counter[str]
    """Number of validation problems by data source."""
    steps: int
    seconds: float

    @classmethod
    def read(cls, folder: Path, before: Path | None = None) -> Run:
        """Read a run's folder; before: the folder of the one validation before all runs, which then made none."""
        lines = read_metrics(folder / "metrics.jsonl")
        seconds = [number(line, TIME) for line in lines if TIME in line]
        first = before or folder
        problems: Counter[str] = Counter()
        for file in (first / "trajectories").glob("val_000000_greedy*.parquet"):  # one a batch of data.val_batch_size
            problems.update(pq.read_table(file, columns=["data_source"])["data_source"].to_pylist())
        validations = [line for line in lines if GREEDY in line]
        if before is not None:
            validations = [*read_metrics(before / "metrics.jsonl"), *validations]
        return cls(folder, tuple(validations), problems, len(seconds), sum(seconds))

    @property
    def sources(self) -> dict[str, str]:
        """Metric of each data source's greedy success, by the source's name."""
        found = {
            name.removeprefix("val/").removesuffix("/success_greedy"): name
            for name in self.validations[0]
            if name.startswith("val/") and name.endswith("/success_greedy") and name != GREEDY
        }
        return found if len(found) > 1 else {}


def share(value: float, problems: int) -> str:
    """Write a share with its interval: `61.5 % (51.5 to 70.6)`."""
    low, high = of_share(value, problems)
    return f"{value * 100:.1f} % ({low * 100:.1f} to {high * 100:.1f})"


def table(runs: Sequence[Run]) -> str:
    """Write a Markdown table with a row for each run."""
    first = runs[0]
    sources = first.sources
    heads = ["run", "before", "on the way", "after", *sources, "hours"]
    lines = [
        f"Greedy success on {first.problems.total()} validation problems, with the 95 % interval; by source before and "
        "after.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    for run in runs:
        before, *between, after = run.validations
        passed = [f"{number(line, GREEDY) * 100:.1f} % at step {number(line, 'step'):.0f}" for line in between]
        ends = (
            f"{share(number(before, GREEDY), run.problems.total())}",
            ", ".join(passed),
            f"{share(number(after, GREEDY), run.problems.total())} at step {number(after, 'step'):.0f}",
        )
        by_source = [
            f"{number(before, name) * 100:.1f} to {share(number(after, name), run.problems[source])}"
            for source, name in sources.items()
        ]
        hours = f"{run.seconds / 3600:.2f}"
        lines.append("| " + " | ".join([run.folder.name, *ends, *by_source, hours]) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="run folders, one a seed")
    parser.add_argument("--before", type=Path, help="folder val_only/ of the validation before all runs")
    parser.add_argument("--document", type=Path, help="page that takes the table")
    parser.add_argument("--name", default="runs", help="name of the page's marks")
    parser.add_argument("--picture", type=Path, help="PNG of all curves")
    given = parser.parse_args(arguments)
    runs = [Run.read(folder, given.before) for folder in given.folders]
    print(table(runs))
    if given.document:
        replace_text(given.document, given.name, table(runs))
    if given.picture:
        with tempfile.TemporaryDirectory() as place:
            shown: dict[str, Path] = {}
            for run in runs:
                parts = [one / "metrics.jsonl" for one in (given.before, run.folder) if one is not None]
                shown[run.folder.name] = Path(place, f"{run.folder.name}.jsonl")
                shown[run.folder.name].write_bytes(b"".join(part.read_bytes() for part in parts))
            plot_runs(shown, given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
