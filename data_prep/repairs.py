"""Small repositories with one fault each, as rows: `python -m data_prep.repairs --out DIR`.

A repository is a module of one function and its tests, one of which fails. Names and numbers are drawn by the seed.
The kinds of faults in train.parquet and test.parquet are the same; unseen.parquet has a kind that is in no other file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from agentrl.errors import UserError
from agentrl.system.visible import complain
from data_prep.files import write_splits
from data_prep.options import positive

KINDS = ("missing_case", "off_by_one", "operator", "wrong_name")
UNSEEN = "wrong_order"
"""The kind of unseen.parquet."""
SUBJECTS = (
    "boxes",
    "coins",
    "days",
    "drinks",
    "fish",
    "hours",
    "letters",
    "miles",
    "points",
    "seats",
    "steps",
    "votes",
)
CHECK = ["python", "-I", "-m", "unittest", "-q"]
"""The command that judges a repository, with its tests laid anew: `openai_proxy.check`."""


@dataclass(frozen=True, slots=True)
class Template:
    """A function and its tests. `$subject`, `$low` and `$high` are drawn for each repository, low < high."""

    name: str
    source: str
    tests: str
    """Lines of assertions; `f` is the function."""
    faults: Mapping[str, tuple[str, str]]
    """By kind: a text of the source, which has it once, and what stands in its place."""


TEMPLATES = (
    Template(
        "clamp",
        "def f(value, low=$low, high=$high):\n    if value < low:\n        return low\n    if value > high:\n"
        "        return high\n    return value\n",
        "f($low - 3) == $low\nf($high + 2) == $high\nf($low + 1) == $low + 1\nf(7, 8, 9) == 8\nf(9, 1, 4) == 4",
        {
            "operator": ("value > high", "value >= low"),
            "missing_case": ("    if value > high:\n        return high\n", ""),
            "wrong_name": ("        return high\n", "        return low\n"),
            "wrong_order": ("low=$low, high=$high", "high=$high, low=$low"),
        },
    ),
    Template(
        "count_above",
        "def f(numbers, limit=$low):\n    count = 0\n    for number in numbers:\n        if number > limit:\n"
        "            count += 1\n    return count\n",
        "f([]) == 0\nf([$low, $low + 1, $low + 2]) == 2\nf([1, 2, 3, 4], 2) == 2\nf([5, 5, 6], 5) == 1",
        {
            "operator": ("number > limit", "number >= limit"),
            "off_by_one": ("count = 0", "count = 1"),
            "wrong_name": ("return count", "return limit"),
            "wrong_order": ("number > limit", "limit > number"),
        },
    ),
    Template(
        "sum_between",
        "def f(first, last):\n    total = 0\n    for number in range(first, last + 1):\n        total += number\n"
        "    return total\n",
        "f(1, 3) == 6\nf($low, $low) == $low\nf($low, $low + 2) == 3 * $low + 3\nf(5, 4) == 0",
        {
            "operator": ("total += number", "total -= number"),
            "off_by_one": ("last + 1", "last"),
            "wrong_name": ("return total", "return number"),
            "wrong_order": ("range(first, last + 1)", "range(last, first + 1)"),
        },
    ),
    Template(
        "price",
        "def f(count, each=$low):\n    total = count * each\n    if count >= $high:\n        total -= each\n"
        "    return total\n",
        "f(0) == 0\nf(2) == 2 * $low\nf($high) == ($high - 1) * $low\nf($high + 1, 3) == 3 * $high\nf(1, 5) == 5",
        {
            "operator": ("count * each", "count + each"),
            "off_by_one": ("count >= $high", "count >= $high + 1"),
            "missing_case": ("    if count >= $high:\n        total -= each\n", ""),
            "wrong_name": ("total -= each", "total -= count"),
            "wrong_order": ("f(count, each=$low)", "f(each=$low, count=0)"),
        },
    ),
    Template(
        "chunks",
        "def f(items, size=$low):\n    found = []\n    for start in range(0, len(items), size):\n"
        "        found.append(items[start : start + size])\n    return found\n",
        "f([]) == []\nf([1, 2, 3], 2) == [[1, 2], [3]]\nf([1, 2, 3, 4], 2) == [[1, 2], [3, 4]]\n"
        "f(list(range($low + 1)))[1] == [$low]",
        {
            "operator": ("start + size]", "start * size]"),
            "off_by_one": ("start + size]", "start + size - 1]"),
            "wrong_name": ("return found", "return items"),
            "wrong_order": ("range(0, len(items), size)", "range(0, size, len(items) or 1)"),
        },
    ),
    Template(
        "largest_two",
        "def f(numbers):\n    if len(numbers) < 2:\n        return sorted(numbers)\n    ordered = sorted(numbers)\n"
        "    return ordered[-2:]\n",
        "f([]) == []\nf([$low]) == [$low]\nf([$high, $low])[-1] == $high\nf([3, 1, 2]) == [2, 3]",
        {
            "off_by_one": ("ordered[-2:]", "ordered[-1:]"),
            "wrong_name": ("    return ordered[-2:]", "    return numbers[-2:]"),
            "operator": ("len(numbers) < 2", "len(numbers) > 2"),
            "wrong_order": ("ordered[-2:]", "ordered[:-3:-1]"),
        },
    ),
    Template(
        "grade",
        "def f(points):\n    if points >= $high:\n        return 'good'\n    if points >= $low:\n"
        "        return 'fair'\n    return 'poor'\n",
        "f($high) == 'good'\nf($high + 5) == 'good'\nf($low) == 'fair'\nf($high - 1) == 'fair'\nf($low - 1) == 'poor'",
        {
            "operator": ("points >= $high", "points > $high"),
            "off_by_one": ("points >= $low", "points >= $low - 1"),
            "missing_case": ("    if points >= $low:\n        return 'fair'\n", ""),
            "wrong_order": ("return 'fair'\n    return 'poor'", "return 'poor'\n    return 'fair'"),
        },
    ),
    Template(
        "difference",
        "def f(before, after):\n    change = after - before\n    if change < 0:\n        return 0\n    return change\n",
        "f(1, 4) == 3\nf($low, $high) == $high - $low\nf(5, 5) == 0\nf($high, $low) == 0",
        {
            "operator": ("after - before", "after + before"),
            "missing_case": ("    if change < 0:\n        return 0\n", ""),
            "wrong_name": ("return change", "return after"),
            "wrong_order": ("after - before", "before - after"),
        },
    ),
    Template(
        "average",
        "def f(numbers):\n    if not numbers:\n        return $low\n    return sum(numbers) / len(numbers)\n",
        "f([]) == $low\nf([4]) == 4\nf([2, 4]) == 3\nf([$high, $high]) == $high",
        {
            "operator": ("sum(numbers) / len", "sum(numbers) // 1 - len"),
            "off_by_one": ("len(numbers)", "(len(numbers) + 1)"),
            "missing_case": ("    if not numbers:\n        return $low\n", ""),
            "wrong_name": ("sum(numbers)", "max(numbers)"),
            "wrong_order": ("sum(numbers) / len(numbers)", "len(numbers) / sum(numbers)"),
        },
    ),
    Template(
        "positions",
        "def f(items, wanted):\n    found = []\n    for index, item in enumerate(items):\n        if item == wanted:\n"
        "            found.append(index + $low)\n    return found\n",
        "f([], 1) == []\nf([1, 2, 1], 1) == [$low, $low + 2]\nf(['a'], 'b') == []\nf([3, 4], 4) == [$low + 1]",
        {
            "operator": ("item == wanted", "item != wanted"),
            "off_by_one": ("index + $low", "index + $low + 1"),
            "wrong_name": ("append(index + $low)", "append(item)"),
            "wrong_order": ("index, item in", "item, index in"),
        },
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Write the files and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.repairs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write the three files to")
    parser.add_argument("--train-rows", type=positive, default=400)
    parser.add_argument("--test-rows", type=positive, default=100)
    parser.add_argument("--unseen-rows", type=positive, help="default: as --test-rows")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    wanted = {
        "train": (given.train_rows, KINDS),
        "test": (given.test_rows, KINDS),
        "unseen": (given.unseen_rows or given.test_rows, (UNSEEN,)),
    }
    try:
        seen: set[str] = set()
        made = {
            name: rows(count, kinds, Random(f"{given.seed} {name}"), seen) for name, (count, kinds) in wanted.items()
        }
        write_splits({given.out / f"{name}.parquet": found for name, found in made.items()})
    except UserError as error:
        return complain(error)
    for name, found in made.items():
        print(f"{given.out / name}.parquet: {len(found)} repositories with a fault ({', '.join(wanted[name][1])})")
    return 0


def rows(count: int, kinds: tuple[str, ...], random: Random, seen: set[str]) -> list[dict[str, object]]:
    """Draw repositories, none of which is in `seen`; their sources are added to it.

    Raises UserError where there are not so many.
    """
    made: list[dict[str, object]] = []
    choices = {kind: [one for one in TEMPLATES if kind in one.faults] for kind in kinds}
    drawn = [kind for kind in kinds if choices[kind]]
    for _ in range(100 * count):
        if len(made) == count:
            return made
        kind = random.choice(drawn)
        found = row(random.choice(choices[kind]), kind, random)
        source = str(found["reward_model"])
        if source not in seen:
            seen.add(source)
            made.append(found)
    if len(made) < count:
        raise UserError(f"only {len(made)} different repositories with a fault ({', '.join(kinds)}); asked for {count}")
    return made


def row(template: Template, kind: str, random: Random) -> dict[str, object]:
    """Draw one repository with a fault of this kind."""
    low = random.randint(2, 40)
    drawn = {"$low": str(low), "$high": str(low + random.randint(3, 50))}
    name = f"{template.name}_{random.choice(SUBJECTS)}_{random.randint(1, 9999)}"
    old, new = template.faults[kind]
    assert template.source.count(old) == 1, (template.name, kind)
    source, faulty = (filled(text, drawn, name) for text in (template.source, template.source.replace(old, new)))
    lines = [
        f"        self.assertEqual({a}, {b})" for a, b in (one.split(" == ") for one in template.tests.split("\n"))
    ]
    tests = "\n".join(
        [
            *("import unittest", "", f"from {name} import {name}", "", "", "class Test(unittest.TestCase):"),
            "    def test(self):",
            *(filled(line, drawn, name) for line in lines),
            "",
        ]
    )
    laid = {"path": f"test_{name}.py", "text": tests}
    text = (
        f"The tests of this repository fail: `python -m unittest -q`. Find the fault in {name}.py and repair it. "
        f"Leave test_{name}.py as it is."
    )
    return {
        "data_source": "agent/repairs_unseen" if kind == UNSEEN else "agent/repairs",
        "agent_name": "openai_proxy",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"style": "rule", "ground_truth": source},
        "extra_info": {
            "kind": kind,
            "files": [{"path": f"{name}.py", "text": faulty}, laid],
            "check_files": [laid],
        },
    }


def filled(text: str, drawn: Mapping[str, str], name: str) -> str:
    """Put drawn numbers and the function's name into a text."""
    for placeholder, value in drawn.items():
        text = text.replace(placeholder, value)
    return text.replace("f(", f"{name}(")


if __name__ == "__main__":
    sys.exit(main())
