"""Compares what a user sees of two commits: weights, names, configs, resumed runs, plugins, CPU time, found faults.

    python -m benchmarks.commits OLD NEW --out runs/commits
    python -m benchmarks.commits OLD NEW --out runs/commits --only weights pace --arrangements quickstart bound-1
    python -m benchmarks.commits OLD NEW --out runs/commits --sglang-python .venv-sglang/bin/python

Both commits are checked out into temporary folders and run by the same interpreter. Results are below --out, by side
and commit; those that are there are not made again, so that OLD is run once, and a part that was ended goes on.

weights   tensors after three steps of small trainings, bit for bit
names     keys with defaults, metrics, parquet columns; benchmarks/commits/aliases.json has the changes that are meant
verl      what each of verl's commands that the tests know resolves to, or the refusal's text
resumed   NEW resumes a run of OLD's, and shows it in the viewer
plugins   the tests of OLD's docs/extending.md, with that page, on NEW's package
pace      CPU time of a step on both sides at once, in pairs; only where it is named
mutants   faults that OLD's tests found are found by NEW's; only where it is named

Exits 1 where something differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.commits import mutants, names, pace, plugins, resumed, verl, weights
from benchmarks.commits.sides import Side, both

Check = Callable[[Side, Side, argparse.Namespace], Iterator[str]]


def asked_for(given: argparse.Namespace, trainings: Iterable[str]) -> list[str]:
    """Return the names of `--arrangements` among a part's trainings."""
    return [name for name in trainings if name in given.arrangements]


PARTS: dict[str, Check] = {
    "weights": lambda old, new, given: weights.check(old, new, asked_for(given, weights.ARRANGEMENTS)),
    "names": lambda old, new, given: names.check(old, new),
    "verl": lambda old, new, given: verl.check(old, new, given.verl_keys),
    "resumed": lambda old, new, given: resumed.check(old, new),
    "plugins": lambda old, new, given: plugins.check(old, new),
    "pace": lambda old, new, given: pace.check(old, new, asked_for(given, pace.KINDS), given.pairs),
    "mutants": lambda old, new, given: mutants.check(old, new, given.mutants),
}
UNASKED = ("pace", "mutants")
"""Parts that run for hours, and only where they are named."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs=2, metavar="COMMIT", help="OLD and NEW, whatever git takes for one")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=[*PARTS], default=[name for name in PARTS if name not in UNASKED])
    trainings = list(dict.fromkeys([*weights.ARRANGEMENTS, *pace.KINDS]))
    parser.add_argument(
        "--arrangements",
        nargs="+",
        choices=trainings,
        default=trainings,
        metavar="NAME",
        help=f"trainings of the parts weights and pace: {', '.join(trainings)} (each part: all that it has)",
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter of both sides (this one)")
    parser.add_argument("--sglang-python", help="interpreter of an environment with SGLang")
    parser.add_argument("--verl-keys", type=Path, metavar="CSV", help="further keys of public commands, with values")
    parser.add_argument("--pairs", type=int, default=30, help="pairs of processes of the part pace (30)")
    parser.add_argument("--mutants", type=int, default=200, help="how many, of the same seed (200)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the parts, print what differs, and return the exit status."""
    given = parse(argv)
    out = given.out.absolute()
    failed = 0
    with (
        tempfile.TemporaryDirectory(prefix="commits-") as trees,
        both(given.commits, out, Path(trees), given.python, given.sglang_python) as (old, new),
    ):
        for name in given.only:
            print(f"{name}:", flush=True)
            found = list(PARTS[name](old, new, given))
            for line in found:
                print(f"  {line}", flush=True)
            print(f"{name}: {f'{len(found)} differences' if found else 'alike'}", flush=True)
            failed += bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
