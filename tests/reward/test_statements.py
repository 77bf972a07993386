"""Final answers in words and formulas: a value is paid where it is stated, alone, and not where it is only written."""

from __future__ import annotations

import pytest

from agentrl.reward import math
from agentrl.reward.math_value import is_right, read_gold
from agentrl.reward.statement import (
    final_statement,
    hedges,
    is_glued,
    is_listed,
    is_scaled,
    last_box,
    numbers,
    other_numerals,
    relations,
    with_equation,
    without_gaps,
    without_point,
)
from tests.reward.test_math import JUDGES

GOLDS = {
    "34": "35",
    "-5": "6",
    r"\frac{1}{2}": r"\frac{1}{3}",
    "0.75": "0.8",
    "x+1": "x+2",
    r"2\sqrt{3}": r"3\sqrt{2}",
    r"\text{even}": r"\text{odd}",
    "(1,5)": "(1,6)",
    r"[2,\infty)": r"[3,\infty)",
    "x=5": "x=6",
}
"""Ground truths, each with another value."""
STATED = r"""
\boxed{GOLD}
So it is \boxed{GOLD}.
\boxed{OTHER}, no: \boxed{GOLD}
Is it OTHER? No. $\boxed{GOLD}$
\boxed{GOLD} and that is not \text{OTHER}.
\fbox{GOLD}
\boxed{ GOLD }
The answer is $GOLD$.
First OTHER. So the answer is $GOLD$
**Answer:** $GOLD$
Maybe OTHER.
$$GOLD$$
The final answer is $GOLD$. I hope it is correct.
So <answer>$GOLD$</answer>
"""
WRONG = r"""
The answer is not $GOLD$.
The answer isn't $GOLD$
It can’t be $GOLD$.
$GOLD$ or $OTHER$
Either $GOLD$ or something else
$GOLD$. No, $OTHER$.
$GOLD$. No.
Is it $GOLD$?
$GOLD$? No
$GOLD$ is wrong.
The answer is neither $OTHER$ nor $GOLD$
Anything except $GOLD$
$OTHER$, not $GOLD$
maybe $GOLD$
$GOLD \neq OTHER$
$x \ne GOLD$
$OTHER \to GOLD$
$OTHER \Rightarrow GOLD$
$GOLD$ \boxed{OTHER}
\boxed{OTHER} so the answer is $GOLD$
\boxed{GOLD} \boxed{OTHER}
\boxed{GOLD
\boxed{}
\boxed{\neq GOLD}
\boxed{\not= GOLD}
\boxed{OTHER \to GOLD}
\boxed{OTHER \rightarrow GOLD}
\boxed{OTHER \implies GOLD}
\boxed{GOLD → OTHER}
\boxed{GOLD \text{ or } OTHER}
\boxed{GOLD or OTHER}
\boxed{GOLD, OTHER}
\boxed{GOLD \lor OTHER}
\boxed{\text{not }GOLD}
\boxed{\neg GOLD}
\boxed{GOLD ?}
\boxed{\sim GOLD}
\boxed{GOLD \equiv OTHER}
\boxed{GOLD \text{ (not OTHER)}}
\boxed{GOLD \text{ is wrong}}
\boxed{GOLD \ldots}
"""
OF_NUMBERS = r"""
34 or 35
34. No, 35.
34, no: 35
34, I mean 35
33 34
34 35
34-35
34/35
34 to 35
34 or thirty-five
35 = 34
34 ≠ 35
x ≠ 34
x > 34
34 -> 35
34x
34k
34th
34e1
34²
34½
34٣
0.34
34,000
34 thousand
34 squared
half of 34
minus 34
about 34
more than 34
at most 34
There were 3 boys and 34 girls
34 or so
$\frac{34}{2}$
\boxed{34_{16}}
\boxed{34_8}
\boxed{34_b}
\boxed{34_{(16)}}
\boxed{34_{\text{hex}}}
\boxed{\approx 34}
\boxed{x \approx 34}
\boxed{\nleq 34}
\boxed{\succ 34}
\boxed{\lim_{x \to 34}}
\boxed{\le 34}
\boxed{\geq 34}
\boxed{< 34}
\boxed{34 < 35}
\boxed{x > 34}
\boxed{34 \approx 33}
\boxed{33 \approx 34}
\boxed{34 \approx 33.5}
\boxed{33 = 34}
\boxed{34 = 33}
\boxed{3 + 4 = 7 = 34}
\boxed{34 \pm 1}
\boxed{34 \text{ thousand}}
\boxed{\text{more than } 34}
\boxed{\text{about } 34}
\boxed{34 \mid 68}
\boxed{34²}
\boxed{034_{5}}
$34\text{k}$
34\text{ k}
34 k
34 bn
34‰
34\pi
34 \sqrt{2}
\boxed{34\text{k}}
\boxed{34\,\mathrm{k}}
\boxed{34\text{M}}
\boxed{34\text{ bn}}
\boxed{x = 34\text{K}}
\boxed{34\text{ lakh}}
\boxed{\{34\}}
\boxed{\left\{34\right\}}
\boxed{x \in \{34\}}
\boxed{\lbrace 34 \rbrace}
\boxed{\langle 34 \rangle}
$\{34\}$
12 + 22 = 35
12 + 23 = 34
34 = 12 + 22
12 + 22 = 34 or 35
12 + 22 = 34k
12 + 22 = 34 and 3 + 4 = 7
There are 5: 12 + 22 = 34
12 + 22 = 34/2
Is 12 + 22 = 34?
3 + 4 = 7 = 34
68 = 34
"""
RIGHT_34 = r"""
34
34.
so it is 34
There are 34 apples.
$34
34 dollars
34 cm^2
34 m²
x = 34
#### 34
**34**
We have 3+4=7 and 5 more. So 34.
\[34\]
\(34\)
$30 + 4 = 34$
\boxed{30 + 4 = 34}
\boxed 34
\boxed{34_{10}}
\boxed{34 \approx 34.0}
\boxed{34 \text{ cm}^2}
\boxed{34\text{ cm}}
\boxed{34\text{ mm}}
\boxed{34\text{ K}}
\boxed{34\text{ kg}}
34\text{ kg}
\boxed{34^\circ}
\boxed{\$34}
\boxed{{34}}
\boxed{34\%}
12 + 22 = 34
So 12+22=34 apples.
Total = 1,000 - 966 = 34
**2 × 17 = 34**
The answer is (30 + 38) / 2 = 34.
"""


