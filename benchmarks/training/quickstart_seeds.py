"""The main job over seeds: how many of them does its recipe carry to the end?

    python -m benchmarks.training.quickstart_seeds [--out runs/seeds] [--processes 2] [--document]
    python -m benchmarks.training.quickstart_seeds --commit

Seed S is `quickstart.seed=S trainer.seed=S data.seed=S`: other facts and questions, another policy and warm-up, other
random numbers. The first command runs `python -m agentrl.train` with its defaults for each of `SEEDS`, continues where
it was ended, and prints a table and all curves; `--document` puts both into docs/quickstart.md. It exits with 1
where fewer than `EXPECTED` seeds reach a success of 90 % in a validation. The recipe was chosen on other seeds: 11 to
23, 101 to 104, 201 to 218, 301, 302, 401 to 404 and 501 to 533. The second command trains ten steps with a seed that
the commit's hash gives, or fewer where success is 90 % before, prints the curve, and exits with 1 where the run stands
still or engine and trainer disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agentrl.observe.tracking import read_metrics
from agentrl.system.json_value import JSON
from benchmarks.marked import replace_text

SEEDS = tuple(range(541, 561))
"""Fixed together with the recipe, before any of them was run; none is left out."""
EXPECTED = 20
ENOUGH = 0.9
EARLY_STEPS = 10
GAP, LARGEST_GAP = "rollout/logprob_gap_max_abs", 1e-4
SAMPLED, GREEDY, RATE = "val/success_sampled", "val/success_greedy", "success/rate"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "quickstart.md"
PICTURE = "images/seeds.png"


@dataclass(frozen=True, slots=True)
class Run:
    """The course of a run: success by step of training, and of validation by (step, sampled, greedy)."""

    seed: int
    training: tuple[float, ...]
    validation: tuple[tuple[int, float, float], ...]
    cpu_seconds: float

    @property
    def reaches(self) -> bool:
        """True where a validation after the first finds a sampled success of `ENOUGH`."""
        return any(sampled >= ENOUGH for _, sampled, _ in self.validation[1:])

    @property
    def ends(self) -> float:
        """Sampled success of the last validation."""
        return self.validation[-1][1]

    @classmethod
    def read(cls, seed: int, folder: Path) -> Run:
        """Read `metrics.jsonl` of a whole run, and `cpu_seconds.json` of its process."""
        lines = read_metrics(folder / "runs" / "quickstart" / "metrics.jsonl")
        return cls(
            seed,
            tuple(number(line, RATE) for line in lines if RATE in line),
            tuple(
                (int(number(line, "step")), number(line, SAMPLED), number(line, GREEDY))
                for line in lines
                if SAMPLED in line
            ),
            json.loads((folder / "cpu_seconds.json").read_text()),
        )


def number(line: Mapping[str, JSON], key: str) -> float:
    value = line[key]
    assert isinstance(value, (int, float)), f"{key}: {value!r}"
    return float(value)


def words(seed: int) -> list[str]:
    return [f"quickstart.seed={seed}", f"trainer.seed={seed}", f"data.seed={seed}"]


def run_whole(seed: int, out: Path) -> Run:
    """Run the main job for a seed, unless it has run whole already. Raises CalledProcessError."""
    folder = out / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "cpu_seconds.json"
    if not done.exists():
        command = [sys.executable, "-m", "agentrl.train", *words(seed)]
        tree = Path(__file__).resolve().parents[2]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output=f"see {folder / 'output.txt'}")
        done.write_text(json.dumps(round(used.ru_utime + used.ru_stime, 1)))
    run = Run.read(seed, folder)
    print(f"seed {seed}: {curve(run.training)}, then {run.ends:.1%} sampled", flush=True)
    return run


def curve(values: Sequence[float]) -> str:
    """Write shares as `.04 .22 1.0`."""
    return " ".join(f"{value:.2f}".removeprefix("0") if value < 0.995 else "1.0" for value in values)


def table(runs: Sequence[Run]) -> str:
    """Write a Markdown table with a row for each run, and the sentence that counts them."""
    below = "; ".join(f"seed {run.seed} ends at {run.ends:.1%}" for run in runs if run.ends < ENOUGH)
    before = statistics.median(run.validation[0][1] for run in runs)
    cost = [run.cpu_seconds for run in runs]
    lines = [
        f"{sum(run.reaches for run in runs)} of {len(runs)} seeds reach a sampled success of {ENOUGH:.0%} in a "
        f"validation, and {sum(run.ends >= ENOUGH for run in runs)} end there{f' ({below})' if below else ''}. Before "
        f"GRPO the median success is {before:.1%}. A whole job took {statistics.median(cost):.0f} CPU-seconds (median; "
        f"{min(cost):.0f} to {max(cost):.0f}).",
        "",
        f"![success of {len(runs)} seeds]({PICTURE})",
        "",
        "| seed | sampled success before | step 5 | step 10 | step 20 | after | greedy before | after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        by_step = {step: sampled for step, sampled, _ in run.validation}
        first, last = run.validation[0], run.validation[-1]
        shown = [first[1], *(by_step[step] for step in (5, 10, 20)), last[1], first[2], last[2]]
        lines.append(f"| {run.seed} | " + " | ".join(f"{value:.1%}" for value in shown) + " |")
    return "\n".join(lines)


def documented(seed: int) -> dict[str, tuple[float, float]]:
    """Read a seed's success before and after, by metric, from its row of the table on docs/quickstart.md."""
    cells = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {seed} |"))
    before, *_, after, greedy_before, greedy_after = (float(cell.strip(" %")) / 100 for cell in cells.split("|")[2:-1])
    return {SAMPLED: (before, after), GREEDY: (greedy_before, greedy_after)}


