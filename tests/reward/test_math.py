"""Mathematical answers, judged in processes that can be killed."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.reward import math
from agentrl.reward.math import MathJudges


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"The answer is $\frac12$.", r"\frac{1}{2}", 1.0),
        ("Answer: 34", "34", 1.0),
        ("first 34, no: 35", "34", 0.0),
        (r"\boxed{x+1}", "1+x", 1.0),
        (r"\boxed{x-1}", "1+x", 0.0),
        ("final 3", "$3$", 1.0),
        ("final 3", r"\boxed{3}", 1.0),
        ("", "3", 0.0),
        ("\ud800 odd \x00 \n text", "3", 0.0),
    ],
)
async def test_scores(solution: str, truth: str, score: float) -> None:
    assert await math.compute_score("math", solution, truth) == {"score": score, "unjudged": 0.0}


async def test_a_ground_truth_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match="ground truth ''"):
        await math.compute_score("math", "3", "")


async def test_many_at_once_keep_their_own_verdicts() -> None:
    verdicts = await asyncio.gather(*(math.compute_score("math", f"so {k % 7}", str(k % 5)) for k in range(60)))
    assert [verdict["score"] for verdict in verdicts] == [float(k % 7 == k % 5) for k in range(60)]


def test_what_takes_too_long_is_killed_and_wrong_and_the_next_is_judged() -> None:
    judges = MathJudges(workers=1)
    assert judges.judge("1", "1")["score"] == 1.0
    begun = time.monotonic()
    assert judges.judge(r"\boxed{9^{9^{9^9}}}", "3", deadline=0.3) == {"score": 0.0, "unjudged": 1.0}
    assert time.monotonic() - begun < 2
    assert judges.judge("2", "2") == {"score": 1.0, "unjudged": 0.0}


def test_a_worker_that_died_meanwhile_is_replaced() -> None:
    judges = MathJudges(workers=1)
    assert judges.judge("1", "1")["score"] == 1.0
    judges._idle[0].kill()
    judges._idle[0].wait()
    assert judges.judge("2", "2")["score"] == 1.0
