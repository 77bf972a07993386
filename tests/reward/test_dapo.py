"""DAPO's reward manager: the penalty for responses that come close to their limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.config.sections.reward import CustomRewardConfig, OverlongBufferConfig, RewardConfig
from agentrl.errors import ConfigError
from agentrl.reward import make_reward_manager, score_all
from agentrl.reward.dapo import overlong_penalty
from agentrl.rollouts.context import load_reward
from agentrl.rollouts.objects import UserObjects
from agentrl.trajectory import OVERLONG, Status, Trajectory, Transcript, Turn
from agentrl.trajectory.collate import token_rewards
from agentrl.trajectory.sample import Sample

BUFFER = OverlongBufferConfig(enable=True, len=4, penalty_factor=0.5, max_resp_len=10)
ROW = Sample(prompt=[{"role": "user", "content": "2 + 3?"}], data_source="x", agent_name="single_turn")


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0), (6, 0), (7, -0.125), (8, -0.25), (10, -0.5), (11, -0.5), (1000, -0.5)]
)
def test_the_penalty_grows_to_the_limit(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, BUFFER) == penalty


def trajectory(*responses: int) -> Trajectory:
    """Of transcripts with so many tokens behind a prompt of three, the last of which a tool wrote."""
    transcripts = []
    for count in responses:
        one = Transcript()
        one.append_prompt([1, 2, 3])
        one.append_sampled([4] * (count - 1), [-1.0] * (count - 1), 0)
        one.append_observed([5])
        transcripts.append(one)
    turns = [Turn("assistant", "5", index, 3, 2 + count) for index, count in enumerate(responses)]
    return Trajectory("t", 0, transcripts=transcripts, turns=turns, status=Status.COMPLETED)


def scoring(tmp_path: Path, buffer: OverlongBufferConfig = BUFFER) -> tuple[RewardConfig, CustomRewardConfig]:
    (tmp_path / "one.py").write_text("def compute_score(solution_str):\n    return {'score': 1.0, 'form': 0.5}\n")
    config = RewardConfig(reward_manager="dapo", overlong_buffer=buffer)
    return config, CustomRewardConfig(path=str(tmp_path / "one.py"))


async def test_the_reward_is_lower_and_the_score_as_it_was(tmp_path: Path) -> None:
    manager = make_reward_manager(*scoring(tmp_path))
    long, short, branched = trajectory(8), trajectory(5), trajectory(3, 9, 2)
    for one in (long, short, branched):
        await score_all(manager, [one], ROW)
    assert [one.score for one in (long, short, branched)] == [1.0, 1.0, 1.0], "so they are successes"
    assert long.score_extra == {"form": 0.5, OVERLONG: -0.25}
    assert [one.outline().reward(1.0) for one in (long, short, branched)] == [0.75, 1.0, 0.625]
    for one in (long, short, branched):
        assert sum(map(sum, token_rewards(one, 1.0))) == one.outline().reward(1.0)
    assert token_rewards(long, 1.0)[0][-2:] == [0.75, 0.0], "on the last policy token"


async def test_without_the_buffer_or_tokens_it_scores_as_naive(tmp_path: Path) -> None:
    for buffer, one in ((OverlongBufferConfig(), trajectory(10)), (BUFFER, trajectory())):
        one.turns = one.turns or [Turn("assistant", "5", 0, 0, 0)]
        await score_all(make_reward_manager(*scoring(tmp_path, buffer)), [one], ROW)
        assert (one.score, one.score_extra) == (1.0, {"form": 0.5})


def test_the_limit_is_that_of_the_responses_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    section, (_, custom) = "reward_model.overlong_buffer", scoring(tmp_path)
    keys = [
        "reward_model.reward_manager=dapo",
        f"{section}.enable=true",
        f"{section}.len=4",
        "data.max_response_length=10",
        f"custom_reward_function.path={custom.path}",
    ]
    manager = load_reward(load_config(keys), UserObjects())
    assert manager.config.overlong_buffer.max_resp_len == 10
    for more, said in (
        ([f"{section}.len=11"], r"len=11 is more than the 10 tokens"),
        ([f"{section}.max_resp_len=12"], r"max_resp_len=12 is above data\.max_response_length=10"),
        ([f"{section}.len=null"], r"enable=true needs reward_model\.overlong_buffer\.len"),
        (["reward_model.reward_manager=naive"], r"enable=true has no effect: it needs .*reward_manager=dapo"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config([*keys, *more])
