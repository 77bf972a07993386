"""A packing rule of a user's own: `micro_batches` of a strategy."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.checks.test_faults import alarms
from tests.e2e.conftest import forked_command
from tests.e2e.test_docs import SMALL
from tests.runs import Overrides

PACKING = """
from agentrl.workers.fsdp import FSDPPolicy


class Alone(FSDPPolicy):
    def micro_batches(self, mine):
        with open("passes.txt", "a") as file:
            file.write(f"{len(mine)}\\n")
        return [[row] for row in reversed(range(len(mine)))]


class Twice(FSDPPolicy):
    def micro_batches(self, mine):
        return [[0], [0]]
"""


def test_another_packing_makes_the_same_step_and_a_wrong_one_is_named(small_run: Overrides, tmp_path: Path) -> None:
    (tmp_path / "packing.py").write_text(PACKING)
    weights = {}
    for name in ("fsdp2", "packing.py:Alone", "packing.py:Twice"):
        run = tmp_path / f"run-{name[-5:]}"
        words = [*small_run(*SMALL, run_dir=run), f"actor_rollout_ref.actor.strategy={name}"]
        done = forked_command([*words, "algorithm.filter_groups.enable=false"], tmp_path)
        assert done.returncode == 0, done.stderr
        weights[name] = load_file(run / "policy" / "model.safetensors")
        assert bool(alarms(run)) == ("Twice" in name)
    assert (tmp_path / "passes.txt").read_text() == "8\n"
    plain, alone, twice = weights.values()
    # AdamW's first step is lr times the gradient's sign, so an element's rounding may be as large as lr.
    assert distance(plain, alone) < 0.01 * distance(plain, twice)


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return sum(float((a[name].double() - b[name].double()).square().sum()) for name in a) ** 0.5
