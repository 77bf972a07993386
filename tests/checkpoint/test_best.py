"""The best step's checkpoint is kept, whatever is resumed, given up or uploaded."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agentrl.checkpoint.best import BestBy
from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.remote import ObjectStore
from agentrl.config import Config
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError
from agentrl.observe.open import open_display
from agentrl.rollouts.saving import Retention
from agentrl.system.termination import Terminated
from agentrl.trainer.observer import StepDone
from agentrl.trainer.run import Training, TrainingRun
from agentrl.trainer.setting import best_by
from tests.naming import naming


def manager(dir: Path, warnings: list[str] | None = None, greater: bool = True, url: str = "") -> CheckpointManager:
    heard: list[str] = [] if warnings is None else warnings
    store = ObjectStore(url, warn=heard.append) if url else None
    return CheckpointManager(dir, keep=2, best_by=BestBy("val/score", greater), store=store, warn=heard.append)


def write(dir: Path) -> None:
    (dir / "x").write_text("x")


def train(checkpoints: CheckpointManager, first: int, values: list[float], save_freq: int = 2) -> None:
    for step, value in enumerate(values, start=first):
        if checkpoints.best.take(step, {"val/score": value}) or step % save_freq == 0:
            checkpoints.save(step, {"policy": write}, {"step": step})


def steps(dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in dir.glob("step_*"))


def test_the_best_is_saved_and_kept_beside_the_newest(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    train(checkpoints, 1, [0.1, 0.2, 0.9, 0.3, 0.3, 0.3, 0.3, 0.9])
    assert steps(tmp_path) == [3, 6, 8], "an equal value is not better"
    train(checkpoints, 9, [1.0, 0.1])
    assert steps(tmp_path) == [9, 10]


def test_the_least_and_what_is_no_number(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, greater=False)
    train(checkpoints, 1, [0.5, math.nan, 0.4, -math.inf, 0.6, 0.7, 0.8])
    assert steps(tmp_path) == [3, 4, 6]


def test_a_resumed_run_knows_the_best_before_it(tmp_path: Path) -> None:
    train(manager(tmp_path), 1, [0.1, 0.9, 0.2, 0.2, 0.2, 0.2])
    assert steps(tmp_path) == [2, 4, 6]
    again = manager(tmp_path)
    path = again.latest()
    assert path is not None
    again.load(path)
    train(again, 7, [0.8, 0.8])
    assert steps(tmp_path) == [2, 6, 8]
    # Gone back to before the best: what came after is given up.
    earlier = manager(tmp_path)
    earlier.load(tmp_path / "step_000002")
    train(earlier, 3, [0.95, 0.1])
    assert steps(tmp_path) == [2, 3, 4][1:]
    # Another metric or direction begins anew.
    other = manager(tmp_path, greater=False)
    other.load(tmp_path / "step_000004")
    train(other, 5, [5.0, 6.0])
    assert steps(tmp_path) == [5, 6]


class Steps(Training[Config]):
    """Steps that get better, and change nothing."""

    def take_step(self, *, validates: bool) -> StepDone:
        return StepDone(number=self.step, metrics={"val/score": float(self.step)})

    def validate_first(self) -> StepDone:
        return StepDone(number=0, metrics={})

    def tell_end(self) -> None: ...


def test_the_checkpoint_that_sigterm_asks_for_knows_the_best_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = manager(tmp_path / "checkpoints")
    folder = SimpleNamespace(path=tmp_path, begin=lambda *parts: None, retention=Retention(tmp_path, None))
    with open_display("test") as display:
        setting: Any = SimpleNamespace(config=Config(), display=display, folder=folder, checkpoints=checkpoints)
        setting.total_steps, setting.begun_from, setting.budget = 9, None, None
        training = Steps(setting, cast(Any, None), {}, cast(Any, None))

        def came() -> None:
            if training.step == 2:
                raise Terminated

        monkeypatch.setattr("agentrl.trainer.run.allow", came)
        with pytest.raises(Terminated):
            list(TrainingRun(training))
    again = manager(tmp_path / "checkpoints")
    again.load(tmp_path / "checkpoints" / "step_000002")
    assert again.best.found is not None and again.best.found.step == 2


def test_it_stays_in_the_object_store_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'store'}"
    train(manager(tmp_path / "here", url=url), 1, [0.9, 0.2, 0.2, 0.2, 0.2, 0.2])
    assert steps(tmp_path / "store" / "checkpoints") == [1, 4, 6]
    elsewhere = manager(tmp_path / "elsewhere", url=url)
    with open_display("test") as display:
        elsewhere.fetch(display)
    path = elsewhere.latest()
    assert path is not None and path.name == "step_000006"
    elsewhere.load(path)
    train(elsewhere, 7, [0.3, 0.3])
    assert steps(tmp_path / "store" / "checkpoints") == [1, 6, 8]


def test_a_metric_that_is_not_there_is_told_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    checkpoints = manager(tmp_path, warnings)
    for metrics in ({"actor/lr": 1.0}, {"val/scores": 1.0, "val/x": 2.0}, {"val/scores": 1.0}):
        assert not checkpoints.best.take(1, metrics)
    assert warnings == [
        "trainer.metric_for_best_model=val/score is not measured; did you mean 'val/scores'?; "
        "there are val/scores, val/x"
    ]


def test_its_keys() -> None:
    assert best_by(RunConfig(), validates=True) is None
    assert best_by(RunConfig(metric_for_best_model="val/loss"), validates=True) == BestBy("val/loss", False)
    assert best_by(RunConfig(metric_for_best_model="val/x/mean@4"), validates=True) == BestBy("val/x/mean@4", True)
    least = RunConfig(metric_for_best_model="perf/seconds", greater_is_better=False)
    assert best_by(least, validates=False) == BestBy("perf/seconds", False)
    with naming(ConfigError, "metric_for_best_model=val/loss", "data.val_files"):
        best_by(RunConfig(metric_for_best_model="val/loss"), validates=False)
