"""The ready scorers."""

from __future__ import annotations

import json
import random
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.reward import final_answer, gsm8k, search_qa
from agentrl.reward.gsm8k import Method
from agentrl.reward.sources import kind_of
from agentrl.reward.statement import hedges, is_scaled, relations


@pytest.mark.parametrize(
    ("kind", "sources"),
    [
        ("gsm8k", "openai/gsm8k gsm8k"),
        (
            "math",
            "lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math math_dapo aime2024 "
            "math_dapo_reasoning hiyouga/geometry3k numina_aops_forum numina_synthetic_math numina_amc_aime "
            "numina_synthetic_amc numina_cn_k12 numina_olympiads",
        ),
        ("code", "apps codecontests codeforces taco code/mbpp"),
        ("search_qa", "nq searchR1_nq searchR1_hotpotqa"),
        (None, "mathematics appstore taco2 geometry geometry3k/x"),
    ],
)
def test_data_sources_as_published_sets_name_them(kind: str | None, sources: str) -> None:
    assert {source: kind_of(source) for source in sources.split()} == dict.fromkeys(sources.split(), kind)


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("so #### 72", "72", 1.0),
        ("#### 72.", "72", 1.0),
        ("#### $72.00", "72", 1.0),
        ("#### -$5", "-5", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### 1234", "1,234", 1.0),
        ("#### 72 dollars", "72", 1.0),
        ("####72", "72", 1.0),
        ("#### .5", "0.5", 1.0),
        ("#### 1\n#### 72", "72", 1.0),
        ("#### 72\n#### 1", "72", 0.1),
        ("#### 73", "72", 0.1),
        ("#### 1.2.3", "72", 0.1),
        ("72", "72", 0.0),
        ("#### seventy-two", "72", 0.0),
        ("#### ...", "72", 0.0),
        ("#### 72 ####", "72", 0.0),
        ("#### 42 or 43", "42", 0.0),
        ("#### 42, 43", "42", 0.0),
        ("#### 42/1", "42", 0.0),
        ("#### 42\u00bd", "42", 0.0),
        ("#### 42\u00b2", "42", 0.0),
        ("#### 42 \u0664\u0663", "42", 0.0),
        ("#### 42 m\u00b2", "42", 1.0),
        ("#### 42 (or forty-3)", "42", 0.0),
        ("#### 42 million", "42", 0.0),
        ("#### 42k", "42", 0.0),
        ("#### $42 K", "42", 1.0),
        ("#### 42 dozen", "42", 0.0),
        ("#### 42 is wrong", "42", 0.0),
        ("#### 42 is not it", "42", 0.0),
        ("#### 42?", "42", 0.0),
        ("#### 42 at least", "42", 0.0),
        ("#### 42\u2030", "42", 0.0),
        ("#### 42 km", "42", 1.0),
        ("#### 42\n43 is wrong", "42", 1.0),
        ("#### 4,2", "42", 0.1),
        ("#### 4,200", "42,00", 0.1),
        ("####\n72", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_gsm8k_strict(solution: str, truth: str, score: float) -> None:
    assert gsm8k.compute_score("gsm8k", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("The answer is 72.", "72", 1.0),
        ("It costs $1,200.50 in all", "1200.5", 1.0),
        ("first 72, then 73 ...", "72", 0.1),
        ("none . , .", "72", 0.0),
        ("first 71, then 72", "72", 0.1),
        ("71 or 72", "72", 0.1),
        ("First 71. So 72.", "72", 1.0),
        ("The answer is not 72.", "72", 0.1),
        ("Is it 72?", "72", 0.1),
        ("more than 72", "72", 0.1),
        ("72 is wrong. No.", "72", 0.1),
        ("x > 72", "72", 0.1),
        ("72½", "72", 0.1),
    ],
)
def test_gsm8k_flexible(solution: str, truth: str, score: float) -> None:
    assert gsm8k.compute_score("gsm8k", solution, truth, method="flexible") == score


PLAIN = st.decimals(-(10**6), 10**6, places=2).map(lambda number: f"{number.normalize():f}")
WORDS = st.text(alphabet=st.characters(exclude_categories=["N", "Cs"], exclude_characters="#"), max_size=12)


@given(number=PLAIN, before=WORDS, after=WORDS, more=PLAIN)
@settings(deadline=None)
def test_gsm8k_pays_one_number_on_the_last_line_of_the_form(number: str, before: str, after: str, more: str) -> None:
    line = f"{number} {after}".partition("\n")[0]
    paid = not (hedges(line) or relations(line) or is_scaled(line))
    assert gsm8k.compute_score("gsm8k", f"{before}#### {number} {after}\n{more}", number) == paid
    for hedged in (f"{number} or {more}", f"{number}, {more}", f"{number}/{more}", f"{number} {number}", more + "1"):
        assert gsm8k.compute_score("gsm8k", f"{before}#### {hedged}", number) < 1.0


def test_gsm8k_on_its_own_answers(shared_data: Path) -> None:
    """Every published solution scores 1 against its own number, and 0.1 with the number changed."""
    rows = [json.loads(line) for line in (shared_data / "data/gsm8k/test.jsonl").read_text().splitlines()]
    assert len(rows) == 1319
    for row in rows:
        truth = row["answer"].split("#### ")[1]
        assert gsm8k.compute_score("openai/gsm8k", row["answer"], truth) == 1.0
        assert gsm8k.compute_score("openai/gsm8k", row["answer"] + "7", truth) == 0.1


@pytest.mark.parametrize("method", ["strict", "flexible"])
@pytest.mark.parametrize("text", ["#### " + " " * 200_000, "." * 200_000, "#### " + "-$" * 100_000, "####" * 50_000])
def test_gsm8k_takes_linear_time(method: Method, text: str) -> None:
    begun = time.process_time()
    gsm8k.compute_score("gsm8k", text, "1", method=method)
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(
    ("solution", "truth", "score"),
    [
        ("#### 1776", "1776", 1.0),
        ("is\n####   K7-Q \n", "K7-Q", 1.0),
        ("#### 12", 12, 1.0),
        ("#### 1 #### 2", "2", 1.0),
        ("#### 2 #### 1", "2", 0.0),
        ("#### 1776.0", "1776", 0.0),
        ("1776", "1776", 0.0),
        ("", "", 0.0),
    ],
)
def test_final_answer(solution: str, truth: Any, score: float) -> None:
    assert final_answer.compute_score("quickstart/arithmetic", solution, truth) == score


@pytest.mark.parametrize(
    ("solution", "truth", "em", "f1"),
    [
        ("<answer> The  Beatles! </answer>", "beatles", 1.0, 1.0),
        ("<answer>no</answer> then <answer>yes</answer>", {"target": ["maybe", "Yes."]}, 1.0, 1.0),
        ("<answer>yes</answer> then <answer>no</answer>", ["yes"], 0.0, 0.0),
        ("<answer>president Barack Obama</answer>", ["Barack Obama", "Obama"], 0.0, 0.8),
        ("I think\nan apple\n", "apple", 0.0, 0.0),
        ("apple", "apple", 0.0, 0.0),
        ("apple</answer> <answer>", "apple", 0.0, 0.0),
        ("<answer>apple or pear</answer>", "apple", 0.0, 0.5),
        ("<answer>not an apple</answer>", "apple", 0.0, 2 / 3),
        ("<answer>open", "open", 0.0, 0.0),
        ("closed</answer>", "closed", 0.0, 0.0),
        ("<answer>1990</answer>", 1990, 1.0, 1.0),
        ("", "x", 0.0, 0.0),
        ("<answer>the</answer>", "a", 0.0, 0.0),
        ("<answer>The</answer>", "the", 1.0, 1.0),
        ("<answer>the  !</answer>", "the!", 1.0, 1.0),
        ("<answer>!!!</answer>", "!!!", 1.0, 1.0),
        ("<answer> </answer>", "!!!", 0.0, 0.0),
        ("<answer>.</answer>", "The", 0.0, 0.0),
        ("<answer>-5</answer>", "5", 0.0, 0.0),
        ("<answer>5</answer>", "-5 °C", 0.0, 0.0),
        ("<answer>1.5</answer>", "15", 0.0, 0.0),
        ("<answer>.5</answer>", "5", 0.0, 0.0),
        ("<answer>3:2</answer>", "32", 0.0, 0.0),
        ("<answer>−5.</answer>", "-5", 1.0, 1.0),
        ("<answer>$1,500,000!</answer>", "1500000", 1.0, 1.0),
        ("<answer>15,00</answer>", "1500", 0.0, 0.0),
        ("<answer>Covid-19, (U.S.)</answer>", "covid19 us", 1.0, 1.0),
    ],
)
def test_search_qa(solution: str, truth: Any, em: float, f1: float) -> None:
    score = search_qa.compute_score("nq", solution, truth)
    assert score["score"] == em
    assert score["f1"] == pytest.approx(f1)


NUMBERS = st.decimals(-(10**4), 10**4, places=2).map(lambda number: f"{number.normalize():f}")


@given(one=NUMBERS, other=NUMBERS, mark=st.sampled_from(["", ".", "!", "'", "?", " %"]))
@settings(deadline=None)
def test_search_qa_tells_numbers_apart_by_their_values(one: str, other: str, mark: str) -> None:
    score = search_qa.compute_score("nq", f"<answer>({one}{mark})</answer>", [other])["score"]
    assert score == float(Decimal(one) == Decimal(other))


@given(gold=st.text(max_size=8), answer=st.sampled_from(["", " ", "\n", "<answer></answer>", "<answer> </answer>"]))
@settings(deadline=None)
def test_search_qa_pays_no_empty_answer(gold: str, answer: str) -> None:
    assert search_qa.compute_score("nq", answer, [gold, "The"]) == {"score": 0.0, "f1": 0.0}


@given(gold=st.text(max_size=12).filter(str.strip))
@settings(deadline=None)
def test_search_qa_pays_every_answer_that_is_the_gold_one(gold: str) -> None:
    score = search_qa.compute_score("nq", f"<answer>{gold}</answer>", gold)
    assert score == {"score": 1.0, "f1": 1.0} or "</answer>" in gold


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("<answer>yes</answer>", 1.0),
        ("yes", 0.0),
        ("<answer>no</answer>", 0.25),
        ("no", 0.0),
        ("<answer></answer>", 0.0),
        ("no</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_search_qa_with_a_score_for_the_form(solution: str, score: float) -> None:
    assert search_qa.compute_score("nq", solution, "yes", format_score=0.25)["score"] == score


@pytest.mark.parametrize("truth", [None, {"answers": ["x"]}])
def test_search_qa_refuses_other_ground_truths(truth: Any) -> None:
    with pytest.raises(ValueError, match="ground_truth must be"):
        search_qa.compute_score("nq", "<answer>x</answer>", truth)


def test_search_qa_on_real_answers(shared_data: Path) -> None:
    """Each NQ answer matches itself through the tags, whatever its letters; a shuffled one rarely does."""
    lines = (shared_data / "data/nq_open/NQ-open.dev.jsonl").read_text().splitlines()[:1000]
    answers = [json.loads(line)["answer"] for line in lines]
    for gold in answers:
        assert search_qa.compute_score("nq", f"<answer>{gold[-1]}</answer>", gold) == {"score": 1.0, "f1": 1.0}
    shuffled = answers[:]
    random.Random(0).shuffle(shuffled)
    wrong = [
        search_qa.compute_score("nq", f"<answer>{other[0]}</answer>", gold)["score"]
        for gold, other in zip(answers, shuffled, strict=True)
    ]
    assert sum(wrong) < 20
