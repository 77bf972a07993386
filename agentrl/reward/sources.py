"""Which scorer judges which data source."""

from __future__ import annotations

import fnmatch
import functools

from agentrl.reward import final_answer, gsm8k, math, search_qa
from agentrl.reward.scorer import Scorer

_INSTANT = {
    "gsm8k": gsm8k.compute_score,
    "final_answer": final_answer.compute_score,
    "search_qa": search_qa.compute_score,
}

SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "quickstart/*": "final_answer",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math",
    "aime*": "math",
    "nq": "search_qa",
    "triviaqa": "search_qa",
    "popqa": "search_qa",
    "hotpotqa": "search_qa",
    "2wikimultihopqa": "search_qa",
    "musique": "search_qa",
    "bamboogle": "search_qa",
    "searchR1_*": "search_qa",
}
"""Data source (`*` stands for anything) to scorer."""


@functools.cache
def scorer_of(data_source: str) -> Scorer | None:
    """The ready scorer of a data source, or None when there is none."""
    kind = next((kind for pattern, kind in SOURCES.items() if fnmatch.fnmatchcase(data_source, pattern)), None)
    return _scorer(kind) if kind is not None else None


@functools.cache
def _scorer(kind: str) -> Scorer:
    if kind == "math":
        return Scorer.of(math.compute_score, "math", {})
    return Scorer.of(_INSTANT[kind], kind, {}, in_loop=True)
