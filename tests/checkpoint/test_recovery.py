"""What a run goes on from after deaths that are injected."""

from __future__ import annotations

from pathlib import Path

from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.recovery import Continuation, choose_checkpoint, remark_on_schedule
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import WorkerDied
from agentrl.observe.open import open_display
from agentrl.system.json_value import JSON
from tests.naming import naming


class DyingExecutor:
    """Has no workers: tells what was on the disk when they were to end, and dies itself the first time."""

    def __init__(self, dir: Path) -> None:
        self.dir, self.seen = dir, list[list[str]]()

    def restart(self) -> None:
        self.seen.append(sorted(path.name for path in self.dir.iterdir()))
        if len(self.seen) == 1:
            raise WorkerDied("the next one")


def test_deaths_in_the_middle_of_a_save_and_of_a_restart(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=None, background=True)
    executor = DyingExecutor(tmp_path)
    went_back_to: list[Path | None] = []
    with open_display("test") as display:
        config = RunConfig(max_worker_restarts=2)
        assert choose_checkpoint(config, checkpoints, 9, tmp_path / "policy", display, print) is None
        continuation = Continuation(config, executor.restart, checkpoints, None)
        assert "no checkpoint was saved" in continuation.resume_hint()
        published = checkpoints.save(1, {}, {"step": 1})
        checkpoints.settle()
        checkpoints.save(2, {"policy": lambda dir: lambda wait: False}, {"step": 2})
        assert str(continuation.after(WorkerDied("one"), went_back_to.append)) == "the next one"
        # What is being saved is touched only when nobody can write it any more.
        assert executor.seen == [[".step_000002.partial", "step_000001"]] * 2
        assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
        assert went_back_to == [published]
        assert continuation.resume_hint() == f"the same command goes on from {published}"
        with naming(WorkerDied, "Start"):
            continuation.after(WorkerDied("third"), went_back_to.append)


def test_a_changed_number_of_steps_is_told_where_it_changes_the_rates() -> None:
    state: dict[str, JSON] = {"step": 4, "config": {"trainer": {"total_training_steps": 10, "total_epochs": 1}}}
    by_epochs: dict[str, JSON] = {"step": 4, "config": {"trainer": {"total_training_steps": None, "total_epochs": 2}}}
    constant, linear = OptimConfig(lr=1.0), OptimConfig(lr=1.0, lr_scheduler_type="linear")
    warmed = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.5)
    rates = {"a.optim": constant, "critic.optim": linear}
    assert remark_on_schedule(state, 5, 20, rates) == (
        "the checkpoint's run was to take 10 steps, and this one takes 20: by critic.optim the rate of step 5 is 0.8, "
        "and was to be 0.6"
    )
    remark = remark_on_schedule(by_epochs, 5, 20, {"optim": warmed})
    assert remark is not None and "was to take 10 steps" in remark and "step 5 is 0.455, and was to be 0.833" in remark
    assert remark_on_schedule(state, 5, 20, {"optim": constant}) is None
    assert remark_on_schedule(state, 5, 10, rates) is remark_on_schedule(by_epochs, 5, 10, rates) is None
    assert remark_on_schedule({"step": 4}, 5, 20, rates) is None, "an older checkpoint"
    waiting = remark_on_schedule(state, 5, 20, {"optim": linear}, {"optim": 5})
    assert waiting is not None and "the rate of step 7 is 0.933, and was to be 0.8" in waiting, "after the critic's"
