"""Scorers and reward managers of a user's own, chosen by the config."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.config.sections.offline import EvaluateConfig
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.errors import CodeError, ConfigError
from agentrl.reward import NaiveRewardManager, make_reward_manager, score_all
from agentrl.trajectory import Status, Trajectory, Turn
from agentrl.trajectory.sample import Sample
from tests.naming import Names, naming

MINE = """
from __future__ import annotations
from pydantic import BaseModel
from agentrl.reward import GroupRewardManager, RewardManager, Verdict

def length(solution_str, scale=1):
    return {"score": len(solution_str) * scale, "characters": len(solution_str)}

class Options(BaseModel):
    target: int = 3

def near(solution_str, options: Options):
    return -abs(len(solution_str) - options.target)

class Ranked(GroupRewardManager):
    def __init__(self, config, custom, *, beside_model, options: Options):
        super().__init__(config, custom, beside_model=beside_model)
        self.options = options

    async def score_group(self, trajectories, sample):
        lengths = sorted(len(one.turns[-1].text) for one in trajectories)
        if self.options.target == 0:
            return []
        return [Verdict(float(lengths.index(len(one.turns[-1].text))), {"of": len(lengths)}) for one in trajectories]

class Careless(RewardManager):
    async def score(self, trajectory, sample):
        return trajectory.nothing
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def said(text: str, uid: str = "t") -> Trajectory:
    turn = Turn("assistant", text, transcript=0, start=0, end=0)
    return Trajectory(uid, 0, "x", "single_turn", turns=[turn], status=Status.COMPLETED)


def row(source: str) -> Sample:
    return Sample([], source, "single_turn", ground_truth="5")


async def scored(config: dict[str, object], source: str, text: str) -> tuple[float | None, dict[str, float]]:
    manager = NaiveRewardManager(RewardConfig.model_validate(config))
    manager.check([source])
    trajectory = said(text)
    await score_all(manager, [trajectory], row(source))
    return trajectory.score, trajectory.score_extra


async def test_a_scorer_for_one_source_beside_ours(file: Path) -> None:
    scorers = {
        "essay/short": {"name": f"{file}:near", "kwargs": {"target": 5}},
        "essay/*": {"name": f"{file}:length", "kwargs": {"scale": 2}},
        "my_math": "gsm8k",
        "gsm8k": {"name": "gsm8k", "kwargs": {"method": "flexible"}},
    }
    assert await scored({"scorers": scorers}, "essay/long", "abc") == (6.0, {"characters": 3.0})
    assert await scored({"scorers": scorers}, "essay/short", "abc") == (-2.0, {})
    assert await scored({"scorers": scorers}, "my_math", "#### 5") == (1.0, {})
    assert await scored({"scorers": scorers}, "gsm8k", "It is 5.") == (1.0, {})
    assert await scored({"scorers": scorers}, "openai/gsm8k", "It is 5.") == (0.0, {}), "ours stays as it is"


def test_a_wrong_scorer_is_told_with_its_pattern(file: Path) -> None:
    for entry, says in [
        ({"name": f"{file}:length", "kwargs": {"scal": 2}}, r"scorers\.x\*\.kwargs sets 'scal'; did you mean 'scale'"),
        ({"name": "code", "kwargs": {"timeout": 2}}, r"scorers\.x\*\.kwargs: code takes none.*sandbox_fusion"),
    ]:
        with pytest.raises(ConfigError, match=says):
            NaiveRewardManager(RewardConfig.model_validate({"scorers": {"x*": entry}}))
    with naming(ConfigError, "data_source", "'x1'"):
        NaiveRewardManager(RewardConfig.model_validate({"scorers": {"x*": "code"}})).check(["x1"])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["reward_model.scorers={my/*: gsm}"], ("scorers.my/*", "'gsm'", "'gsm8k'", "unknown")),
        (["reward_model.scorers={a: {name: FILE:near, kwargs: {targe: 1}}}"], ("key 'targe'", "unknown")),
        (["reward_model.scorers={a: FILE:nea}"], ("scorers.a", "mine.py", "'nea'", "'near'")),
        (["reward_model.scorers={a: gsm8k}", "custom_reward_function.path=FILE"], ("function", "own scores")),
        (["reward_model.reward_manager=nave"], ("'nave'", "'naive'", "unknown")),
        (["reward_model.reward_manager=FILE:near"], "agentrl.reward.contract.RewardManager"),
        (
            ["reward_model.reward_manager=FILE:Ranked", "reward_model.reward_manager_options.goal=1"],
            ("reward_model.reward_manager_options", "key 'goal'", "unknown"),
        ),
    ],
)
def test_wrong_choices_are_told_with_the_config(file: Path, keys: list[str], says: Names) -> None:
    with naming(ConfigError, says):
        given = [key.replace("FILE", str(file)) for key in keys]
        load_config(["data.path=x.parquet", *given], "evaluate", EvaluateConfig)


async def test_a_manager_that_compares_the_trajectories_of_a_prompt(file: Path) -> None:
    config = RewardConfig.model_validate({"reward_manager": f"{file}:Ranked"})
    manager = make_reward_manager(config, CustomRewardConfig())
    assert manager.by_group
    group = [said("abc", "0"), said("a", "1"), said("ab", "2"), said("abcd", "3")]
    group[2].status = Status.FAILED
    verdicts = await score_all(manager, group, row("x"))
    assert [one.score for one in group] == [1.0, 0.0, None, 2.0] and verdicts[2] is None
    assert group[0].score_extra == {"of": 3}


async def test_an_error_of_a_manager_is_told_with_its_place(file: Path) -> None:
    config = RewardConfig.model_validate({"reward_manager": f"{file}:Careless"})
    trajectory = said("abc")
    with pytest.raises(CodeError, match=r"reward manager Careless \(mine\.Careless\.score\): AttributeError"):
        await score_all(make_reward_manager(config, CustomRewardConfig()), [trajectory], row("x"))
    assert trajectory.status is Status.FAILED and trajectory.score is None
    keys = {"reward_manager": f"{file}:Ranked", "reward_manager_options": {"target": 0}}
    manager = make_reward_manager(RewardConfig.model_validate(keys), CustomRewardConfig())
    with naming(CodeError, "Verdict", "1 trajectories"):
        await score_all(manager, [said("a")], row("x"))
