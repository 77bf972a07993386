"""Budgets of one trajectory, and the seeds of its turns."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from agentrl.config.sections.data import Truncation
from agentrl.config.sections.rollouts import RolloutsConfig


@dataclass(frozen=True, slots=True)
class LoopLimits:
    """Budgets of one trajectory: lengths in tokens, times in seconds."""

    max_response_tokens: int
    max_model_len: int
    max_assistant_turns: int
    max_user_turns: int
    max_tokens_per_turn: int | None
    max_parallel_calls: int
    max_malformed: int
    force_final_answer: bool
    call_timeout: float
    """Deadline of one call of an interaction; tools have their own."""
    max_prompt_tokens: int
    """Tokens of the first prompt."""
    truncation: Truncation
    """Part of a longer prompt that is cut away; error: nothing, as no row has such a prompt."""

    def cut_prompt(self, ids: list[int]) -> list[int]:
        """Cut the tokens of a first prompt, [T], down to `max_prompt_tokens`."""
        most = self.max_prompt_tokens
        if len(ids) <= most or self.truncation == "error":
            return ids
        kept = {"left": 0, "right": most, "middle": most // 2}[self.truncation]
        return [*ids[:kept], *ids[len(ids) - (most - kept) :]]

    @staticmethod
    def from_config(config: RolloutsConfig) -> LoopLimits:
        """Take the limits from the run's config."""
        rollout = config.actor_rollout_ref.rollout
        turns = rollout.multi_turn
        return LoopLimits(
            max_response_tokens=config.data.max_response_length,
            max_model_len=rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
            max_assistant_turns=turns.max_assistant_turns,
            max_user_turns=turns.max_user_turns,
            max_tokens_per_turn=turns.max_tokens_per_turn,
            max_parallel_calls=turns.max_parallel_calls,
            max_malformed=turns.max_malformed,
            force_final_answer=turns.force_final_answer,
            call_timeout=turns.tool_timeout,
            max_prompt_tokens=config.data.max_prompt_length,
            truncation=config.data.truncation,
        )


def seed_of(*parts: int | str) -> int:
    """Hash the parts to a 63-bit seed that depends on nothing else.

    Sampling is counter-based: no generator state has to be restored when a run resumes.
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
