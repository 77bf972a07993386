"""Scoring of finished trajectories: ready scorers by data source, users' own, or a user's own reward manager."""

from agentrl.reward.contract import GroupRewardManager, RewardManager, make_reward_manager, score_all, score_once
from agentrl.reward.manager import NaiveRewardManager
from agentrl.reward.scorer import Verdict

__all__ = [
    "GroupRewardManager",
    "NaiveRewardManager",
    "RewardManager",
    "Verdict",
    "make_reward_manager",
    "score_all",
    "score_once",
]
