"""Scorers by verl's names: the numbers here are those that verl 0.9.1 returned for these responses."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl import verl
from agentrl.config import load_config
from agentrl.config.sections.reward import RewardConfig, SandboxFusionConfig
from agentrl.reward import NaiveRewardManager
from agentrl.reward.dapo import DapoRewardManager
from agentrl.rollouts.context import load_reward
from agentrl.rollouts.objects import UserObjects
from agentrl.verl import default_compute_score, gsm8k, math_dapo, math_reward, search_r1_like_qa_em
from agentrl.verl.calling import waited
from agentrl.verl.reward_score import _sandbox
from tests.naming import naming
from tests.sandbox.servers import running

ENGINE = "actor_rollout_ref.rollout.name=embedded"


@pytest.mark.parametrize(
    ("text", "truth", "strict", "flexible"),
    [
        ("so #### 72", "72", 1.0, 1.0),
        ("so ####72", "72", 0, 1.0),
        ("#### 1,234 dollars", "1234", 1.0, 0.5),
        ("#### 72.0", "72", 0.5, 0.5),
        ("72 " + "x" * 300, "72", 0, 0),
        ("none.", "72", 0, 0.5),
    ],
)
def test_gsm8k(text: str, truth: str, strict: float, flexible: float) -> None:
    assert gsm8k.compute_score(text, truth, format_score=0.5) == strict
    assert gsm8k.compute_score(text, truth, "flexible", 0.5) == flexible


@pytest.mark.parametrize(
    ("text", "truth", "score", "pred", "boxed"),
    [
        ("Answer: 42", "42", 1.0, "42", -1.0),
        ("answer : $\\frac12$ units\n", "\\frac{1}{2}", 1.0, "\\frac{1}{2}", -1.0),
        ("Answer: 1,234", "1234", 1.0, "1234", -1.0),
        ("it is \\boxed{42}", "42", 1.0, "42", 1.0),
        ("Answer: 41 and \\boxed{42}", "42", -1.0, "41and42", 1.0),
        ("\\boxed{4{2}" + "y", "42", -1.0, "[INVALID]", -1.0),
        ("no idea", "42", -1.0, "[INVALID]", -1.0),
    ],
)
def test_math_dapo(text: str, truth: str, score: float, pred: str, boxed: float) -> None:
    assert math_dapo.compute_score(text, truth) == {"score": score, "acc": score == 1.0, "pred": pred}
    assert math_dapo.compute_score(text, truth, strict_box_verify=True)["score"] == boxed


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("\\boxed{\\dfrac12}", "\\frac{1}{2}", 1.0),
        ("\\boxed{1/2}", "\\frac{1}{2}", 1.0),
        ("\\boxed{x=5}", "5", 1.0),
        ("\\boxed{5\\text{ cm}}", "5", 1.0),
        ("\\fbox{5}", "5", 0.0),
        ("\\boxed 5$", "5", 1.0),
        ("5", "5", 0.0),
    ],
)
def test_math_reward(text: str, truth: str, score: float) -> None:
    assert math_reward.compute_score(text, truth) == score


def test_search() -> None:
    truth = {"target": ["Paris", "the capital"]}
    score = search_r1_like_qa_em.compute_score
    assert score("<answer> Rome </answer> no, <answer>the paris.</answer>", truth) == 1.0
    assert score("Paris", truth) == 0
    assert score("<answer>Rome</answer>", truth, format_score=0.1) == 0.1
    assert score("<answer>Paris</answer>" * 11, truth) == 0.25
    assert search_r1_like_qa_em.compute_score_subem("<answer>in Paris</answer>", truth) == 1.0


def test_the_data_source_chooses_the_scorer() -> None:
    assert default_compute_score("openai/gsm8k", "#### 5", "5") == 1.0
    assert default_compute_score("aime24", "Answer: 5", "5") == {"score": 1.0, "acc": True, "pred": "5"}
    assert default_compute_score("lighteval/MATH", "\\boxed{5}", "5", {"index": 1}) == 1.0
    assert default_compute_score("searchR1_nq", "<answer>5</answer>", {"target": "5"}) == 1.0
    with naming(NotImplementedError, "'mine'"):
        default_compute_score("mine", "", "")
    with pytest.raises(NotImplementedError, match="give sandbox_fusion_url"):
        default_compute_score("apps", "", "{}")
    assert verl.math_dapo is math_dapo


def test_formulas_and_programs_are_judged_by_ours() -> None:
    assert default_compute_score("numina_cn_k12", "\\boxed{\\frac{2}{4}}", "\\frac{1}{2}") == 1.0
    right = "<think>t</think> \\boxed{\\frac{2}{4}}"
    assert default_compute_score("hiyouga/geometry3k", right, "0.5") == pytest.approx(1.0)
    assert default_compute_score("hiyouga/geometry3k", right[len("<think>") :], "0.5") == pytest.approx(0.9)
    assert default_compute_score("hiyouga/geometry3k", "The answer is 0.5.", "0.5") == 0.0
    assert default_compute_score("numina_cn_k12", "The answer is not 0.5", "0.5") == 0.0
    tests = '{"inputs": ["1", "2", "3", "4"], "outputs": ["1", "2", "3", "0"]}'
    with running(None, options=("--concurrency", "2")) as server:
        program = "```python\nprint(input())\n```"
        url = f"{server.url}/run_code"
        assert default_compute_score("taco", program, tests, sandbox_fusion_url=url) == 0.75
    # Kept for the process's life, as a plain function has no end at which to close it.
    waited(_sandbox(url, SandboxFusionConfig().memory_limit_mb).close())


async def test_a_command_of_verls_scores_as_verl_does(tmp_path: Path) -> None:
    """Ours would pay 0.1 for the second, 1.0 for the third, and 0.0 for the fourth."""
    config = load_config([ENGINE], "ppo_trainer").reward_model
    manager = NaiveRewardManager(RewardConfig.model_validate(config.model_dump(include=set(RewardConfig.model_fields))))

    async def score(source: str, text: str, truth: object) -> float:
        asked = {"data_source": source, "solution_str": text, "ground_truth": truth, "extra_info": {}}
        return (await manager.judge({**asked, "trajectory": None})).score

    assert await score("openai/gsm8k", "#### 5", "5") == 1.0
    assert await score("openai/gsm8k", "#### 6", "5") == 0.0
    assert await score("searchR1_nq", "Paris", {"target": ["Paris"]}) == 0.0
    assert await score("math_dapo", "Answer: 6", "5") == -1.0
    fork = load_config([ENGINE, "actor_rollout_ref.actor.state_masking=true"], "search_r1_trainer").reward_model
    assert fork.scorers["nq"].name == "verl" and fork.scorers["openai/gsm8k"].name == "verl"


async def test_a_reward_model_of_verls_commands_scores_alone(tmp_path: Path) -> None:
    """The scorers, dapo's manager and its penalty aside, give nothing then."""
    words = [
        ENGINE,
        "reward_model.enable=True",
        f"reward_model.model.path={tmp_path}",
        "reward_model.reward_manager=dapo",
    ]
    manager = load_reward(load_config(words, "ppo_trainer"), UserObjects())
    assert isinstance(manager, DapoRewardManager)
    asked = {"data_source": "openai/gsm8k", "solution_str": "#### 5", "ground_truth": "5", "extra_info": {}}
    assert (await manager.judge({**asked, "trajectory": None})).score == 0.0
    manager.check(["any/source"])
