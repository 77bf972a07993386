"""Tasks of Reasoning Gym (`pip install reasoning-gym`), by its own generators and scorers.

The ground truth of a row names the generator's arguments, and the scorer makes the task again. Scorers that run the
answer as Python code are refused: an answer comes from a model, and could do anything.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import json
from typing import Any, Protocol, cast

from agentrl.errors import ConfigError, DataError
from agentrl.suites.contract import Request, Row, Suite, Tasks, chosen

DEFAULT = (
    *("base_conversion", "basic_arithmetic", "chain_sum", "gcd", "leg_counting", "letter_counting"),
    *("knights_knaves", "maze", "number_sorting", "simple_equations", "spell_backward", "word_sorting"),
)
EVALUATED = (
    *("binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
)
"""Tasks whose scorers run the answer as code."""
SIZE, SEED = 50, 42
PROMPT = "{question}\n\nThink first. Then write the final answer alone between <answer> and </answer>."


class Generator(Protocol):
    """A task of the package."""

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


def package() -> Any:
    """Import reasoning_gym. Raises ConfigError where it is missing."""
    try:
        return importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ConfigError(
            f"the package reasoning-gym cannot be imported ({error}): pip install reasoning-gym"
        ) from error


@functools.cache
def generator(task: str, size: int, seed: int) -> Generator:
    """Make a task's generator."""
    return cast(Generator, package().create_dataset(task, size=size, seed=seed))


def tasks(request: Request) -> Tasks:
    """Make the first tasks of each generator that is asked for."""
    if request.source is not None:
        raise ConfigError("--source: the suite reasoning_gym reads no file; it makes its tasks")
    names = sorted(package().factory.DATASETS)
    if refused := [part for part in request.parts if part in EVALUATED]:
        raise ConfigError(
            f"--parts: the scorer of {', '.join(refused)} in reasoning-gym runs a model's answer as Python code; leave "
            "it out"
        )
    size = SIZE if request.limit is None else request.limit
    rows = []
    for part in chosen(request.parts, [name for name in names if name not in EVALUATED], DEFAULT):
        found = generator(part, size, SEED)
        for index in range(size):
            truth = json.dumps({"task": part, "size": size, "seed": SEED, "index": index})
            question = PROMPT.format(question=found[index]["question"])
            rows.append(Row(part, str(index), question, truth, f"reasoning_gym/{part}"))
    return Tasks(rows, f"reasoning-gym {importlib.metadata.version('reasoning-gym')}, seed {SEED}")


def compute_score(solution_str: str, ground_truth: object) -> float:
    """Score the text of the last <answer>, as the package does; without one its scorer judges None."""
    try:
        given = json.loads(str(ground_truth))
        task, size, seed, index = given["task"], int(given["size"]), int(given["seed"]), int(given["index"])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"ground_truth: expected a task, its size, seed and index, found {ground_truth!r:.80}"
        ) from error
    if task in EVALUATED:
        raise DataError(f"ground_truth: the scorer of {task} runs an answer as Python code, and is not used")
    found = generator(task, size, seed)
    return float(found.score_answer(answer_in(solution_str), found[index]))


def answer_in(text: str) -> str | None:
    """Return the text between the last <answer> and the </answer> after it."""
    before, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    if opened and not closed:  # a further <answer> that was cut short
        _, opened, rest = before.rpartition("<answer>")
        answer, closed, _ = rest.partition("</answer>")
    return answer.strip() if opened and closed else None


SUITE = Suite(tasks, measure="score")
