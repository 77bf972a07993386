"""Tiny versions of the recipes: made-up tasks, and a tiny policy warmed up on conversations with tags.

    python -m examples.tiny search_r1 --out runs/tiny-search
    python -m examples.tiny retool --out runs/tiny-retool
    python -m examples.tiny gigpo --out runs/tiny-gigpo

Writes train.parquet, val.parquet, sft.parquet, for search_r1 the corpus.jsonl to be searched, for gigpo the
interactions.yaml of its environment (examples/gigpo/walk.py), and policy/. The warm-up of the others shows tasks that
are solved or guessed at, in the end mostly the latter: what is left to be learnt is to ask.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Literal

from agentrl.errors import UserError
from agentrl.observe.open import open_display
from agentrl.quickstart.assets import WarmUp, sft_config, write_untrained
from agentrl.quickstart.tiny_policy import TinyShape
from agentrl.system.visible import complain
from agentrl.trainer.run_sft import train_sft
from data_prep.files import write_json_lines, write_parquet
from data_prep.made_up import Split, Task, World
from examples.gigpo import walk

Recipe = Literal["search_r1", "retool"]

SYSTEMS = {
    "search_r1": "Write <search>, the fact and </search>. Then <answer>, the number and </answer>.",
    "retool": "Write <code>, a program and </code>. Then <answer>, the number and </answer>.",
}
SOURCES = {"search_r1": "searchR1_tiny", "retool": "math"}
GUESSED = (0.3, 0.3, 0.3, 0.8)
"""Fractions of the conversations, by quarter: a way to answer that comes as news late would spoil what was learnt."""

CONVERSATIONS = 12_800


@dataclass(frozen=True, slots=True)
class Sizes:
    train: int = 512
    val: int = 64
    conversations: int = CONVERSATIONS


def tasks(recipe: Recipe, world: World, split: Split, purpose: str) -> Any:
    """Endless tasks that the recipe's one tool answers."""
    kind = "search" if recipe == "search_r1" else "arithmetic"
    return (task for task in world.tasks(split, purpose) if task.kind == kind)


def prompt(recipe: Recipe, task: Task) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEMS[recipe]}, {"role": "user", "content": task.question}]


def row(recipe: Recipe, task: Task, split: Split, index: int) -> dict[str, Any]:
    truth: Any = {"target": [task.answer]} if recipe == "search_r1" else task.answer
    return {
        "data_source": SOURCES[recipe],
        "prompt": prompt(recipe, task),
        "ability": "tool use",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "agent_name": recipe,
        "extra_info": {"split": split, "index": index},
    }


def solved(recipe: Recipe, task: Task) -> str:
    """One assistant turn, as the recipe's loop leaves it: the call, what came back, the answer."""
    (call,) = task.calls
    if recipe == "search_r1":
        asked = f"<search>{call.argument}</search>\n\n<information>{call.answer}</information>\n\n"
        return f"{asked}<answer>{task.answer}</answer>"
    asked = f"<code>\nprint({call.argument})\n</code>\n<interpreter>\n{call.answer}\n</interpreter>\n"
    return f"{asked}<answer>\\boxed{{{task.answer}}}</answer>"


def guessed(recipe: Recipe, rng: Random) -> str:
    number = rng.randint(100, 9999)
    return f"<answer>{number}</answer>" if recipe == "search_r1" else f"<answer>\\boxed{{{number}}}</answer>"


def conversations(recipe: Recipe, world: World, count: int) -> list[dict[str, Any]]:
    """Make warm-up conversations, in the order in which they are to be learnt."""
    rng = Random(f"guesses {world.seed}")
    made = []
    for index, task in enumerate(islice(tasks(recipe, world, "train", "warm-up"), count)):
        is_guess = rng.random() < GUESSED[len(GUESSED) * index // count]
        text = guessed(recipe, rng) if is_guess else solved(recipe, task)
        made.append({"messages": [*prompt(recipe, task), {"role": "assistant", "content": text}], "tools": "[]"})
    return made


def make(recipe: Recipe, out: Path, seed: int, sizes: Sizes) -> None:
    """Raises UserError."""
    world = World(seed)
    counts: dict[Split, int] = {"train": sizes.train, "val": sizes.val}
    for split, count in counts.items():
        questions = islice(tasks(recipe, world, split, "rows"), count)
        write_parquet(out / f"{split}.parquet", [row(recipe, task, split, n) for n, task in enumerate(questions)])
    write_parquet(out / "sft.parquet", conversations(recipe, world, sizes.conversations))
    if recipe == "search_r1":
        documents = (
            {"id": str(n), "contents": f'"{fact.query}"\n{fact.document}'} for n, fact in enumerate(world.facts)
        )
        write_json_lines(out / "corpus.jsonl", documents)
    warm_up = out / "warm-up"
    shutil.rmtree(warm_up, ignore_errors=True)
    write_untrained(warm_up / "untrained", out / "sft.parquet", seed, TinyShape())
    with open_display(f"warm-up · {recipe}") as display:
        train_sft(sft_config(out / "sft.parquet", warm_up, WarmUp(), seed, "cpu"), display)
    shutil.rmtree(out / "policy", ignore_errors=True)
    (warm_up / "policy").rename(out / "policy")
    print(f"{out}: {sizes.train} training and {sizes.val} validation rows, and a policy warmed up for them")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.tiny", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe", choices=[*sorted(SYSTEMS), "gigpo"])
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, help="of the warm-up; without it, as many as the recipe needs")
    given = parser.parse_args(arguments)
    if given.conversations is None:
        given.conversations = walk.CONVERSATIONS if given.recipe == "gigpo" else CONVERSATIONS
    try:
        if given.recipe == "gigpo":
            with open_display("warm-up · gigpo") as display:
                walk.make(given.out, given.seed, display, given.conversations)
        else:
            make(given.recipe, given.out, given.seed, Sizes(conversations=given.conversations))
    except UserError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
