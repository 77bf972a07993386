"""One right answer is paid once: every ready interaction, with each scorer that its rows are paired with."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config
from agentrl.config.sections.reward import RewardConfig, SandboxFusionConfig
from agentrl.interaction import Interaction, InteractionResponse, load_interactions
from agentrl.reward import NaiveRewardManager
from agentrl.trajectory import Message, Status, Trajectory
from agentrl.trajectory.collate import from_trajectories
from agentrl.trajectory.sample import Sample
from tests.agent_loop.conftest import Bench, sample
from tests.interactions.test_simulated_user import completion, user
from tests.sandbox.servers import running

MakeBench = Callable[..., Bench]
COEF = Config().algorithm.turn_reward_coef
TESTS = '{"kind": "asserts", "entry_points": ["one"], "tests": ["assert one() == 1"]}'
LAKE = ["down", "down", "right", "down", "right", "right"]


def program(value: int) -> str:
    return f"```python\ndef one():\n    return {value}\n```"


@dataclasses.dataclass(frozen=True)
class Case:
    """A ready interaction with a row, and what a policy says that is right, or wrong as often as it is asked."""

    file: str
    row: dict[str, Any]
    right: list[str]
    wrong: str
    sources: tuple[str, ...]
    ground_truth: str = ""


CASES = [
    Case("gsm8k", {"ground_truth": "72"}, ["#### 72"], "#### 71", ("openai/gsm8k", "interaction/gsm8k"), "72"),
    Case("unit_tests", {"tests": TESTS}, [program(1)], program(2), ("code/mine", "interaction/code"), TESTS),
    Case("frozen_lake", {"seed": 7}, LAKE, "left", ("interaction/lake",)),
    Case("simulated_user", {"goal": "72"}, ["#### 72"], "#### 71", ("openai/gsm8k",), "72"),
]


@pytest.fixture(scope="module")
def sandbox() -> Iterator[str]:
    with running(None, options=("--concurrency", "2")) as started:
        yield started.url


@pytest.fixture
def opened(sandbox: str, server: Callable[..., Any]) -> Callable[[str], Any]:
    @asynccontextmanager
    async def open_one(file: str) -> AsyncIterator[tuple[str, Interaction]]:
        """As its YAML makes it, but for the addresses of servers."""
        (made,) = load_interactions(f"interactions/{file}.yaml").values()
        if file == "simulated_user":
            made = user((await server(completion("###STOP###"))).url)
        if file == "unit_tests":
            made = type(made)({**made.config, "url": sandbox}, made.name)
        try:
            yield made.name, made
        finally:
            await made.close()

    return open_one


def test_no_ready_interaction_is_missing() -> None:
    folder = Path(__file__).parents[2] / "configs" / "interactions"
    assert {case.file for case in CASES} == {path.stem for path in folder.glob("*.yaml")}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
async def test_a_right_answer_is_paid_once(
    case: Case, bench: MakeBench, opened: Callable[[str], Any], sandbox: str
) -> None:
    async with opened(case.file) as (name, interaction):
        reward = NaiveRewardManager(RewardConfig(sandbox_fusion=SandboxFusionConfig(url=sandbox)))
        for source in case.sources:
            rewards = []
            turns = len(case.right) + 1
            for script in (case.right, [case.wrong] * turns, [case.wrong, *case.right]):
                b = bench(
                    script,
                    interactions={name: interaction},
                    call_timeout=30.0,
                    max_assistant_turns=turns,
                    max_user_turns=turns,
                    max_response_tokens=1200,
                    max_model_len=2400,
                )
                b.scheduler.reward = reward
                kwargs = {"name": name, **case.row}
                row = sample(data_source=source, ground_truth=case.ground_truth, interaction_kwargs=kwargs)
                (trajectory,) = await b.run(row)
                assert trajectory.score is not None, trajectory.failure
                rewards.append(paid(trajectory))
            at_once, never, later = rewards
            assert at_once == 1.0, f"{case.file} with {source}"
            assert never < at_once and later <= at_once
        await reward.close()


def paid(trajectory: Trajectory, coef: float = COEF) -> float:
    """What the batch holds; the same whatever the weight of turns is where only a dialogue's score pays."""
    total = float(from_trajectories([trajectory], turn_reward_coef=coef).rewards.double().sum())
    assert total == pytest.approx(trajectory.outline().reward(coef))
    return round(total, 6)


class Steps(Interaction):
    """Scores each turn, and the dialogue by their sum."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self.total = 0.0

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        score = float(str(messages[-1]["content"]))
        self.total += score
        return InteractionResponse(should_end=score == 0.5, text="more", score=score)

    async def calculate_score(self, instance_id: str) -> float:
        return self.total


@pytest.mark.parametrize("coef", [0.0, 0.3, 1.0, 2.0])
async def test_a_dialogues_score_is_paid_as_it_is_and_its_steps_where_they_were_made(
    bench: MakeBench, coef: float
) -> None:
    b = bench(["0.2", "0.3", "0.5"], interactions={"steps": Steps({}, "steps")})
    (t,) = await b.run(sample(data_source="interaction/steps", interaction_kwargs={"name": "steps"}))
    assert (t.status, t.score, t.turn_rewards) == (Status.COMPLETED, 1.0, [0.2, 0.3, 0.5])
    assert paid(t, coef) == 1.0
    rewards = [value for value in from_trajectories([t], turn_reward_coef=coef).rewards.tolist() if value]
    expected = [coef * 0.2, coef * 0.3, coef * 0.5 + 1.0 - coef]
    assert rewards == pytest.approx([value for value in expected if value], abs=1e-6)


async def test_turn_scores_that_no_scorer_pays_are_paid_beside_the_score(bench: MakeBench) -> None:
    b = bench(["0.2", "0.5"], interactions={"steps": Steps({}, "steps")})
    row: Sample = sample(interaction_kwargs={"name": "steps"})
    (t,) = await b.run(row)
    assert t.score == 0.0, "0.5 is not 5"
    assert paid(t, 2.0) == 1.4
