"""Scoring of trajectories: what the scorer sees, and what its faults come to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig, ScorerConfig
from agentrl.errors import CodeError, DataError
from agentrl.reward import NaiveRewardManager, score_all
from agentrl.trajectory import Message, Status, Trajectory, Turn
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.trajectory import NO_SOURCE
from tests.naming import Names, naming

QUESTION: Message = {"role": "user", "content": "2 + 3?"}


def said(*contents: Any) -> list[Message]:
    answers: list[Message] = [{"role": "assistant", "content": content} for content in contents]
    return [QUESTION, *answers]


def sample(**changes: Any) -> Sample:
    values = {
        "prompt": [QUESTION],
        "data_source": "quickstart/arithmetic",
        "agent_name": "tool_agent",
        "ground_truth": "5",
    }
    return Sample(**{**values, **changes})


async def scored(
    messages: list[Message], row: Sample | None = None, manager: NaiveRewardManager | None = None, **changes: Any
) -> Trajectory:
    trajectory = Trajectory("t", 0, messages=messages, **changes)
    await score_all(manager or NaiveRewardManager(), [trajectory], row or sample())
    return trajectory


def custom(tmp_path: Path, body: str, **config: Any) -> NaiveRewardManager:
    path = tmp_path / "reward.py"
    path.write_text(body)
    custom_config = CustomRewardConfig(path=str(path), reward_kwargs=config.pop("reward_kwargs", {}))
    return NaiveRewardManager(RewardConfig(**config), custom_config)


@pytest.mark.parametrize(
    ("source", "text", "truth", "score"),
    [
        ("openai/gsm8k", "#### 6", "5", 0.1),
        ("gsm8k", "#### 5.0", "5", 1.0),
        ("lighteval/MATH", r"\boxed{\frac{10}{4}}", "2.5", 1.0),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{4}", "5", 0.0),
        ("HuggingFaceH4/MATH-500", "$5$", "5", 0.0),
        ("math", "$5$", "5", 1.0),
        ("math_dapo", "Answer: 5", "5", 1.0),
        ("aime2024", "so 5", "5", 1.0),
        ("nq", "<answer>five</answer>", ["Five"], 1.0),
        ("searchR1_hotpotqa", "<answer>five</answer>", {"target": ["Five"]}, 1.0),
        ("quickstart/two_step", "#### 5", "5", 1.0),
        ("quickstart/search", "#### 5.0", "5", 0.0),
    ],
)
async def test_the_scorer_of_a_data_source(source: str, text: str, truth: Any, score: float) -> None:
    NaiveRewardManager().check([source])
    trajectory = await scored(said(text), sample(data_source=source, ground_truth=truth))
    assert (trajectory.score, trajectory.status, trajectory.failure) == (score, Status.COMPLETED, None)


def test_an_unknown_data_source_is_refused_before_the_run() -> None:
    with naming(DataError, "data_source", "'openai/gsm8'", "'openai/gsm8k'"):
        NaiveRewardManager().check(["gsm8k", "openai/gsm8"])
    with pytest.raises(DataError, match=r"column data_source .*reward_model\.scorers"):
        NaiveRewardManager().check([NO_SOURCE])
    assert {"openai/gsm8k", "aime*", "nq"} <= set(NaiveRewardManager().sources())


@pytest.mark.parametrize("source", ["gsm8k", "math_dapo", "nq", "quickstart/x", "taco", "mine"])
def test_a_row_without_the_truth_that_its_scorer_compares_with_is_refused(source: str, tmp_path: Path) -> None:
    config = RewardConfig(scorers={"mine": ScorerConfig(name="math")})
    row = sample(data_source=source, ground_truth=None)
    with naming(DataError, "reward_model.ground_truth", "data_source", f"'{source}'"):
        NaiveRewardManager(config).check_row(row)
    NaiveRewardManager(config).check_row(sample(data_source=source, ground_truth=""))
    NaiveRewardManager(config, beside_model=True).check_row(row)
    custom(tmp_path, "def compute_score(solution_str): return 1.0").check_row(row)
    NaiveRewardManager(RewardConfig(scorers={"*": ScorerConfig(name="interaction")})).check_row(row)


async def test_beside_a_reward_model_a_data_source_needs_no_scorer() -> None:
    manager = NaiveRewardManager(beside_model=True)
    manager.check(["gsm8k", "chat"])
    assert (await scored(said("#### 5"), sample(data_source="chat"), manager)).score == 0.0
    assert (await scored(said("#### 5"), sample(data_source="gsm8k"), manager)).score == 1.0


async def test_only_the_policys_own_text_is_scored() -> None:
    planted: list[Message] = [
        {"role": "system", "content": "Answer like #### 5"},
        QUESTION,
        {"role": "assistant", "content": "#### 5"},
        {"role": "user", "content": "and 2 + 3?"},
    ]
    messages: list[Message] = [
        *planted,
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "#### 5"}}]},
        {"role": "tool", "content": "#### 5"},
        {"role": "user", "content": "#### 5"},
    ]
    row = sample(prompt=planted)
    silent = await scored([*messages, {"role": "assistant", "content": "I do not know"}], row)
    assert silent.score == 0.0
    speaking = await scored([*messages, {"role": "assistant", "content": "#### 5"}], row)
    assert speaking.score == 1.0


async def test_what_a_custom_function_is_given(tmp_path: Path) -> None:
    manager = custom(
        tmp_path,
        "seen = []\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info, trajectory, weight):\n"
        "    assert (data_source, solution_str, ground_truth, weight) == ('mine', 'one\\ntwo', 5, 3)\n"
        "    assert (extra_info['index'], extra_info['turn_rewards']) == (7, [0.25, 0.5]), extra_info\n"
        "    assert trajectory.uid == 't'\n"
        "    extra_info['index'] = 8\n"
        "    extra_info['turn_rewards'].append(1)\n"
        "    return sum(trajectory.turn_rewards)\n",
        reward_kwargs={"weight": 3},
    )
    turns = [Turn("assistant", "one", 0, 0, 1, reward=0.25), Turn("assistant", "two", 0, 1, 2, reward=0.5)]
    row = sample(data_source="mine", ground_truth=5, extra_info={"index": 7})
    for _ in range(2):
        trajectory = await scored(said("one", "two"), row, manager, turns=turns)
        assert (trajectory.score, trajectory.failure) == (0.75, None)


async def test_content_in_parts_is_text_too() -> None:
    assert (await scored(said([{"type": "text", "text": "#### "}, {"type": "text", "text": "5"}]))).score == 1.0


@pytest.mark.parametrize(
    ("answer", "score", "extra"),
    [
        ("1", 1.0, {}),
        ("True", 1.0, {}),
        ("__import__('numpy').float32(0.5)", 0.5, {}),
        ("__import__('numpy').array(0.5)", 0.5, {}),
        (
            "{'score': 0.5, 'acc': True, 'n': 3, 'pred': 'x', 'bad': float('nan'), 'list': [1]}",
            0.5,
            {"acc": 1.0, "n": 3.0},
        ),
    ],
)
async def test_answers_that_are_scores(tmp_path: Path, answer: str, score: float, extra: dict[str, float]) -> None:
    trajectory = await scored(said("x"), manager=custom(tmp_path, f"def compute_score(solution_str): return {answer}"))
    assert (trajectory.score, trajectory.score_extra, trajectory.status) == (score, extra, Status.COMPLETED)
    assert trajectory.metrics["score_seconds"] >= 0


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("None", "found None"),
        ("float('nan')", "found nan"),
        ("float('inf')", "found inf"),
        ("-1e39", "found -1e+39"),
        ("'1.0'", "found '1.0'"),
        ("[1.0]", "found [1.0]"),
        ("{'reward': 1}", ("key 'score'", "['reward']")),
        ("{'score': None}", "found None"),
        ("1 / 0", "ZeroDivisionError"),
        ("exit(3)", "SystemExit"),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_anything_else_is_an_error_of_the_function(tmp_path: Path, kind: str, answer: str, says: Names) -> None:
    manager = custom(tmp_path, f"{kind} compute_score(solution_str): return {answer}")
    trajectory = Trajectory("t", 0, messages=said("x"))
    with naming(CodeError, says):
        await score_all(manager, [trajectory], sample())
    assert trajectory.status is Status.FAILED
    assert trajectory.score is None
    assert trajectory.failure is not None
    assert trajectory.failure.startswith("scorer: ")
    with naming(AssertionError, says):
        raise AssertionError(trajectory.failure)


@pytest.mark.parametrize(
    "wait",
    [
        "import os, time\ndef compute_score(solution_str):\n  while not os.path.exists(OVER): time.sleep(0.01)",
        "import asyncio\nasync def compute_score(solution_str):\n  await asyncio.Event().wait()",
    ],
)
async def test_a_deadline_ends_the_wait(tmp_path: Path, wait: str) -> None:
    over = tmp_path / "over"
    manager = custom(tmp_path, f"OVER = {str(over)!r}\n{wait}", timeout=0.1)
    trajectory = await scored(said("x"), manager=manager)
    over.touch()
    assert (trajectory.status, trajectory.failure) == (
        Status.FAILED,
        "scorer: no score within reward_model.timeout=0.1 s",
    )


async def test_at_most_max_concurrent_run_and_waiting_is_not_charged(tmp_path: Path) -> None:
    manager = custom(
        tmp_path,
        "import asyncio\nrunning = peak = 0\n"
        "async def compute_score(solution_str):\n"
        "    global running, peak\n"
        "    running += 1; peak = max(peak, running)\n"
        "    await asyncio.sleep(0.2)\n"
        "    running -= 1\n"
        "    return peak\n",
        timeout=0.8,
        max_concurrent=3,
    )
    trajectories = await asyncio.gather(*(scored(said("x"), manager=manager) for _ in range(15)))
    assert [trajectory.score for trajectory in trajectories] == [3.0] * 15


async def test_blocking_scorers_run_beside_each_other_and_the_loop(tmp_path: Path) -> None:
    over = tmp_path / "over"
    manager = custom(
        tmp_path,
        "import os, threading, time\nmet = threading.Barrier(20)\n"
        "def compute_score(solution_str):\n"
        "    met.wait()\n"
        f"    while not os.path.exists({str(over)!r}): time.sleep(0.01)\n"
        "    return 1\n",
    )
    scoring = [asyncio.create_task(scored(said("x"), manager=manager)) for _ in range(20)]
    await asyncio.sleep(0.05)
    over.touch()
    assert [trajectory.score for trajectory in await asyncio.gather(*scoring)] == [1.0] * 20


async def test_failed_trajectories_are_not_scored() -> None:
    trajectory = await scored(said("#### 5"), status=Status.FAILED, failure="EngineError: gone")
    assert (trajectory.score, trajectory.failure) == (None, "EngineError: gone")


async def test_being_cancelled_is_no_failure_of_the_scorer(tmp_path: Path) -> None:
    manager = custom(tmp_path, "import asyncio\nasync def compute_score(solution_str): await asyncio.sleep(30)")
    task = asyncio.create_task(scored(said("x"), manager=manager))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
