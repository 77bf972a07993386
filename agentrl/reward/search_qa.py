"""Open-domain questions: exact match and F1 over normalised words, as SQuAD (arXiv:1606.05250) and Search-R1
(arXiv:2503.09516) count them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_COMMA_OF_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_PUNCTUATION = re.compile(
    r"((?<=\d)PUNCTUATION(?=\d)|(?<!\w)-(?=[$€£]?\.?\d)|(?<!\w)\.(?=\d))|PUNCTUATION".replace(
        "PUNCTUATION", f"[{re.escape(string.punctuation)}]"
    )
)
"""Group 1: what belongs to a number."""


def normalise(text: str) -> str:
    """Lower case, without punctuation and the articles a, an, the; single spaces.

    Numbers keep their values: a sign before one and a mark between two digits stay, but for commas between thousands.
    A text that would be left empty keeps its articles, or without articles its punctuation: "The" and "!!!" are names.
    """
    text = text.lower().replace("\u2212", "-")
    words = _PUNCTUATION.sub(r"\1", _COMMA_OF_THOUSANDS.sub("", text))
    without_articles = _ARTICLES.sub(" ", words)
    return next((" ".join(left.split()) for left in (without_articles, words, text) if left.strip()), "")


def extract(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`; None without one."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, end) if end >= 0 else -1
    return text[begin + len("<answer>") : end].strip() if begin >= 0 else None


def exact_match(answer: str, gold: Iterable[str]) -> float:
    """1.0 when the answer is one of the gold answers. An empty answer never is."""
    found = normalise(answer)
    return float(found != "" and any(found == normalise(item) for item in gold))


def f1(answer: str, gold: Iterable[str]) -> float:
    """Harmonic mean of word precision and recall, the best over the gold answers."""
    found, best = normalise(answer).split(), 0.0
    for words in (normalise(item).split() for item in gold):
        if found and words:
            best = max(best, 2 * (Counter(found) & Counter(words)).total() / (len(found) + len(words)))
    return best


def gold_answers(ground_truth: object) -> list[str]:
    """A text, a sequence of texts, or {"target": either}. Raises ValueError for anything else."""
    value = ground_truth["target"] if isinstance(ground_truth, dict) and "target" in ground_truth else ground_truth
    if isinstance(value, (str, int, float)):
        return [str(value)]
    if value is None or isinstance(value, dict) or not isinstance(value, Iterable):
        raise ValueError(f'ground_truth must be a text, a list of texts or {{"target": ...}}, found {ground_truth!r}')
    return [str(item) for item in value]


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: object = None,
    format_score: float = 0.0,
) -> dict[str, float]:
    """Score: 1.0 for an exact match in `<answer>...</answer>`, `format_score` for another answer there, else 0.0; and
    F1 as a further number.
    """
    gold, answer = gold_answers(ground_truth), extract(solution_str)
    if not answer:
        return {"score": 0.0, "f1": 0.0}
    return {"score": exact_match(answer, gold) or format_score, "f1": f1(answer, gold)}
