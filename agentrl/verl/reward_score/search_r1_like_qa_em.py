"""Scores of question answering with a search as verl gives them: exact match of the last `<answer>`."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence

MOST_TAGS = 10
"""Answers beyond so many tags are worth a quarter."""
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(s: str) -> str:
    """Write an answer in lower case, without punctuation and the articles a, an, the, with single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", s.lower().translate(_NO_PUNCTUATION)).split())


def em_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 where the prediction is one of the answers, both normalised, else 0."""
    golden = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return int(normalize_answer(prediction) in map(normalize_answer, golden))


def subem_check(prediction: str, golden_answers: str | Sequence[str]) -> int:
    """Return 1 where one of the answers occurs in the prediction, both normalised, else 0."""
    golden = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    found = normalize_answer(prediction)
    return int(any(normalize_answer(one) in found for one in golden))


def extract_solution(solution_str: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`; None without one."""
    found, place = None, 0
    while (begin := solution_str.find("<answer>", place)) >= 0:
        begin += len("<answer>")
        if (end := solution_str.find("</answer>", begin)) < 0:
            break
        found, place = solution_str[begin:end].strip(), end + len("</answer>")
    return found


def count_answer_tags(text: str) -> tuple[int, int]:
    """Count the opening and the closing tags."""
    return text.count("<answer>"), text.count("</answer>")


def compute_score(
    solution_str: str,
    ground_truth: Mapping[str, str | Sequence[str]],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score `score` for an exact match with one of `ground_truth["target"]`, `format_score` for another, else 0."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    if not em_check(answer, ground_truth["target"]):
        return format_score
    return score / 4 if max(count_answer_tags(solution_str)) > MOST_TAGS else score


def compute_score_subem(
    solution_str: str,
    ground_truth: Mapping[str, str | Sequence[str]],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Score as `compute_score` does, where an answer is right that contains one of the targets."""
    answer = extract_solution(solution_str)
    if answer is None:
        return 0
    return score if subem_check(answer, ground_truth["target"]) else format_score
