"""Open-domain questions with short answers as rows: `python -m data_prep.nq_open --source FILE_OR_DIR --out DIR`.

FILE, or each file of DIR, holds JSON lines {"question": text, "answer": [texts]}, as NQ-open (arXiv:1906.00300) does.
Written are train.parquet and test.parquet, for `tool_agent` with a search tool or for `search_r1` with search by tags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from agentrl.errors import DataError, UserError
from agentrl.reward.search_qa import normalise
from agentrl.system.json_value import JSON
from agentrl.system.visible import complain
from data_prep.files import write_splits
from data_prep.options import positive
from data_prep.records import Record, read_records

Agent = Literal["tool_agent", "search_r1"]

TEST_ROWS = 500
"""Number of rows that one file gives to the test set."""
TEST_NAMES = ("test", "dev", "val")
SEARCH_PROMPT = (
    "Answer the question. Look facts up with the search tool. End with the answer alone, in a few words, as in "
    "<answer>Marie Curie</answer>."
)
TAGS_PROMPT = (
    "Answer the question at the end. Begin with your reasoning, between <think> and </think>, and reason again when "
    "you have learnt something. If you miss a fact, write what to search for between <search> and </search>: what "
    "is found will follow between <information> and </information>. Search as often as you need to. As soon as you "
    "know the answer, give it alone, in a few words, between <answer> and </answer>, as in "
    "<answer>Marie Curie</answer>. Question: "
)


@dataclass(frozen=True, slots=True)
class Question:
    """Question with its accepted answers."""

    text: str
    """Text, stripped, with a question mark at its end, as Search-R1 (arXiv:2503.09516) has it."""
    answers: list[str]


def main(arguments: list[str] | None = None) -> int:
    """Write the files and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m data_prep.nq_open", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        help="JSON lines; or a directory with a file for train and one for test (or dev), by their names",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write train.parquet and test.parquet to")
    parser.add_argument("--agent", choices=("tool_agent", "search_r1"), default="tool_agent")
    parser.add_argument("--train-rows", type=positive, help="at most so many, chosen by --seed; default: all")
    parser.add_argument(
        "--test-rows", type=positive, help=f"the same for test; default: all, but {TEST_ROWS} of a file for both"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the order, and of the split of one file")
    given = parser.parse_args(arguments)
    try:
        train, test = split(given.source, given.train_rows, given.test_rows, given.seed)
        files = {
            given.out / f"{name}.parquet": [
                row(question, given.agent, name, index) for index, question in enumerate(questions)
            ]
            for name, questions in (("train", train), ("test", test))
        }
        write_splits(files)
    except UserError as error:
        return complain(error)
    for path, rows in files.items():
        print(f"{path}: {len(rows)} questions", flush=True)
    return 0


def split(
    source: Path, train_rows: int | None, test_rows: int | None, seed: int
) -> tuple[list[Question], list[Question]]:
    """Read questions for training and for the test; none is in both, or twice in one. Raises DataError."""
    train_file, test_file = files_of(source)
    seen: set[str] = set()
    test = shuffled(distinct(read(test_file), seen), seed)
    if train_file is not None:
        train = shuffled(distinct(read(train_file), seen), seed)
    else:
        count = test_rows or TEST_ROWS
        if count >= len(test):
            raise DataError(
                f"{test_file}: has {len(test)} different questions, of which {count} are asked for as the test set; "
                "leave some for training with a smaller --test-rows"
            )
        test, train = test[:count], test[count:]
    return train[:train_rows], test[:test_rows]


def files_of(source: Path) -> tuple[Path | None, Path]:
    """Find the files (train, test); train is None where one file is for both. Raises DataError."""
    if not source.is_dir():
        return None, source
    files = sorted(path for path in source.iterdir() if path.name.removesuffix(".gz").endswith((".jsonl", ".json")))
    train = [path for path in files if "train" in path.name.lower()]
    test = [path for path in files if path not in train and any(name in path.name.lower() for name in TEST_NAMES)]
    if len(files) == 1:
        return None, files[0]
    if len(train) != 1 or len(test) != 1:
        raise DataError(
            f"{source}: expected one .jsonl file with `train` in its name and one with {', '.join(TEST_NAMES)}, found "
            f"{', '.join(path.name for path in files) or 'none'}; name one file with --source to have it split"
        )
    return train[0], test[0]


def read(path: Path) -> Iterator[Question]:
    """Read the questions of a file. Raises DataError naming the line that cannot be used."""
    return map(question, read_records(path))


def question(record: Record) -> Question:
    """Read a record. Raises DataError."""
    text = record.text("question").strip()
    if not text:
        raise DataError(f"{record.where}: the question is empty")
    return Question(text if text.endswith("?") else f"{text}?", record.texts("answer"))


def distinct(questions: Iterable[Question], seen: set[str]) -> Iterator[Question]:
    """Iterate over the questions whose normalised words are not in `seen`, to which they are added."""
    for question in questions:
        words = normalise(question.text)
        if words not in seen:
            seen.add(words)
            yield question


def shuffled(questions: Iterable[Question], seed: int) -> list[Question]:
    """Shuffle by the seed alone."""
    order = list(questions)
    Random(f"questions {seed}").shuffle(order)
    return order


def row(question: Question, agent: Agent, split: str, index: int) -> dict[str, JSON]:
    """Make one row, with the fields that Search-R1's own preparation of NQ has."""
    made: dict[str, JSON] = {
        "data_source": "nq",
        "prompt": prompt(question, agent),
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": question.answers}},
        "agent_name": agent,
        "extra_info": {"split": split, "index": index},
    }
    if agent == "tool_agent":
        made["tools_kwargs"] = {"search": {"create_kwargs": {"question": question.text}}}
    return made


def prompt(question: Question, agent: Agent) -> list[dict[str, str]]:
    """Make the prompt of an agent."""
    if agent == "search_r1":
        return [{"role": "user", "content": f"{TAGS_PROMPT}{question.text}"}]
    return [{"role": "system", "content": SEARCH_PROMPT}, {"role": "user", "content": question.text}]


if __name__ == "__main__":
    sys.exit(main())
