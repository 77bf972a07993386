"""What a run goes on from after deaths that are injected."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.recovery import Continuation, choose_checkpoint
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import WorkerDied
from agentrl.observe.open import open_display


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
        assert choose_checkpoint(config, checkpoints, 9, tmp_path / "policy", display) is None
        continuation = Continuation(config, executor.restart, checkpoints, None)
        assert "no checkpoint was saved" in continuation.way_on()
        published = checkpoints.save(1, {}, {"step": 1})
        checkpoints.settle()
        checkpoints.save(2, {"policy": lambda dir: lambda wait: False}, {"step": 2})
        assert str(continuation.after(WorkerDied("one"), went_back_to.append)) == "the next one"
        # What is being saved is touched only when nobody can write it any more.
        assert executor.seen == [[".step_000002.partial", "step_000001"]] * 2
        assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
        assert went_back_to == [published]
        assert continuation.way_on() == f"the same command goes on from {published}"
        with pytest.raises(WorkerDied, match="third\nStart the same command again"):
            continuation.after(WorkerDied("third"), went_back_to.append)