def draw(runs: Sequence[Run], out: Path) -> None:
    """Every run's success in training and in validation, sampled, against the step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    training, validation = figure.subplots(1, 2, sharey=True)
    for run in runs:
        training.plot(range(1, len(run.training) + 1), run.training, color="#0072b2", alpha=0.45, linewidth=1.1)
        steps, sampled, _ = zip(*run.validation, strict=True)
        validation.plot(steps, sampled, color="#d55e00", alpha=0.45, linewidth=1.1, marker="o", markersize=3)
    for axes, title in ((training, "training success"), (validation, "validation success, sampled")):
        axes.set_title(f"{title}, {len(runs)} seeds", fontsize=11)
        axes.set_xlabel("step")
        axes.set_ylim(-0.03, 1.03)
        axes.axhline(ENOUGH, color="#999999", linewidth=0.8, linestyle=":")
        axes.grid(True, alpha=0.25)
    FigureCanvasAgg(figure).print_png(str(out))


def document(runs: Sequence[Run]) -> None:
    """Put table and picture into docs/quickstart.md."""
    replace_text(PAGE, "seeds", table(runs))
    draw(runs, PAGE.parent / PICTURE)


def seed_of(commit: str) -> int:
    """A seed from a commit's hash, beyond those that the recipe was chosen on or documented with."""
    return 1000 + int(commit[:8], 16) % 1_000_000


def stands_still(rates: Sequence[float]) -> bool:
    """Tell whether success in training is not above twice its start, nor at `ENOUGH`, at the last of the steps."""
    return rates[-1] <= 2 * rates[0] and rates[-1] < ENOUGH


def run_early(commit: str) -> int:
    """Train at most `EARLY_STEPS` steps of the main job with the commit's seed, until success is `ENOUGH`.

    Returns the exit status: 1 where success stands still, or where engine and trainer disagree on a log-prob.
    """
    import agentrl

    seed = seed_of(commit)
    rates, gap = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"quickstart.dir={folder}/assets", f"trainer.default_local_dir={folder}/run"]
        keys += ["trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1"]
        with agentrl.training([*words(seed), *keys]) as run:
            for metrics in run:
                rates.append(metrics[RATE])
                gap = max(gap, metrics[GAP])
                if len(rates) == EARLY_STEPS or rates[-1] >= ENOUGH:
                    break
    still = stands_still(rates)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(f"seed {seed} (commit {commit[:12]}), success in training by step: {curve(rates)}")
    print(f"{'stands still' if still else 'learns'}, after {used.ru_utime + used.ru_stime:.0f} CPU-seconds")
    if gap >= LARGEST_GAP:
        print(f"{GAP} reaches {gap:g}, expected below {LARGEST_GAP:g}: the engine samples by another policy")
    return 1 if still or gap >= LARGEST_GAP else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/seeds"), help="a folder for each seed's run")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--document", action="store_true", help="write table and picture into docs/quickstart.md")
    parser.add_argument("--commit", action="store_true", help="ten steps with one more seed, from HEAD's hash")
    given = parser.parse_args()
    if given.commit:
        return run_early(subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip())
    with ThreadPoolExecutor(given.processes) as pool:
        runs = list(pool.map(lambda seed: run_whole(seed, given.out.resolve()), SEEDS))
    print(table(runs))
    if given.document:
        document(runs)
    return 0 if sum(run.reaches for run in runs) >= EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
