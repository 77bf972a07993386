"""Reward manager of DAPO: scorers by data source, and a penalty for responses that come close to their limit."""

from __future__ import annotations

from agentrl.config.sections.reward import OverlongBufferConfig
from agentrl.reward.manager import NaiveRewardManager
from agentrl.reward.scorer import Verdict
from agentrl.trajectory import OVERLONG, Trajectory
from agentrl.trajectory.sample import Sample


class DapoRewardManager(NaiveRewardManager):
    """Reward manager like `naive` that adds the penalty of `reward_model.overlong_buffer` to the score."""

    async def score(self, trajectory: Trajectory, sample: Sample) -> Verdict:
        verdict = await super().score(trajectory, sample)
        if not self.config.overlong_buffer.enable or not trajectory.transcripts:  # texts alone have no tokens
            return verdict
        longest = max(max(one.trained_end - one.prompt_length, 0) for one in trajectory.transcripts)
        penalty = overlong_penalty(longest, self.config.overlong_buffer)
        return Verdict(verdict.score, {**verdict.extra, OVERLONG: penalty})


def overlong_penalty(tokens: int, buffer: OverlongBufferConfig) -> float:
    """Compute DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13) of a response of so many tokens.

    0 up to max_resp_len - len tokens, from there linear to -penalty_factor at max_resp_len, and constant beyond.
    """
    assert buffer.len is not None and buffer.max_resp_len is not None, "checked with the config"
    left = buffer.max_resp_len - buffer.len - tokens
    return max(min(left / buffer.len, 0.0), -1.0) * buffer.penalty_factor
