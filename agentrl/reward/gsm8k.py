"""GSM8K (arXiv:2110.14168): the answer is the number after the last `####`."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal, InvalidOperation
from typing import Literal

from agentrl.reward.statement import final_statement, hedges, is_glued, is_scaled, numbers, other_numerals, relations

Method = Literal["strict", "flexible"]

FORMAT_SCORE = 0.1
"""An answer in the right form that is not right."""

# Without adjacent repetitions that can match the same text, so that no answer takes more than linear time.
_NUMBER = re.compile(r"-?\$?-?\.?[0-9][0-9.,]*")
_GROUPED = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")


def extract(text: str, method: Method = "strict") -> str | None:
    """The answer without dollar signs, commas between thousands and trailing full stops; None without an answer.

    strict: the number right after the last `####`, when it is the only one of its line, and no word or sign of the line
    makes another statement of it. `42 or 43`, 3/4, 4½, `42 million` and `42 is wrong` are no such numbers. flexible:
    the last number of the text, whether or not it `is_stated`.
    """
    if method == "flexible":
        found = _NUMBER.findall(text)
        return _plain(found[-1]) if found else None
    _, marker, answer = text.rpartition("####")
    line = answer.partition("\n")[0].lstrip(" \t")
    match = _NUMBER.match(line) if marker else None
    rest = "" if match is None else line[match.end() :].lstrip()
    if match is None or re.search(r"\d", rest) or unicodedata.category(rest[:1] or " ") in ("No", "Nl"):
        return None
    return None if hedges(line) or relations(line) or is_scaled(line) else _plain(match[0])


def is_stated(text: str) -> bool:
    """Return True if the last sentence of a text has one number, and no word or sign that changes or voids it."""
    said = final_statement(text)
    clear = not (hedges(said) or relations(said) or other_numerals(said) or is_glued(said))
    return clear and len(numbers(said)) == 1


def is_right(answer: str, ground_truth: str) -> bool:
    """Equal as numbers (72 and 72.00), or as texts when one of them is no number."""
    expected = _plain(ground_truth)
    try:
        return Decimal(answer) == Decimal(expected)
    except InvalidOperation:
        return answer == expected


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None, method: Method = "strict"
) -> float:
    """1.0 for the right number, 0.1 for a wrong one in the right form, 0.0 without one."""
    answer = extract(solution_str, method)
    if answer is None:
        return 0.0
    paid = is_right(answer, str(ground_truth)) and (method == "strict" or is_stated(solution_str))
    return 1.0 if paid else FORMAT_SCORE


def _plain(number: str) -> str:
    number = re.sub(r"[$\s]", "", number).rstrip(".,")
    return number.replace(",", "") if _GROUPED.fullmatch(number) else number
