"""The README's first command, whole, in an empty directory: the policy learns to use its tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import command
from tests.e2e.test_train import lines


@pytest.mark.slice(0, "long run")  # .ci/run trains its first steps with a new seed: `make seed`
@pytest.mark.timeout(1200)
def test_the_main_job_with_its_defaults(tmp_path: Path) -> None:
    done = command([], cwd=tmp_path, timeout=1100)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "quickstart"
    metrics = lines(run)
    before, after = metrics[0], metrics[-1]
    for how in ("sampled", "greedy"):
        assert before[f"val/success_{how}"] <= 0.5
        assert after[f"val/success_{how}"] >= 0.9
    assert max(line["rollout/logprob_gap_max_abs"] for line in metrics[1:]) < 1e-4
    assert (run / "reward.png").stat().st_size > 10_000
    assert AutoModelForCausalLM.from_pretrained(run / "policy").num_parameters() < 500_000
    assert "policy |" in done.stdout, "a whole trajectory was shown"
