"""Whole trainings computed again in float64 from their recorded trajectories."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.exact.__main__ import CASES, NUMBERS_CLOSE, compare, run_case
from tests.forked import forked


def test_a_training_is_what_its_records_and_its_config_give(tmp_path: Path) -> None:
    """With one, two and five transcripts a trajectory; and a config that says something else is seen."""
    run = run_case(tmp_path, "mean by trajectory, KL and entropy")
    found = compare(run)
    assert found.close and found.transcripts == (1, 2, 5), found
    config = run / "config.yaml"
    text = config.read_text()
    assert text.count("loss_unit: trajectory") == 1
    config.write_text(text.replace("loss_unit: trajectory", "loss_unit: transcript"))
    other = compare(run)
    assert other.numbers > 10 * NUMBERS_CLOSE and not other.close, other


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_every_case_is_what_its_records_give(name: str, tmp_path: Path) -> None:
    done = forked(["-m", "benchmarks.exact", "--out", str(tmp_path), "--only", name], tmp_path)
    assert done.returncode == 0 and f"| {name} | 1, 2, 5 |" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
