"""Mathematical answers, judged where they can cost nobody else anything."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.reward import NaiveRewardManager, math, score_all
from agentrl.reward.math import MathJudges
from agentrl.reward.math_value import is_right, read_gold
from agentrl.system.deadline import within
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample
from tests.naming import naming

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


VALUES = r"""
\frac{7}{2}  <-  3\frac{1}{2}  |  3.5
0.5  <-  The answer is 1/2  |  1/2  |  .5
\frac{3}{4}  <-  6/8
1200000  <-  1.2 \times 10^6
0.06  <-  6.0\times 10^{-2}
0.001  <-  10^{-3}
\frac{\sqrt{5}+1}{2}  <-  \frac{1+\sqrt5}{2}  |  \frac12+\frac{\sqrt5}{2}
50  <-  50\%
50\%  <-  50\%  |  0.5  |  50
5  <-  x = 5  |  5 \text{ cm}  |  \$5.00  |  -(-5)  |  (5)
x=5  <-  5
15  <-  5 \cdot 3 = 15
120  <-  \binom{10}{3} = 120
6  <-  $\sum_{k=1}^{3} k = 1 + 2 + 3 = 6$
x>2  <-  x > 2  |  2 < x
e^2  <-  e^2
e^{-1}  <-  \frac{1}{e}
\begin{pmatrix}1/2&1\\3/2&2\end{pmatrix}  <-  \frac{1}{2}\begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{bmatrix}1&2\\3&4\end{bmatrix}  <-  \begin{pmatrix}1&2\\3&4\end{pmatrix}
[3,5]  <-  [3,5]
(-\infty,3)\cup(5,\infty)  <-  (-\infty,3)\cup(5,\infty)
(1,5)  <-  (1, 5)
(1,5,7)  <-  (1, 5, 7)
\{1,2\}  <-  \{2, 1\}
1,2  <-  1, 2  |  $1$ and $2$
1+\sqrt{2},1-\sqrt{2}  <-  1 \pm \sqrt{2}
1\pm\sqrt{2}  <-  1+\sqrt{2}, 1-\sqrt2
30  <-  30^\circ
30^\circ  <-  30
5\text{ cm}^2  <-  5
1000  <-  1{,}000  |  1\,000  |  1~000  |  1\ 000.  |  The answer is $1\,000$.  |  \$1\,000\,\text{m}
1\,000  <-  1000  |  1,000  |  1\;000
1000,2000  <-  1\,000,\,2\,000
(1\,000,2)  <-  (1\,000,\,2)
10  <-  10.  |  10\text{ cm}.  |  $10.$
10.  <-  10
30\%  <-  30\,\%  |  30~\%  |  30 \, \%  |  0.3  |  30%
30\,\%  <-  30\%  |  30
1000000  <-  1,000,000  |  10^6
1011_2  <-  1011_2
2:3  <-  2:3
2:1  <-  4:2
2\sqrt{2}  <-  \sqrt{8}
\sqrt{8}  <-  2\sqrt2
\frac{1}{\sqrt{2}}  <-  \frac{\sqrt{2}}{2}
\frac{\sqrt{2}}{2}  <-  \frac{1}{\sqrt{2}}
2+2\sqrt{3}  <-  2(1+\sqrt3)
3\pi  <-  3\pi
\frac{3}{4}\pi  <-  \frac{3\pi}{4}
\frac{3\pi}{4}  <-  \frac{3}{4}\pi
5!  <-  120  |  5!
2^{100}  <-  2^{100}  |  4^{50}
\ln 4  <-  2\ln 2
\log_2 3  <-  \frac{\ln 3}{\ln 2}  |  \log_{2}{3}
\sin 20^\circ  <-  \sin 20^\circ
6x  <-  6x
y=3+2x  <-  y = 2x+3
y=2x+3  <-  2x - y + 3 = 0
2x+3y=6  <-  3y+2x=6
[1,2]  <-  x \in [1,2]
1<x<3  <-  1<x<3
-5  <-  -5
-0.75  <-  -\frac{3}{4}
-\frac{3}{4}  <-  \frac{-3}{4}
2+3i  <-  2 + 3i  |  3i+2
\text{Monday}  <-  \text{Monday}
A  <-  \text{(A)}
12  <-  12\text{ square units}
(x+1)(x+2)  <-  x^2+3x+2
x^2+3x+2  <-  (x+1)(x+2)
x^2+2x+1  <-  (x+1)^2
\frac{n^2+n}{2}  <-  \frac{n(n+1)}{2}
2 \sqrt { 221 }  <-  2\sqrt{221}
\mathbb{R} \setminus \{0\}  <-  \mathbb{R} \setminus \{0\}
\left( 3, \frac{\pi}{2} \right)  <-  \left(3, \frac{\pi}{2}\right)
\frac{22}{7}  <-  \frac{22}{7} \approx 3.14
\frac{3}{8}  <-  \dfrac{3}{8}
-\sqrt{3}  <-  -\sqrt{3}
x=2,x=3  <-  x=2 \text{ or } x=3
\emptyset  <-  \emptyset
\infty  <-  \infty
\{1,2,3,4\}  <-  1,2,3,4
7  <-  so it is 7.  |  7 \cdot 1  |  +7
12\sqrt{3}  <-  12\sqrt{3}\text{ cm}^2
5\pi  <-  5\pi \text{ units}
2^{n-1}  <-  a_n = 2^{n-1}  |  2^{n}/2
28  <-  25 + 3 = 28
3+2x  <-  2x+3
|x|  <-  \sqrt{x^2}
7!+2  <-  7!+2
x^2  <-  f(x)=x^2
0.035  <-  3.5\%  |  Answer: 3.5%
33\frac{1}{3}\%  <-  33\frac{1}{3}\%
-1.5  <-  -1\frac{1}{2}
x\ge 2  <-  [2,\infty)
\frac{3\pi}{2}  <-  \frac{\pi}{2}\cdot 3
1.5  <-  3 \cdot \frac{1}{2}
\frac{4}{\sqrt{3}}  <-  \frac{4\sqrt3}{3}  |  4\sqrt{\frac{1}{3}}
\frac{\sqrt{2}+\sqrt{6}}{4}  <-  \frac{\sqrt{6}+\sqrt{2}}{4}
2^{1/3}  <-  \sqrt[3]{2}
\sqrt[3]{2}  <-  2^{1/3}
\frac{x+1}{2}  <-  \frac{x}{2}+\frac{1}{2}
2-x^2  <-  -x^2+2
x^2+x  <-  x(x+1)
3yx^2  <-  3x^2 y
\frac{x}{2}  <-  \frac{3x}{6}  |  \frac{1}{2}x
-1,2  <-  k=-1, 2
(1,2)  <-  (x,y) = (1,2)
n\ge5  <-  n \ge 5
x^2+y^2=25  <-  x^2+y^2=25  |  x^2 + y^2 - 25 = 0
(x-1)^2+(y-2)^2=9  <-  (x-1)^2+(y-2)^2=9
10\sqrt{2}  <-  10\sqrt{2} \approx 14.14
\text{even}  <-  \text{even}
\overline{AB}  <-  \overline{AB}
0.\overline{3}  <-  0.\overline{3}
\frac{\pi}{6}  <-  \theta = \frac{\pi}{6}
5/36  <-  \frac{5}{36}
36\pi  <-  36\pi\text{ cm}^3
2^3 \cdot 3  <-  2^3\cdot 3  |  3\cdot2^3
10^6  <-  1000000
\frac{a}{b}  <-  \frac{a}{b}
3  <-  3, 3
\frac{7}{3}  <-  2\frac{1}{3}  |  2\ \frac{1}{3}
3\frac{1}{4}  <-  \frac{13}{4}
x^2+3  <-  x^{2}+3
3^4  <-  3^{4}
(3,4)  <-  (3,4)
(3,4)\cup(5,6)  <-  (3, 4)\cup (5, 6)
\begin{pmatrix}1&2\\3&4\end{pmatrix}  <-  \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
2\sqrt{3}  <-  2 \sqrt{3}
5000  <-  5 \times 10^{3}
"""
"""Ground truths as published sets have them, and answers that are the same value, perhaps in another form."""
RESTATED = r"""
338350  <-  \sum_{k=1}^{100} k^2
9449772114007  <-  1234567 \cdot 7654321
120  <-  \binom{10}{3}  |  {10 \choose 3}  |  120 = \binom{10}{3}  |  5!  |  \prod_{k=1}^5 k
120  <-  \frac{10!}{3!7!}
\frac{1}{3}  <-  \int_0^1 x^2 dx
25  <-  \frac{100}{4}  |  \frac{(100)}{4}  |  100 \div 4  |  100/4  |  The answer is 100/4
25  <-  \frac{50}{2}\text{ dollars}  |  $25 = \frac{50}{2}$
12  <-  The answer is 3*4
10  <-  20\% \cdot 50
5  <-  x = 2+3  |  \max(3,5)  |  2(3)  |  (2+3)  |  {2+3}  |  2 \; 3  |  {2}{3}  |  2{3}  |  2\,3  |  (2)(3)
x>2  <-  x>4/2
\begin{pmatrix}7\\15\end{pmatrix}  <-  \begin{pmatrix}1&2\\3&4\end{pmatrix}\begin{pmatrix}1\\3\end{pmatrix}
\begin{pmatrix}1&2\end{pmatrix}  <-  \begin{pmatrix}1\\2\end{pmatrix}^T
\begin{pmatrix}\sqrt{2}&\sqrt{3}\end{pmatrix}  <-  \begin{pmatrix}\sqrt{2}\\\sqrt{3}\end{pmatrix}^T
\begin{pmatrix}2\\3\end{pmatrix}  <-  \begin{pmatrix}1+1\\3\end{pmatrix}
-2  <-  \det\begin{pmatrix}1&2\\3&4\end{pmatrix}  |  \begin{vmatrix}1&2\\3&4\end{vmatrix}
(-\infty,6]  <-  (-\infty, 2\cdot 3]
(1,5)  <-  (1, 2+3)
\{1,2\}  <-  \{1, 1+1\}
4  <-  \sqrt{16}  |  7-3  |  (2)\frac{6}{3}
2  <-  \sqrt[3]{8}  |  0.5 \cdot 4  |  \sqrt{2+2}  |  8^{1/3}
\sqrt{6}  <-  \sqrt{2}\cdot\sqrt{3}
\sqrt{2}-1  <-  \frac{1}{1+\sqrt2}
3+2\sqrt{2}  <-  (1+\sqrt2)^2
4+3\sqrt{2}  <-  (1+\sqrt2)(2+\sqrt2)
1+\sqrt{2}  <-  \sqrt{3+2\sqrt2}
5\sqrt{3}  <-  \sqrt{12}+\sqrt{27}
3\pi  <-  2\pi+\pi
\frac{32\pi}{3}  <-  \frac{4}{3}\pi \cdot 8
1024  <-  2^{10}
3  <-  \log_2 8  |  |{-3}|  |  \lfloor 3.7 \rfloor
\frac{1}{2}  <-  \cos\left(\frac{\pi}{3}\right)
3x  <-  x + 2x
6x  <-  3x \cdot 2
x^2  <-  x \cdot x  |  \frac{x^3}{x}
1  <-  \frac{3}{4} + \frac{1}{4}  |  \lim_{x \to 0} \frac{\sin x}{x}
7  <-  3+4  |  7 + 0
-5  <-  -2 - 3
6  <-  \gcd(12,18)  |  (1)(2)(3)
2x  <-  \frac{d}{dx} x^2  |  \frac{6x}{3}
\frac{n(n+1)}{2}  <-  \sum_{k=1}^n k
\frac{6}{7}  <-  \frac{2 \cdot 3}{7}
\frac{2}{3}  <-  \frac{1}{1+\frac12}
\frac{1}{6}  <-  \frac{\frac12}{3}
0.25  <-  \frac{0.5}{2}
x=2,x=3  <-  x=1+1 \text{ or } x=3
3.5  <-  3 + \frac{1}{2}
1.5  <-  2\cdot\frac{3}{4}
8  <-  4^{3/2}
30  <-  2\times3\times5
24  <-  2^3\cdot 3
\frac{13}{3}  <-  2\frac{7}{3}
"""
"""Values, and formulas that are equal to them and leave the work to their reader."""


def cases(line: str) -> tuple[str, list[str]]:
    truth, _, answers = line.partition("  <-  ")
    as_they_are = ("The ", "so ", "Answer", "$")
    return truth, [text if text.startswith(as_they_are) else f"\\boxed{{{text}}}" for text in answers.split("  |  ")]


@pytest.mark.slice(15, "matrix")
@pytest.mark.parametrize("line", VALUES.strip().splitlines())
def test_a_value_is_right_in_every_form(line: str) -> None:
    truth, answers = cases(line)
    gold = read_gold(truth)
    assert [answer for answer in answers if not is_right(f"So: {answer}", gold)] == []


@pytest.mark.slice(15, "matrix")
@pytest.mark.parametrize("line", RESTATED.strip().splitlines())
def test_a_problem_that_is_written_down_again_is_no_answer(line: str) -> None:
    truth, answers = cases(line)
    gold = read_gold(truth)
    assert [answer for answer in answers if is_right(f"So: {answer}", gold)] == []
    assert [answer for answer in answers if not is_right(f"So: {answer}", gold, expressions=True)] == []


RESTATE = (
    (r"{a} + {b}", lambda a, b: a + b),
    (r"{a}-{b}", lambda a, b: a - b),
    (r"{a} \cdot {b}", lambda a, b: a * b),
    (r"{a}({b}+1)", lambda a, b: a * (b + 1)),
    (r"\left({a}\right)\times{{{b}}}", lambda a, b: a * b),
    (r"\frac{{{a}}}{{1}} \cdot {b}", lambda a, b: a * b),
    (r"-\left({b}-{a}\right)", lambda a, b: a - b),
    (r"\begin{{vmatrix}}{a}&1\\-1&{b}\end{{vmatrix}}", lambda a, b: a * b + 1),
    (r"\sqrt{{{a}}}\sqrt{{{a}}}", lambda a, b: a),
    (r"\frac{{{a}x+{b}x}}{{x}}", lambda a, b: a + b),
    (r"({a},{b}+{a})", lambda a, b: f"({a},{a + b})"),
    (r"\{{{a}, {b} \cdot 2\}}", lambda a, b: rf"\{{{a},{2 * b}\}}"),
    (r"x+{a} = {b}", lambda a, b: f"x={b - a}"),
    (r"{a}x+{b}x", lambda a, b: f"{a + b}x"),
)


@pytest.mark.parametrize(("form", "result"), RESTATE)
def test_no_numbers_make_a_restated_problem_right(form: str, result: Callable[[int, int], object]) -> None:
    numbers = random.Random(form)
    for prefix in ("", "x = ", r"\quad "):
        a, b = numbers.randrange(2, 10**9), numbers.randrange(2, 10**9)
        text, value = form.format(a=a, b=b), str(result(a, b))
        gold = read_gold(value)
        assert not is_right(f"\\boxed{{{prefix}{text}}}", gold)
        assert is_right(f"\\boxed{{{prefix}{value}}}", gold) or "x" in form
        assert is_right(f"$y = {text} = {value}$", gold) or not value.lstrip("-").isdigit()


async def test_tasks_whose_answers_are_expressions_may_say_so() -> None:
    product, gold = r"\boxed{2 \cdot 3 \cdot 5}", "30"
    assert (await math.compute_score("math", product, gold))["score"] == 0.0
    assert (await math.compute_score("math", product, gold, expressions=True))["score"] == 1.0
    scorers = RewardConfig.model_validate({"scorers": {"mine": {"name": "math", "kwargs": {"expressions": True}}}})
    trajectory = Trajectory("t", 0, messages=[{"role": "assistant", "content": product}])
    await score_all(NaiveRewardManager(scorers), [trajectory], Sample([], "mine", "single_turn", ground_truth=gold))
    assert trajectory.score == 1.0


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
        (r"\boxed{even}", r"\text{even}", 1.0),
        (r"\boxed{\text{Even}}", "even", 1.0),
        (r"\boxed{no solution}", r"\mathrm{no solution}", 1.0),
        (r"\boxed{neve}", "even", 0.0),
        (r"\boxed{odd}", r"\text{even}", 0.0),
        (r"\boxed{cab}", "abc", 1.0),
        ("final 3", r"\boxed{3}", 1.0),
        ("", "3", 0.0),
        ("\ud800 odd \x00 \n text", "3", 0.0),
    ],
)
async def test_scores(solution: str, truth: str, score: float) -> None:
    assert await math.compute_score("math", solution, truth) == {"score": score, "unjudged": 0.0}


@pytest.mark.parametrize(("truth", "shown"), [("", "''"), (r"\sum_{k=1}^{10^9} k^k" * 200, r"'\\sum_{k=1}^{10^9} k^k")])
async def test_a_ground_truth_that_cannot_be_read_is_an_error(truth: str, shown: str) -> None:
    with naming(ValueError, "ground truth", shown):
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
    for text in ("it is 3", HOSTILE["a power that fills the memory"], "so 3", HOSTILE["a tower of powers"], "so 3"):
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


@pytest.mark.parametrize(
    ("answer", "formed", "right"),
    [
        (r"<think>6 times 7</think> So \boxed{42}", True, True),
        (r"<think>6 times 7</think> So \boxed{41}", True, False),
        (r"<think>\boxed{42}</think> So 42", False, True),
        (r"So \boxed{42}", False, True),
        (r"So <think></think>\boxed{42}", False, True),
        ("<think>6 times 7", False, False),
        ("<think></think>" + "\\boxed{" * 3, False, False),
    ],
)
async def test_a_share_of_the_score_is_for_the_form(answer: str, formed: bool, right: bool) -> None:
    verdict = await math.compute_score("hiyouga/geometry3k", answer, "42", format_share=0.1)
    assert verdict["score"] == pytest.approx(0.1 * formed + 0.9 * right)
    assert (await math.compute_score("hiyouga/geometry3k", answer, "42"))["score"] == float(right)


async def test_a_share_is_a_part_of_one() -> None:
    with naming(ValueError, "format_share:", "found 1.5"):
        await math.compute_score("x", "42", "42", format_share=1.5)
