"""Solved puzzles for a warm-up: `python -m examples.reasoning_gym.solved ROWS OUT`.

Reads the puzzles of ROWS, and writes conversations with the right answers of those that can be solved from their
words: sums, common divisors, counted letters and words spelt backward. Other kinds are left out.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from data_prep.files import write_parquet

SOLVERS: dict[str, tuple[str, Callable[..., object]]] = {
    "chain_sum": (r"(\d+) ([+-]) (\d+) =", lambda a, sign, b: int(a) + int(b) if sign == "+" else int(a) - int(b)),
    "gcd": (r"numbers: (\d+), (\d+)", lambda a, b: math.gcd(int(a), int(b))),
    "letter_counting": (r'letter "(.)" appear in the text: "(.*)"', lambda letter, text: text.lower().count(letter)),
    "spell_backward": (r"nus\): (\w+)", lambda word: word[::-1]),
}
"""By kind, a pattern of what a puzzle asks, and the function of the pattern's groups that answers it."""


def solution(kind: str, puzzle: str) -> str | None:
    """Solve a puzzle; None where its kind has no solver."""
    pattern, solve = SOLVERS.get(kind, ("", None))
    found = re.search(pattern, puzzle)
    return None if solve is None or found is None else str(solve(*found.groups()))


def main() -> None:
    """Write the conversations."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", type=Path, help="train.parquet of data_prep.environment")
    parser.add_argument("out", type=Path)
    parser.add_argument("--conversations", type=int, default=256)
    given = parser.parse_args()
    rows = pq.read_table(given.rows, columns=["data_source", "prompt"]).to_pylist()
    solved = (
        {"messages": [*row["prompt"], {"role": "assistant", "content": f"<answer>{answer}</answer>"}], "tools": "[]"}
        for row in rows
        if (answer := solution(row["data_source"].rpartition("/")[2], row["prompt"][-1]["content"])) is not None
    )
    write_parquet(given.out, list(islice(solved, given.conversations)))


if __name__ == "__main__":
    main()
