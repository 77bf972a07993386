"""The end of a run before its last step: by its budget, by patience with its best step, by an observer."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.config.sections.trainer import BudgetConfig
from agentrl.errors import ConfigError, TrainingError, WorkerDied
from agentrl.observe.open import open_display
from agentrl.sft import main as sft
from agentrl.train import main as train
from agentrl.trainer.budget import RECENT, Budget
from agentrl.trainer.observer import StepDone
from agentrl.trainer.run import ENDED_FILE, TrainingRun
from tests.config.loading import load
from tests.e2e.test_docs import commands
from tests.e2e.test_resume import numbers
from tests.naming import assert_names, naming
from tests.runs import Overrides
from tests.test_sft import TRANSCRIPTS, policy, write  # noqa: F401 - fixture


class Clock:
    """Seconds that only the test lets pass."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """Steps that a budget is told of."""

    def __init__(self, folder: Path, *, resumes: bool = True, **keys: float) -> None:
        self.clock, self.number = Clock(), 0
        self.budget = Budget(BudgetConfig.model_validate(keys), folder / "budget.json", self.clock, resumes=resumes)

    def take(self, minutes: float, tokens: int = 10, save_freq: int = 1) -> StepDone:
        self.number += 1
        self.clock.now += 60 * minutes
        step = StepDone(number=self.number, metrics={}, tokens=tokens)
        with open_display("test") as display:
            self.budget.spend(step, display, save_freq)
        return step


def test_no_step_begins_that_would_not_fit(tmp_path: Path) -> None:
    steps = Steps(tmp_path, tokens=1000)
    assert [steps.take(1, tokens).stop for tokens in (300, 350)] == [None, None]
    last = steps.take(1, 100)
    assert last.stop == ("trainer.budget.tokens=1000 (raise it to train on): 750 are spent, and a step takes up to 350")
    assert last.metrics == {"budget/minutes": 3.0, "budget/tokens": 750.0, "budget/steps_left": 0.0}
    exact = Steps(tmp_path, resumes=False, tokens=600)
    assert exact.take(1, 300).stop is None and exact.take(1, 300).stop is not None


def test_a_slow_step_is_expected_again_until_ten_others_were_faster(tmp_path: Path) -> None:
    steps = Steps(tmp_path, minutes=100, cost=1000, price_per_hour=6)
    steps.budget.begin(0)
    left = [steps.take(minutes).metrics["budget/steps_left"] for minutes in (20, *[1] * RECENT)]
    assert left == [4, *[3] * (RECENT - 1), 70]
    assert steps.take(1).metrics["budget/cost"] == pytest.approx(3.1)
    dear = Steps(tmp_path, resumes=False, minutes=100, cost=3, price_per_hour=6)
    dear.take(12)
    assert (stop := dear.take(12).stop) is not None and "trainer.budget.cost=3" in stop and "2.4 are spent" in stop


def test_minutes_count_over_kills_and_tokens_along_the_steps_of_a_checkpoint(tmp_path: Path) -> None:
    first = Steps(tmp_path, minutes=60, tokens=1000)
    first.take(10, 100)
    saved = json.loads(json.dumps(first.budget.state()))
    first.take(10, 100)  # lost
    again = Steps(tmp_path, minutes=60, tokens=1000)
    again.budget.restore(saved)
    assert (again.budget.minutes, again.budget.tokens) == (20, 100)
    again.clock.now += 60  # a worker dies: the same process goes back
    again.budget.restore(saved)
    assert (again.budget.minutes, again.budget.tokens) == (21, 100)
    assert again.budget.over is None
    elsewhere = Steps(tmp_path / "elsewhere", minutes=19.5)  # from an object store
    elsewhere.budget.restore(saved)
    assert elsewhere.budget.minutes == 10 and elsewhere.budget.over is not None
    anew = Steps(tmp_path, resumes=False, minutes=60)
    assert anew.budget.minutes == 0


def test_a_run_that_goes_back_to_its_start_has_its_tokens_again(tmp_path: Path) -> None:
    """A worker died before the first checkpoint."""
    steps = Steps(tmp_path, minutes=60, tokens=1000)
    steps.take(10, 100)
    run: Any = object.__new__(TrainingRun)
    run._first, run._setting = {"step": 0}, SimpleNamespace(budget=steps.budget)
    run.training = SimpleNamespace(step=0, restore=lambda state: None, loaded=lambda: None)
    run._load(None)
    assert (steps.budget.minutes, steps.budget.tokens) == (10, 0)


@pytest.mark.parametrize(("lost", "ends"), [(20, False), (55, True)])
def test_time_that_a_dead_worker_cost_counts_and_is_no_step_s(tmp_path: Path, lost: float, ends: bool) -> None:
    steps = Steps(tmp_path, minutes=70)
    steps.take(10)
    told: list[str] = []
    run: Any = object.__new__(TrainingRun)
    run._setting, run._only_validates = SimpleNamespace(budget=steps.budget), False
    run._continuation = SimpleNamespace(after=lambda death, load: death)
    run._checkpoints = SimpleNamespace(best=SimpleNamespace(over=None))
    run._display = SimpleNamespace(warn=told.append, note=told.append)
    run.training, run.dir, run.total_steps = SimpleNamespace(step=1), tmp_path, 9
    run._forget_after = lambda step: None

    def work() -> None:
        steps.clock.now += 60 * lost
        raise WorkerDied("injected")

    assert run._surviving(work) is None
    assert run.total_steps == (1 if ends else 9)
    assert (tmp_path / ENDED_FILE).exists() == ends
    assert steps.take(10).metrics["budget/steps_left"] == (0 if ends else 3)


def test_a_budget_that_is_spent_before_the_first_step(tmp_path: Path) -> None:
    Steps(tmp_path, minutes=60).take(4)
    steps = Steps(tmp_path, minutes=5)
    steps.clock.now += 90
    with naming(TrainingError, "minutes=5", "5.5"):
        steps.budget.begin(0)
    steps.budget.begin(3)
    (tmp_path / "budget.json").write_text('{"minutes": "4"}')
    with pytest.raises(ConfigError, match=r'budget\.json: expected {"minutes": 12\.5}'):
        Steps(tmp_path, minutes=5)
    for state in ({"minutes": -1.0}, {"tokens": 0.5}, {"step_tokens": ["1"]}, {"more": 1}, "a"):
        with pytest.raises(ValueError, match="validation error"):
            steps.budget.restore(state)


@pytest.mark.parametrize(("save_freq", "warned"), [(4, True), (3, False), (-1, False)])
def test_a_budget_that_ends_before_the_first_checkpoint_is_told_after_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], save_freq: int, warned: bool
) -> None:
    steps = Steps(tmp_path, minutes=35)
    for _ in range(2):
        steps.take(10, save_freq=save_freq)
    said = capsys.readouterr()
    assert (said.out + said.err).count("the run ends after step 3") == warned


def test_its_keys_are_refused_where_they_say_nothing() -> None:
    for keys, message in (
        (["trainer.budget.minutes=0"], "greater than 0"),
        (["trainer.budget.cost=5"], "trainer.budget.price_per_hour"),
        (["trainer.early_stopping_patience=3"], "trainer.metric_for_best_model"),
        (["trainer.load_best_model_at_end=true"], "trainer.metric_for_best_model"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(*keys)


def supervised(policy: Path, folder: Path, *keys: str) -> int:  # noqa: F811
    """Train on three transcripts a step, validated on the same; the exit status."""
    data = write(folder.parent / "train.parquet", TRANSCRIPTS)
    common = [f"data.train_files={data}", f"data.val_files={data}", "data.train_batch_size=3", f"model.path={policy}"]
    return sft([*common, "trainer.device=cpu", f"trainer.default_local_dir={folder}", *keys])


def test_supervised_training_ends_by_tokens_and_trains_on_with_more(
    policy: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:

    def run(name: str, *more: str) -> int:
        return supervised(policy, tmp_path / name, "optim.lr=1e-2", "trainer.total_training_steps=5", *more)

    assert run("whole") == 0
    assert run("short", "trainer.budget.tokens=10") == 2
    said = capsys.readouterr().err
    assert_names(said, "trainer.budget.tokens=10")
    tokens = int(said.partition("a step takes ")[2].split()[0].replace(",", ""))
    assert not (tmp_path / "short").exists()

    folder = tmp_path / "short"
    few, more = (f"trainer.budget.tokens={tokens * steps + 1}" for steps in (2, 4))
    assert run("short", few) == 0
    text = (folder / "ended.txt").read_text()
    assert text.startswith(f"ended after step 2 of 5: {few} (raise it to train on): {2 * tokens} are spent")
    assert text.strip() in " ".join(capsys.readouterr().out.split())
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    assert (folder / "policy" / "trained_steps").read_text() == "2\n"
    lines = numbers(folder)
    assert [line["budget/tokens"] for line in lines] == [tokens, 2 * tokens] and "val/loss" in lines[-1]
    assert run("short", few) == 0
    assert_names(" ".join(capsys.readouterr().out.split()), "nothing left")

    assert run("short", more) == 0 and numbers(folder)[-1]["step"] == 4
    assert run("short") == 0 and not (folder / "ended.txt").exists()
    one, other = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "short"))
    assert all((one[name] == other[name]).all() for name in one)


def test_the_best_policy_is_exported_when_patience_ends_a_run(
    policy: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A learning rate that ruins the policy: an early step stays the best."""

    def run(name: str, *more: str) -> int:
        return supervised(policy, tmp_path / name, "optim.lr=0.5", "trainer.test_freq=1", *more)

    by = ["trainer.metric_for_best_model=val/loss", "trainer.early_stopping_patience=2"]
    by += ["trainer.max_ckpt_to_keep=1", "trainer.total_training_steps=30", "trainer.load_best_model_at_end=true"]
    assert run("run", *by) == 0
    folder = tmp_path / "run"
    losses = [line["val/loss"] for line in numbers(folder)]
    best = losses.index(min(losses)) + 1
    assert len(losses) == best + 2 < 30
    assert f"measured 2 times since step {best}, its best" in (folder / "ended.txt").read_text()
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == [f"step_{best:06d}", f"step_{best + 2:06d}"]
    assert (folder / "policy" / "trained_steps").read_text() == f"{best}\n"
    assert run("plain", f"trainer.total_training_steps={best}") == 0
    one, other = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("plain", "run"))
    assert all((one[name] == other[name]).all() for name in one)
    capsys.readouterr()
    assert run("run", *by) == 0
    assert_names(" ".join(capsys.readouterr().out.split()), "nothing left")
    assert run("run", *[key.replace("=true", "=false") for key in by]) == 0, "the last step's policy, without a step"
    assert (folder / "policy" / "trained_steps").read_text() == f"{best + 2}\n" and len(numbers(folder)) == best + 2


