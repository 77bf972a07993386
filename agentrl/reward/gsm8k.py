"""GSM8K (arXiv:2110.14168): the answer is the number after the last `####`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

Method = Literal["strict", "flexible"]

FORMAT_SCORE = 0.1
"""An answer in the right form that is not right."""

# Without adjacent repetitions that can match the same text, so that no answer takes more than linear time.
_NUMBER = re.compile(r"-?\$?-?\.?[0-9][0-9.,]*")


def extract(text: str, method: Method = "strict") -> str | None:
    """The answer without commas, dollar signs and trailing full stops; None when there is none.

    strict: the number right after the last `####`; flexible: the last number of the text.
    """
    if method == "strict":
        _, marker, answer = text.rpartition("####")
        match = _NUMBER.match(answer.lstrip(" \t")) if marker else None
        return _plain(match[0]) if match else None
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def is_right(answer: str, ground_truth: str) -> bool:
    """Equal as numbers (72 and 72.00), or as texts when one of them is no number."""
    expected = _plain(ground_truth)
    try:
        return Decimal(answer) == Decimal(expected)
    except InvalidOperation:
        return answer == expected


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, method: Method = "strict"
) -> float:
    """1.0 for the right number, 0.1 for a wrong one in the right form, 0.0 without one."""
    answer = extract(solution_str, method)
    if answer is None:
        return 0.0
    return 1.0 if is_right(answer, str(ground_truth)) else FORMAT_SCORE


def _plain(number: str) -> str:
    return re.sub(r"[,$\s]", "", number).rstrip(".")
