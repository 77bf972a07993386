"""Which scorer judges which data source."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from typing import Any

from agentrl.reward import final_answer, gsm8k, interaction, math, search_qa
from agentrl.reward.scorer import Scorer

_INSTANT: dict[str, Callable[..., Any]] = {
    "gsm8k": gsm8k.compute_score,
    "final_answer": final_answer.compute_score,
    "search_qa": search_qa.compute_score,
    "interaction": interaction.compute_score,
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
    "code/*": "code",
    "judge/*": "judge",
    "interaction/*": "interaction",
}
"""Data source (`*` stands for anything) to the kind of its scorer."""


@functools.cache
def kind_of(data_source: str) -> str | None:
    """The kind of the ready scorer of a data source, or None when there is none."""
    return next((kind for pattern, kind in SOURCES.items() if fnmatch.fnmatchcase(data_source, pattern)), None)


@functools.cache
def ready_scorer(kind: str) -> Scorer:
    """Of every kind but `code` and `judge`, which ask servers: see `agentrl.reward.code` and `agentrl.reward.judge`."""
    if kind == "math":
        return Scorer.of(math.compute_score, "math", {})
    return Scorer.of(_INSTANT[kind], kind, {}, in_loop=True)
