"""Launch commands of verl's: what each resolves to on both sides, or the text of its refusal."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path

from agentrl.system.json_value import JSON, as_list, as_object
from benchmarks.commits.compare import Aliases, differences
from benchmarks.commits.sides import Side

INSIDE = Path(__file__).with_name("inside")
START = "ppo_trainer"
COUNTED = re.compile(r"""(["'])(.*?)\1: \d+""")
"""A value and its count. A long cell of the table ends within a value, which is left out."""


def single_keys(file: Path) -> list[JSON]:
    """Make a command of each key and value in a table of what public commands say: columns `key`, `values (count)`."""
    found: list[JSON] = []
    with file.open(encoding="utf-8", newline="") as opened:
        for row in csv.DictReader(opened):
            for _, value in COUNTED.findall(row["values (count)"]):
                argv = [f"{row['key']}={value}"]
                found.append({"argv": argv, "name": START, "schema": "Config", "folder": "{tree}"})
    return found


def harvest(old: Side, folder: Path, keys: Path | None) -> JSON:
    """Collect the commands that OLD's tests try, and those of the table of keys."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "commands.json"
    old.run([INSIDE / "harvest.py", old.tree, out], folder)
    tried: JSON = json.loads(out.read_text(encoding="utf-8"))
    return [*as_list(tried), *(single_keys(keys) if keys is not None else [])]


def resolve(side: Side, commands: Path) -> JSON:
    """Resolve all commands by a side's code."""
    folder = side.results / "verl"
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / "resolved.json"
    side.run([INSIDE / "resolve.py", side.tree, commands, out], folder)
    answers: JSON = json.loads(out.read_text(encoding="utf-8"))
    return answers


def check(old: Side, new: Side, keys: Path | None) -> Iterator[str]:
    """Compare both sides' answers, command by command."""
    folder = old.results / "verl"
    commands = as_list(old.kept("verl/tried", harvest, old, folder, keys))
    left, right = (
        as_list(side.kept("verl/answers", resolve, side, old.results / "verl" / "tried.json")) for side in (old, new)
    )
    refused = sum("refused" in as_object(one) for one in left)
    print(f"  {len(commands)} commands, of which {refused} are refused", flush=True)
    aliases = Aliases.read("keys")
    of_config = Aliases(
        {before.split(": ")[-1]: after.split(": ")[-1] for before, after in aliases.renamed.items()},
        [name.split(": ")[-1] for name in aliases.added],
    )
    if len(left) != len(right) or len(left) != len(commands):
        yield f"{len(commands)} commands have {len(left)} and {len(right)} answers: delete verl/ below --out"
        return
    for command, one, other in zip(commands, left, right, strict=True):
        argv = " ".join(map(str, as_list(as_object(command)["argv"])))
        yield from (f"{argv[:120]}: {line}" for line in differences(as_object(one), as_object(other), of_config))
