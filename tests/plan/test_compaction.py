"""Transcripts of a trajectory that compaction makes: the plan's line, worked by hand."""

from __future__ import annotations

import pytest

from agentrl.plan.compaction import described
from tests.plan.test_memory import planned, words

__all__ = ["words"]
KEYS = "actor_rollout_ref.rollout.multi_turn.compaction"
LENGTHS = ("data.max_prompt_length=1000", "data.max_response_length=3000")


def test_a_run_without_compaction_has_no_line(words: list[str]) -> None:
    assert list(described(planned(words, *LENGTHS).config)) == []


@pytest.mark.parametrize(("threshold", "line"), [(0.5, "about T / 500 transcripts"), (0.3, "each turn may be")])
def test_what_a_window_has_for_itself_bounds_the_transcripts(words: list[str], threshold: float, line: str) -> None:
    keys = (f"{KEYS}.threshold={threshold}", f"{KEYS}.max_summary_tokens=500")
    (said,) = described(planned(words, *LENGTHS, *keys).config)
    assert line in said
