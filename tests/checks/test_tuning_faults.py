"""Faults inside the updates of training on files, each named within two steps: the real commands, in process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.optim.optimizer import Optim
from agentrl.preferences import main as preferences
from agentrl.sft import main as sft
from agentrl.workers.backend import MiniBatch
from agentrl.workers.fsdp import FSDPPolicy
from agentrl.workers.learner import Learner
from tests.checks.test_faults import alarms
from tests.test_preferences import ROWS
from tests.test_preferences import write as write_pairs
from tests.test_sft import TRANSCRIPTS, write

Inject = Callable[[pytest.MonkeyPatch], None]


def loss_of_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    healthy = Learner._accumulate

    def accumulate(learner: Learner[Any], mine: Any, mini: MiniBatch[Any], *rest: Any) -> Any:
        def loss(found: Any, micro: Any) -> Any:
            total, seen = mini.loss(found, micro)
            return -total, seen

        return healthy(learner, mine, replace(mini, loss=loss), *rest)

    patch.setattr(Learner, "_accumulate", accumulate)


def gradients_lost_between_passes(patch: pytest.MonkeyPatch) -> None:
    healthy = FSDPPolicy.forward

    def forward(policy: FSDPPolicy, *args: Any, **kwargs: Any) -> Any:
        policy.optim.zero_grad()
        return healthy(policy, *args, **kwargs)

    patch.setattr(FSDPPolicy, "forward", forward)


def rate_halved(patch: pytest.MonkeyPatch) -> None:
    healthy = Optim.step
    patch.setattr(Optim, "step", lambda optim, step: healthy(optim, step / 2))


def moments_not_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Optim, "load_state", lambda optim, state: None)


FAULTS: dict[str, tuple[Inject, str]] = {
    "sft: a loss of the wrong sign": (loss_of_the_wrong_sign, "the loss's derivative by the log-prob"),
    "sft: gradients are lost between micro-batches": (gradients_lost_between_passes, "the sum over its backward"),
    "sft: the learning rate is another": (rate_halved, "an optimizer step moved it by"),
    "sft: moments are not restored": (moments_not_restored, "not what the checkpoint holds"),
    "preferences: the learning rate is another": (rate_halved, "an optimizer step moved it by"),
    "preferences: moments are not restored": (moments_not_restored, "not what the checkpoint holds"),
}


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault: str, policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sound steps raise no alarm; the steps after them, in a run that is resumed, have the fault."""
    main, data = sft, str(write(tmp_path / "rows.parquet", TRANSCRIPTS))
    if fault.startswith("preferences"):
        main, data = preferences, write_pairs(tmp_path / "pairs.parquet", ROWS)
    run = tmp_path / "run"
    words = [
        *(f"data.train_files={data}", "data.train_batch_size=3", "data.max_token_len_per_gpu=64"),
        *(f"model.path={policy_dir}", f"trainer.default_local_dir={run}", "trainer.device=cpu", "trainer.save_freq=1"),
        *("optim.lr=1e-3", "optim.lr_scheduler_type=cosine", "trainer.total_epochs=6"),
    ]
    assert main([*words, "trainer.total_training_steps=2"]) == 0
    assert alarms(run) == []
    inject, says = FAULTS[fault]
    inject(monkeypatch)
    assert main([*words, "trainer.total_training_steps=4"]) == 0
    found = alarms(run)
    assert found and {one["check"] for one in found} == {"update"} and found[0]["step"] in (3, 4)
    assert any(says in one["what"] for one in found), found
