"""`python -m tests.structure`: the numbers of the project's structure and their bounds, as a table.

With the beginning of a number's name, what was counted; with --lower, bounds are lowered to the present numbers.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from tests.structure.bounds import BOUNDS
from tests.structure.counts import measure
from tests.structure.files import read

PROJECT = Path(__file__).resolve().parents[2]


def lowered(text: str, numbers: dict[str, float]) -> str:
    """Text of bounds.py with each bound that is above its number replaced by it."""

    def lower(line: re.Match[str]) -> str:
        name, bound = line[2], float(line[4])
        return f"{line[1]}{name}{line[3]}{min(bound, numbers.get(name, bound)):g},"

    return re.sub(r'^( *")([^"]+)(": )([\d.]+),$', lower, text, flags=re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.structure", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="print what was counted for numbers that begin so")
    parser.add_argument("--root", type=Path, default=PROJECT, help="of another checkout, to compare")
    parser.add_argument("--lower", action="store_true", help="write lower bounds where the numbers are lower")
    asked = parser.parse_args(arguments)
    measures = measure(asked.root, read(asked.root))
    if asked.name is not None:
        print("\n".join(line for name, one in measures.items() if name.startswith(asked.name) for line in one.found))
        return
    print("| | now | at most |\n|---|---|---|")
    for name, one in measures.items():
        print(f"| {name} | {one.number:g} | {BOUNDS[name]:g} |")
    if asked.lower:
        bounds = Path(__file__).parent / "bounds.py"
        text = bounds.read_text(encoding="utf-8")
        bounds.write_text(lowered(text, {name: one.number for name, one in measures.items()}), encoding="utf-8")


if __name__ == "__main__":
    main()
