"""Made-up tasks of the quickstart: `python -m data_prep.quickstart --out DIR`.

Writes train.parquet and val.parquet (questions), sft.parquet (conversations that warm a policy up), corpus.jsonl (what
the search tool searches), tools.yaml (the tools) and, last, quickstart.json, which says what the files were made with.
Files made with the same arguments are left as they are.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from random import Random

from agentrl.errors import DataError, UserError
from agentrl.system.json_value import JSON
from agentrl.system.visible import complain
from agentrl.trajectory import Message
from data_prep.files import Row, write_json_lines, write_parquet, write_text
from data_prep.made_up import Split, Task, World
from data_prep.options import positive
from data_prep.transcripts import TOOLS, TOOLS_YAML, flawed, good, prompt

Report = Callable[[str], None]

FORMAT = 1
"""Version that is raised whenever the same arguments come to make other files."""
STAMP = "quickstart.json"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes and seed of the files."""

    seed: int = 1
    train_rows: int = 2048
    val_rows: int = 96
    good_rows: int = 10240
    """Conversations of the first warm-up phase."""
    flawed_rows: int = 1920
    """Conversations of the last warm-up phase, in which most are flawed."""
    flawed_share: float = 0.85


def make(out: Path, recipe: Recipe, report: Report) -> bool:
    """Make the files in `out` unless they are there already; return True if it made them. Raises DataError."""
    stamp = {"format": FORMAT, **asdict(recipe)}
    if read_stamp(out) == stamp:
        report(f"{out}: made before with the same arguments, used again")
        return False
    world = World(recipe.seed)
    (out / STAMP).unlink(missing_ok=True)  # from here on the files may be of two makings
    counts: dict[Split, int] = {"train": recipe.train_rows, "val": recipe.val_rows}
    for split, count in counts.items():
        write_parquet(out / f"{split}.parquet", rows(world, split, count))
        report(f"{out / split}.parquet: {count} questions")
    write_parquet(out / "sft.parquet", conversations(world, recipe))
    report(f"{out / 'sft.parquet'}: {recipe.good_rows + recipe.flawed_rows} conversations")
    documents = [{"id": str(index), "contents": fact.document} for index, fact in enumerate(world.facts)]
    write_json_lines(out / "corpus.jsonl", documents)
    report(f"{out / 'corpus.jsonl'}: {len(documents)} documents")
    write_text(out / "tools.yaml", TOOLS_YAML.read_text(encoding="utf-8"))
    write_text(out / STAMP, json.dumps(stamp, indent=2) + "\n")
    return True


def read_stamp(out: Path) -> JSON:
    """Read what the files in `out` were made with; None when they are not all there. Raises DataError."""
    try:
        stamp: JSON = json.loads((out / STAMP).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        raise DataError(f"{out / STAMP}: cannot be read ({error}); give --out another directory") from error
    files = ("train.parquet", "val.parquet", "sft.parquet", "corpus.jsonl", "tools.yaml")
    return stamp if all((out / file).exists() for file in files) else None


def rows(world: World, split: Split, count: int) -> list[Row]:
    """Make the rows of a split."""
    return [row(task, split, index) for index, task in enumerate(islice(world.tasks(split), count))]


def row(task: Task, split: Split, index: int) -> Row:
    """Make the row of a task."""
    return {
        "data_source": f"quickstart/{task.kind}",
        "prompt": prompt(task),
        "ability": "tool use",
        "reward_model": {"style": "rule", "ground_truth": task.answer},
        "agent_name": "tool_agent",
        "extra_info": {"split": split, "index": index},
    }


def conversations(world: World, recipe: Recipe) -> list[Row]:
    """Make rows of the first phase, then of the last, in the order in which they are to be learnt."""
    rng = Random(f"flaws {recipe.seed}")
    tasks = world.tasks("train", purpose="warm-up")
    tools = json.dumps(TOOLS)

    def conversation(messages: list[Message], phase: str) -> Row:
        return {"messages": messages, "tools": tools, "phase": phase}

    first = [conversation(good(task), "good") for task in islice(tasks, recipe.good_rows)]
    last = [
        conversation(flawed(task, world, rng) if rng.random() < recipe.flawed_share else good(task), "flawed")
        for task in islice(tasks, recipe.flawed_rows)
    ]
    return first + last


def main(arguments: list[str] | None = None) -> int:
    """Make the files and return the exit status."""
    default = Recipe()
    parser = argparse.ArgumentParser(prog="python -m data_prep.quickstart", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=default.seed, help="another seed makes other facts and questions")
    parser.add_argument("--train-rows", type=positive, default=default.train_rows)
    parser.add_argument("--val-rows", type=positive, default=default.val_rows)
    given = parser.parse_args(arguments)
    try:
        make(given.out, Recipe(seed=given.seed, train_rows=given.train_rows, val_rows=given.val_rows), print)
    except UserError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
