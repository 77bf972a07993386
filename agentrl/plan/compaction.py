"""Transcripts of a trajectory in a run with compaction."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config import Config


def described(config: Config) -> Iterator[str]:
    """Describe them; a run without compaction has no line."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    rules = rollout.multi_turn.compaction
    if rules.threshold is None:
        return
    window = rollout.max_model_len or data.max_prompt_length + data.max_response_length
    own = rules.threshold * window - data.max_prompt_length - rules.max_summary_tokens
    if own <= 0:
        yield (
            f"- compaction: a prompt of data.max_prompt_length={data.max_prompt_length} and a summary fill "
            f"{rules.threshold:g} of the window of {window:,} tokens, so that each turn may be compacted; raise "
            "data.max_response_length or the threshold"
        )
        return
    yield (
        f"compaction: a trajectory of T tokens has about T / {own:,.0f} transcripts after the first, each of which is "
        "sampled and trained as a sequence of its own; the figures here are of one"
    )
