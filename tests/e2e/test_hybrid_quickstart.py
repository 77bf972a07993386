"""A policy with a state learns the quickstart's tasks, a short run of `benchmarks.training.hybrid_quickstart`."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.observe.tracking import read_metrics
from benchmarks.training.hybrid_quickstart import GREEDY, train, warm_up


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(1800)  # two to six minutes on two cores
def test_a_hybrid_policy_learns_to_use_tools(tmp_path: Path) -> None:
    train(tmp_path, 401, warm_up(tmp_path, 401), steps=10)
    found = [step for step in read_metrics(tmp_path / "run" / "metrics.jsonl") if GREEDY in step]
    before, after = float(str(found[0][GREEDY])), float(str(found[-1][GREEDY]))
    assert before < 0.3 and after > 0.7
