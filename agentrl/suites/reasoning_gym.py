"""Tasks of Reasoning Gym (`pip install reasoning-gym`), by its own generators and scorers.

The ground truth of a row names the generator's arguments, and the scorer makes the task again. Scorers that run the
answer as Python code are refused: an answer comes from a model, and could do anything. So are tasks that another
process would make otherwise.
"""

from __future__ import annotations

import functools
import hashlib
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
REFUSED = {
    **dict.fromkeys(EVALUATED, "its scorer runs a model's answer as Python code"),
    **dict.fromkeys(
        ("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"),
        "another process makes other tasks of it, as it goes through sets of texts",
    ),
    "coin_flip": "its scorer computes a number such as 1e400000000, which a model may write, without end",
}
"""Why tasks are refused."""
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
    if refused := next((part for part in request.parts if part in REFUSED), None):
        raise ConfigError(f"--parts: {refused} of reasoning-gym is refused: {REFUSED[refused]}; leave it out")
    limit = SIZE if request.limit is None else request.limit
    size = max(SIZE, limit)  # Some tasks depend on it.
    rows = []
    for part in chosen(request.parts, [name for name in names if name not in REFUSED], DEFAULT):
        found = generator(part, size, SEED)
        for index in range(limit):
            question = found[index]["question"]
            truth = {"task": part, "size": size, "seed": SEED, "index": index, "question": digest(question)}
            made = PROMPT.format(question=question)
            rows.append(Row(part, str(index), made, json.dumps(truth), f"reasoning_gym/{part}"))
    of_more = "" if size == SIZE else f", of {size} tasks"
    return Tasks(rows, f"reasoning-gym {importlib.metadata.version('reasoning-gym')}, seed {SEED}{of_more}")


def digest(question: str) -> str:
    """Name a task by its question."""
    return hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()[:16]


def compute_score(solution_str: str, ground_truth: object) -> float:
    """Score the text of the last <answer>, as the package does; without one its scorer judges None."""
    try:
        given = json.loads(str(ground_truth))
        task, size, seed, index = given["task"], int(given["size"]), int(given["seed"]), int(given["index"])
        question = given["question"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"ground_truth: expected a task, its size, seed, index and question's digest, found {ground_truth!r:.160}; "
            "make the rows again"
        ) from error
    if task in REFUSED:
        raise DataError(f"ground_truth: {task} of reasoning-gym is refused: {REFUSED[task]}")
    found = generator(task, size, seed)
    entry = found[index]
    if digest(entry["question"]) != question:
        raise DataError(
            f"ground_truth: the installed reasoning-gym makes another task {index} of {task} than the row's; install "
            "the version that made the row, or make the rows again"
        )
    try:
        return float(found.score_answer(answer_in(solution_str), entry))
    except Exception:  # Some scorers cannot read every text, and a model may write any.
        return 0.0


def answer_in(text: str) -> str | None:
    """Return the text between the last <answer> and the </answer> after it."""
    before, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    if opened and not closed:  # a further <answer> that was cut short
        _, opened, rest = before.rpartition("<answer>")
        answer, closed, _ = rest.partition("</answer>")
    return answer.strip() if opened and closed else None


SUITE = Suite(tasks, measure="score")
