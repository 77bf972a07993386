"""Scores of GSM8K as verl gives them: by the number after the last `#### `."""

from __future__ import annotations

import re

READ = 300
"""Characters at the end of a response that are read."""


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the number after the last `#### ` (strict), or the last one (flexible); None without a number."""
    text = solution_str[-READ:]
    if method == "strict":
        marked = re.findall(r"#### (-?[0-9.,]+)", text)
        return marked[-1].replace(",", "") if marked else None
    if method != "flexible":
        raise ValueError(f"method must be strict or flexible, found {method!r}")
    numbers: list[str] = re.findall(r"-?[0-9.,]+", text)
    return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score `score` for the ground truth letter by letter, `format_score` for another number, 0 without one."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0
    return score if answer == ground_truth else format_score
