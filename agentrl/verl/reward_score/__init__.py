"""Scorers by the names, signatures and numbers that verl gives them, for files that import them and for its commands.

For a command to train the same, rewards of the same responses have to be the same numbers. These functions therefore
judge as verl judges, also where `agentrl.reward` judges better.
"""

from __future__ import annotations

import functools
import os

from agentrl.config.sections.reward import SandboxFusionConfig
from agentrl.reward.code import CodeJudge
from agentrl.reward.math import MathJudges, is_formed
from agentrl.verl.calling import waited
from agentrl.verl.reward_score import gsm8k, math_dapo, math_reward, search_r1_like_qa_em

MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
DAPO = ("math_dapo", "math", "math_dapo_reasoning")
CODE = ("codecontests", "apps", "codeforces", "taco")
FORM_SHARE = 0.1
"""Share of geometry3k's score that the form of the answer has."""


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: object,
    extra_info: object = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: object = None,
    memory_limit_mb: int | None = None,
    **kwargs: object,
) -> float | dict[str, object]:
    """Score by the data source, as verl does; numina and geometry3k by math-verify, programs by our sandbox's tests.

    Raises NotImplementedError for a data source that verl has no scorer for, and for programs without a
    `sandbox_fusion_url`; `concurrent_semaphore` is not read.
    """
    if data_source == "openai/gsm8k":
        return float(gsm8k.compute_score(solution_str, str(ground_truth)))
    if data_source in MATH:
        return math_reward.compute_score(solution_str, str(ground_truth))
    if data_source in DAPO or data_source.startswith("aime"):
        return math_dapo.compute_score(solution_str, str(ground_truth))
    if data_source.startswith("searchR1_"):
        return _matches(solution_str, ground_truth)
    if data_source.startswith("numina_"):
        return _is_right(solution_str, ground_truth)
    if data_source == "hiyouga/geometry3k":
        right = _is_right(solution_str, ground_truth, boxed=True)
        return (1.0 - FORM_SHARE) * right + FORM_SHARE * is_formed(solution_str)
    if data_source in CODE:
        return _passes(solution_str, ground_truth, sandbox_fusion_url, memory_limit_mb)
    raise NotImplementedError(f"data source {data_source!r} has no scorer in verl: write one for it")


def compute_score(
    data_source: str, solution_str: str, ground_truth: object, extra_info: object = None
) -> float | dict[str, object]:
    """Score the data sources that are judged by their text alone, with {"target": ...} of Search-R1's own rows, too.

    It is the scorer `verl` of `reward_model.scorers`.
    """
    if isinstance(ground_truth, dict) and "target" in ground_truth:
        return _matches(solution_str, ground_truth)
    return default_compute_score(data_source, solution_str, ground_truth)


def _matches(solution: str, ground_truth: object) -> float:
    """Raises ValueError for a ground truth without `target`, as exact match needs it."""
    if not (isinstance(ground_truth, dict) and "target" in ground_truth):
        raise ValueError(f'ground_truth must be {{"target": a text or a list of texts}}, found {ground_truth!r:.200}')
    return float(search_r1_like_qa_em.compute_score(solution, ground_truth))


@functools.cache
def _judges() -> MathJudges:
    return MathJudges(workers=min(8, os.cpu_count() or 1))


def _is_right(solution: str, ground_truth: object, *, boxed: bool = False) -> float:
    return waited(_judges().judge(solution, str(ground_truth), boxed=boxed))["score"]


@functools.cache
def _sandbox(url: str, memory_limit_mb: int) -> CodeJudge:
    return CodeJudge(SandboxFusionConfig(url=url, memory_limit_mb=memory_limit_mb, partial_credit=True))


def _passes(solution: str, tests: object, url: str | None, memory_limit_mb: int | None) -> float:
    if url is None:
        raise NotImplementedError("programs are run by a sandbox alone: give sandbox_fusion_url")
    judge = _sandbox(url, memory_limit_mb or SandboxFusionConfig().memory_limit_mb)
    return waited(judge.compute_score("", solution, tests))["score"]
