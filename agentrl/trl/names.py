"""Numbers that the door's reward manager gives with a trajectory's score, and its estimators read."""

from __future__ import annotations

REWARD = "rewards/"
"""Prefix of the reward of a function, by the function's name; absent where it gave None."""
UNSCORED = "unscored"
"""Present where no function gave the trajectory a reward."""
