"""`python -m tests.structure`: the numbers of the project's structure, as a table; a report, no test fails by it.

With the beginning of a number's name, what was counted. With --against REF, the numbers of that commit next to the
present ones, and what changed most.
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.structure.counts import Measure, measure
from tests.structure.files import read

PROJECT = Path(__file__).resolve().parents[2]
SHOWN = 10
"""Items of a number that came or went, of each at most."""


def measures_at(root: Path, reference: str) -> dict[str, Measure]:
    """Count a commit of the repository in `root`, whose files are unpacked to a folder for the time.

    Raises SystemExit with git's sentence where the commit does not exist.
    """
    done = subprocess.run(["git", "-C", str(root), "archive", "--format=tar", reference], capture_output=True)
    if done.returncode:
        raise SystemExit(f"--against {reference}: {done.stderr.decode(errors='replace').strip()}")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return measure(Path(folder), read(Path(folder)))


def changes(before: Measure, now: Measure) -> list[str]:
    """Items that one of both has alone, those of a larger size first as `found` lists them."""
    gone = [f"- {one}" for one in before.found if one not in set(now.found)]
    come = [f"+ {one}" for one in now.found if one not in set(before.found)]
    return gone[:SHOWN] + come[:SHOWN]


def compared(before: Mapping[str, Measure], now: Mapping[str, Measure]) -> list[str]:
    """Lines of a table with both numbers, and under it what changed of each number that differs."""
    rows = [f"| {name} | {before[name].number:g} | {one.number:g} |" for name, one in now.items()]
    differing = [name for name, one in now.items() if one.number != before[name].number]
    detail = [line for name in differing for line in (f"\n{name}:", *changes(before[name], now[name]))]
    return ["| | before | now |\n|---|---|---|", *rows, *detail]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print what was counted for numbers that begin so")
    parser.add_argument("--root", type=Path, default=PROJECT, help="of another checkout")
    parser.add_argument("--against", metavar="REF", help="a commit to compare with, such as main or HEAD~5")
    asked = parser.parse_args(arguments)
    measures = measure(asked.root, read(asked.root))
    if asked.name is not None:
        print("\n".join(line for name, one in measures.items() if name.startswith(asked.name) for line in one.found))
    elif asked.against is not None:
        print("\n".join(compared(measures_at(asked.root, asked.against), measures)))
    else:
        print("| | now |\n|---|---|")
        print("\n".join(f"| {name} | {one.number:g} |" for name, one in measures.items()))


if __name__ == "__main__":
    main()
