"""Scoring of finished trajectories: ready scorers by data source, or a user's own function."""

from agentrl.reward.manager import RewardManager

__all__ = ["RewardManager"]
