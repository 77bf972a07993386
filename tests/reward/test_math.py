"""Mathematical answers, judged where they can cost nobody else anything."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.reward import NaiveRewardManager, math, score_all
from agentrl.reward.math import MathJudges
from agentrl.system.deadline import within
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample

UNJUDGED = {"score": 0.0, "unjudged": 1.0}
RIGHT = {"score": 1.0, "unjudged": 0.0}
JUDGES = MathJudges(workers=2, seconds=0.3)
HOSTILE = {
    "a tower of powers": r"\boxed{9^{9^{9^9}}}",
    "a factorial": r"\boxed{(10^9)!}",
    "a power that fills the memory": r"\boxed{2^{10^{12}}}",
    "a polynomial": r"\boxed{(x+y+z+1)^{3000}}",
    "a sum": r"\boxed{\sum_{k=1}^{10^9} k^k}",
    "a long sum": r"\boxed{" + "1+" * 20_000 + "1}",
    "deep braces": r"\boxed{" + "{" * 5000 + "}" * 5000,
    "deep fractions": r"\boxed{" + r"\frac{1}{" * 400 + "1" + "}" * 400 + "}",
    "many boxes": r"\boxed{" * 5000,
    "many digits": "9" * 200_000,
}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "_judges", JUDGES)


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


@pytest.mark.parametrize("truth", ["", r"\sum_{k=1}^{10^9} k^k" * 200])
async def test_a_ground_truth_that_cannot_be_read_is_an_error(truth: str) -> None:
    with pytest.raises(ValueError, match="the ground truth '"):
        await math.compute_score("math", "3", truth)


async def test_many_at_once_keep_their_own_verdicts() -> None:
    verdicts = await asyncio.gather(*(math.compute_score("math", f"so {k % 7}", str(k % 5)) for k in range(60)))
    assert [verdict["score"] for verdict in verdicts] == [float(k % 7 == k % 5) for k in range(60)]


async def test_hostile_answers_are_wrong_each_within_its_own_time_and_those_behind_them_are_judged() -> None:
    used = time.process_time()
    answers = [text for hostile in HOSTILE.values() for text in (hostile, "so 3")]
    verdicts = await asyncio.gather(*(JUDGES.judge(text, "3") for text in answers))
    assert verdicts[1::2] == [RIGHT] * len(HOSTILE)
    assert {verdict["score"] for verdict in verdicts[::2]} == {0.0}
    assert sum(verdict["unjudged"] for verdict in verdicts) >= len(HOSTILE) / 2
    assert time.process_time() - used < 0.5  # it is not paid in this process


async def test_what_an_answer_leaves_behind_is_not_the_next_ones() -> None:
    """Its fork is replaced when it was late or has held much; the process that forks stays."""
    judges = MathJudges(workers=1, seconds=0.3)
    for text in ("4 and 3", HOSTILE["a power that fills the memory"], "so 3", HOSTILE["a tower of powers"], "so 3"):
        verdict = await judges.judge(text, "3")
        assert verdict == (RIGHT if "3" in text and "^" not in text else UNJUDGED)
    (worker,) = judges._idle
    forks = set()
    for _ in range(2):
        assert await judges.judge("so 3", "3") == RIGHT
        forks.add(Path(f"/proc/{worker.process.pid}/task/{worker.process.pid}/children").read_text())
    assert judges._idle == [worker]
    assert len(forks) == 1 and len(forks.pop().split()) == 1
    worker.process.kill()  # it is replaced, and nobody's deadline counts the start
    async with within(0.05):
        assert await judges.judge("2", "2") == RIGHT


async def test_who_no_longer_waits_ends_the_judging() -> None:
    judges = MathJudges(workers=1, seconds=60)
    slow = asyncio.create_task(judges.judge(HOSTILE["a long sum"], "3"))
    behind = asyncio.create_task(judges.judge("2", "2"))
    await asyncio.sleep(0.05)
    slow.cancel()
    assert await behind == RIGHT
    assert slow.cancelled()


@pytest.mark.parametrize("own", [False, True])
async def test_no_deadline_counts_the_queue_or_what_a_hostile_answer_takes(own: bool, tmp_path: Path) -> None:
    """Neither reward_model.timeout, nor where a user's own scorer asks this one."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from agentrl.reward.math import compute_score as ask\n"
        "async def compute_score(solution_str, ground_truth):\n"
        "    return await ask('', solution_str, ground_truth)\n"
    )
    manager = NaiveRewardManager(RewardConfig(timeout=0.1), CustomRewardConfig(path=str(path)) if own else None)

    async def one(text: str) -> Trajectory:
        trajectory = Trajectory("t", 0, messages=[{"role": "assistant", "content": text}])
        await score_all(manager, [trajectory], Sample([], "math", "single_turn", ground_truth="3"))
        return trajectory

    ended = await asyncio.gather(*(one(text) for text in [HOSTILE["a tower of powers"], "so 3"] * 4))
    assert [(t.score, t.failure) for t in ended] == [(0.0, None), (1.0, None)] * 4
