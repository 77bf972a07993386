"""Open-domain questions: exact match and F1 over normalised words, as SQuAD (arXiv:1606.05250) and Search-R1
(arXiv:2503.09516) count them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalise(text: str) -> str:
    """Lower case, without punctuation and the articles a, an, the; single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def extract(text: str) -> str | None:
    """Return what the last `<answer>...</answer>` holds, else the last line that is not empty, else None."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, end) if end >= 0 else -1
    if begin >= 0:
        return text[begin + len("<answer>") : end].strip()
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else None


def exact_match(answer: str, gold: Iterable[str]) -> float:
    """1.0 when the answer is one of the gold answers."""
    found = normalise(answer)
    return float(any(found == normalise(item) for item in gold))


def f1(answer: str, gold: Iterable[str]) -> float:
    """Harmonic mean of word precision and recall, the best over the gold answers."""
    return max((_f1(normalise(answer).split(), normalise(item).split()) for item in gold), default=0.0)


def _f1(found: list[str], gold: list[str]) -> float:
    if not found or not gold:
        return float(found == gold)
    same = (Counter(found) & Counter(gold)).total()
    return 2 * same / (len(found) + len(gold))


def gold_answers(ground_truth: Any) -> list[str]:
    """A text, a sequence of texts, or {"target": either}. Raises ValueError for anything else."""
    value = ground_truth["target"] if isinstance(ground_truth, dict) and "target" in ground_truth else ground_truth
    if isinstance(value, (str, int, float)):
        return [str(value)]
    if value is None or isinstance(value, dict) or not isinstance(value, Iterable):
        raise ValueError(f'ground_truth must be a text, a list of texts or {{"target": ...}}, found {ground_truth!r}')
    return [str(item) for item in value]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    """Score: exact match (1.0 or 0.0); and F1 as a further number."""
    gold = gold_answers(ground_truth)
    answer = extract(solution_str)
    if answer is None:
        return {"score": 0.0, "f1": 0.0}
    return {"score": exact_match(answer, gold), "f1": f1(answer, gold)}