def test_an_observer_ends_a_run_which_is_validated_saved_and_exported(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "enough.py").write_text(
        "from agentrl.trainer.observer import StepObserver\n\n"
        "class Enough(StepObserver):\n"
        "    def on_batch(self, step):\n"
        "        step.stop = 'that is enough' if step.number == 2 else None\n"
    )
    shown = [line for line in commands("docs/checkpoints.md") if "budget" in line or "patience" in line]
    of_page = [word for line in shown for word in shlex.split(line)[3:]]
    few = ["trainer.save_freq=-1", "trainer.val_before_train=false", *of_page]
    assert train(small_run(*few, f"trainer.observers={tmp_path}/enough.py:Enough")) == 0
    folder = tmp_path / "run"
    lines = numbers(folder)
    assert [line["step"] for line in lines] == [1, 2] and "val/success_greedy" in lines[1]
    assert "val/success_greedy" not in lines[0] and lines[1]["budget/cost"] == pytest.approx(
        6.5 / 60 * lines[1]["budget/minutes"]
    )
    assert (folder / "ended.txt").read_text() == "ended after step 2 of 3: that is enough\n"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_000002"]
    assert (folder / "policy" / "trained_steps").read_text() == "2\n"
    assert train(small_run("trainer.budget.tokens=100", "trainer.resume_mode=disable")) == 2
    assert_names(" ".join(capsys.readouterr().err.split()), "first checkpoint")
    assert (folder / "policy").exists()
