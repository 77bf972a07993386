"""Which scorer judges which data source."""

from __future__ import annotations

import fnmatch
import functools

from agentrl.config.registries import SCORERS
from agentrl.reward.scorer import Scorer

INSTANT = ("final_answer", "gsm8k", "interaction", "reported", "search_qa", "turn_rewards")
"""Ready scorers that take microseconds, and run in the event loop."""

NEED_TRUTH = ("bfcl", "code", "final_answer", "gsm8k", "logs", "math", "reasoning_gym", "search_qa")
"""Ready scorers that compare with `reward_model.ground_truth`."""
SOURCES: dict[str, str] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "quickstart/*": "final_answer",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "math": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
    "aime*": "math",
    "numina_*": "math",
    "hiyouga/geometry3k": "math",
    "nq": "search_qa",
    "triviaqa": "search_qa",
    "popqa": "search_qa",
    "hotpotqa": "search_qa",
    "2wikimultihopqa": "search_qa",
    "musique": "search_qa",
    "bamboogle": "search_qa",
    "searchR1_*": "search_qa",
    "bfcl/*": "bfcl",
    "reasoning_gym/*": "reasoning_gym",
    "code/*": "code",
    "apps": "code",
    "codecontests": "code",
    "codeforces": "code",
    "taco": "code",
    "judge/*": "judge",
    "logs": "logs",
    "logs/*": "logs",
    "interaction/*": "interaction",
    "environment/*": "interaction",
    "agent/*": "reported",
    "tools/*": "turn_rewards",
}
"""Data source (`*` stands for anything) to the kind of its scorer."""


@functools.cache
def kind_of(data_source: str) -> str | None:
    """The kind of the ready scorer of a data source, or None without a scorer."""
    return next((kind for pattern, kind in SOURCES.items() if fnmatch.fnmatchcase(data_source, pattern)), None)


@functools.cache
def ready_scorer(kind: str) -> Scorer:
    """The scorer of any kind but `code` and `judge`, which ask servers; see `agentrl.reward.code` and `judge`."""
    found = SCORERS.get(kind)
    assert callable(found), "ours are functions"
    return Scorer.from_function(found, kind, {}, in_loop=kind in INSTANT)