def texts(block: str, gold: str = "", other: str = "") -> list[str]:
    return [line.replace("GOLD", gold).replace("OTHER", other) for line in block.strip().splitlines()]


@pytest.mark.parametrize("gold", GOLDS)
def test_a_value_is_paid_where_it_is_stated_and_only_there(gold: str) -> None:
    truth, other = read_gold(gold), GOLDS[gold]
    unpaid = "Maybe OTHER.".replace("OTHER", other)
    assert [text for text in texts(STATED, gold, other) if not is_right(text, truth)] == [unpaid]
    assert [text for text in texts(WRONG, gold, other) if is_right(text, truth)] == []
    assert [text for text in texts(WRONG, gold, other) if is_right(text, truth, expressions=True)] == []


def test_numbers_are_paid_alone() -> None:
    truth = read_gold("34")
    assert [text for text in texts(OF_NUMBERS) if is_right(text, truth)] == []
    assert [text for text in [*texts(RIGHT_34), "So\n\\[\n34\n\\]"] if not is_right(text, truth)] == []


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("BA", "AB", False),
        ("BA", r"\overline{AB}", False),
        ("BA", "BA", True),
        ("ABC", "ACB", False),
        ("no", "on", False),
        (r"\text{no}", r"\text{no}", True),
        (r"\text{No solution}", r"\text{no solution}", True),
        ("ab", "ba", True),
        ("x=2,x=3", r"x=2 \text{ or } x=3", True),
        ("x>2", r"x \ge 2", False),
        ("x>2", "x>2", True),
        (r"x \neq 2", r"x \neq 2", True),
        (r"\frac{22}{7}", r"\frac{22}{7} \approx 3.14", True),
        (r"\frac{22}{7}", r"\frac{22}{7} \approx 3.2", False),
        ("0", r"0 \approx 5", False),
        (r"10\sqrt{2}", r"10\sqrt{2} \approx 14.14", True),
        ("1011_2", "1011_2", True),
        (r"34\text{k}", r"34\text{k}", True),
        ("2,3", r"\{2,3\}", True),
        (r"\{34\}", r"\{34\}", True),
        (r"34\text{ million}", r"34\text{ million}", True),
        ("1011_2", "1011_3", False),
    ],
)
def test_letters_relations_and_roundings(gold: str, answer: str, right: bool) -> None:
    assert is_right(f"\\boxed{{{answer}}}", read_gold(gold)) is right


async def test_published_sets_of_boxed_answers_pay_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math, "_judges", JUDGES)  # which run already
    for source, unboxed in (("lighteval/MATH", 0.0), ("HuggingFaceH4/MATH-500", 0.0), ("aime2024", 1.0), ("math", 1.0)):
        assert (await math.compute_score(source, "The answer is 34.", "34"))["score"] == unboxed
        assert (await math.compute_score(source, r"The answer is \boxed{34}.", "34"))["score"] == 1.0
        assert (await math.compute_score(source, r"34 \boxed{33}", "34"))["score"] == 0.0


def test_the_last_box_and_the_last_sentence() -> None:
    assert last_box("none") is None
    assert last_box(r"\boxed{1} \boxed{\frac{1}{\{2\}}} more") == r"\frac{1}{\{2\}}"
    assert last_box(r"\boxed{1} \boxed{2") == ""
    assert final_statement("One. Two.\nThree 3.5! Four 4.5.  ") == "Four 4.5."
    assert final_statement("So\n$$x\n= 2$$.") == "$$x\n= 2$$"
    assert final_statement("") == ""
    assert hedges(r"\not Not, isn’t \text{or}") == {"not", "isn't", "or"}


HOSTILE = ["\\boxed{" * 30_000, "{" * 200_000, "$$" * 100_000, ". " * 100_000, "<a" * 100_000, "\\lim_{" * 30_000]
HOSTILE += ["1 =" * 100_000, "= " * 200_000, "1" + " " * 200_000, "1\\text{" * 60_000]
HOSTILE += ["1\\,000" * 60_000, "1~" * 100_000, "1\\, " * 60_000, "1\\,000" + "\\,000" * 60_000 + "\\,0"]
HOSTILE += ["1," * 100_000, "1" * 200_000, "\\[" * 100_000 + "\\]", "n't" * 60_000, "I hope it is correct" * 9_000]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_takes_more_than_linear_time(text: str) -> None:
    """Each is so long that quadratic time would be many minutes."""
    readers = (last_box, final_statement, hedges, is_glued, is_listed, is_scaled, numbers, other_numerals, relations)
    for read in (*readers, with_equation, without_gaps, without_point):
        read(text)
    assert final_statement(text + "\n\nSo 3.") == "So 3."
