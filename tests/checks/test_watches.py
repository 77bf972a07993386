"""Watches of a user's own: they see each update where it happens, and the trajectories where they run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentrl.checks.weights
from agentrl.errors import ConfigError
from agentrl.observe.watch import Watch, open_watches
from agentrl.preferences import main as preferences
from agentrl.sft import main as sft
from agentrl.train import main, training
from tests.checks.test_faults import alarms
from tests.naming import assert_names
from tests.runs import Overrides
from tests.test_preferences import ROWS
from tests.test_preferences import write as write_pairs
from tests.test_sft import TRANSCRIPTS, write

MINE = """
from agentrl.observe.report import Finding, Report
from agentrl.observe.watch import UpdateChecked, Watch


class Norms(Watch):
    def updates(self, learning):
        return Update() if learning.kind == "policy" else None

    def trajectories(self, config, scheduler, engine):
        return Trajectories()


class Update:
    def __init__(self):
        self.norms, self.scored_tokens = [], 0

    def begin(self, counts):
        pass

    def scored(self, found, micro, factor):
        self.scored_tokens += int(micro.mask.sum())

    def stepping(self, model, norm, step):
        self.norms.append(norm)

    def stepped(self, model, step):
        assert model.optim.state_of(next(iter(model.params)))

    def result(self):
        report = Report(numbers={"mine/norm": sum(self.norms) / len(self.norms), "mine/tokens": self.scored_tokens})
        report.add_check("mine", [Finding("mine", "a norm was seen", "the policy", "sign")])
        self.__init__()
        return UpdateChecked(report)


class Trajectories:
    def __init__(self):
        self.ended_here, self.version = 0, 0

    def ended(self, asked, trajectories, *, trained):
        assert len(asked) == len(trajectories)
        self.ended_here += len(trajectories)

    def packed(self, trajectories):
        pass

    def sending(self, weights):
        return weights

    def sent(self, version):
        self.version = version

    async def settle(self):
        pass

    def forget(self):
        pass

    def result(self):
        report = Report(numbers={"mine/ended": self.ended_here, "mine/version": self.version})
        self.ended_here = 0
        return report
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py:Norms"


def test_a_named_watch_sees_updates_and_trajectories_and_its_findings_become_alarms(
    small_run: Overrides, mine: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = small_run(
        f"trainer.checks.watches=[{mine}]",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        run_dir=run,
    )
    assert main(words) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [one for one in steps if "mine/norm" in one]
    assert len(steps) == 2
    for number, one in enumerate(steps, 1):
        assert one["mine/norm"] == pytest.approx(one["actor/grad_norm"])
        assert one["mine/tokens"] == one["train/policy_tokens"]
        assert (one["mine/ended"], one["mine/version"]) == (16, number)
    assert [(one["step"], one["check"], one["severity"]) for one in alarms(run)] == [
        (1, "mine", "sign"),
        (2, "mine", "sign"),
    ]


@pytest.mark.parametrize("kind", ["transcripts", "pairs"])
def test_training_on_files_honours_the_same_keys(
    kind: str, mine: str, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(mine.partition(":")[0])
    file.write_text(MINE.replace('learning.kind == "policy"', f'learning.kind == "{kind}"'))
    run = tmp_path / "run"
    if kind == "pairs":
        train, rows = preferences, write_pairs(tmp_path / "pairs.parquet", ROWS)
    else:
        train, rows = sft, str(write(tmp_path / "rows.parquet", TRANSCRIPTS))
    words = [
        f"data.train_files={rows}",
        f"model.path={policy_dir}",
        "trainer.device=cpu",
        f"trainer.default_local_dir={run}",
    ]
    words += ["trainer.total_training_steps=2", f"trainer.checks.watches=[{mine}]"]
    assert train(words) == 0
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [one["mine/norm"] > 0 and one["mine/tokens"] > 0 for one in steps] == [True, True]
    assert [(one["step"], one["check"]) for one in alarms(run)] == [(1, "mine"), (2, "mine")]
    capsys.readouterr()
    assert train([*words, "trainer.checks.on_sign=stop", f"trainer.default_local_dir={tmp_path}/other"]) == 2
    assert_names(capsys.readouterr().err, "step 1")


def test_agentrls_watch_is_always_there_and_another_class_is_refused(mine: str) -> None:
    assert [type(one).__name__ for one in open_watches([mine, "checks"])] == ["Checks", "Norms"]
    assert type(open_watches([])[0]) is not Watch
    with pytest.raises(ConfigError, match=r"trainer\.checks\.watches.*agentrl\.observe\.watch\.Watch"):
        open_watches(["agentrl.observe.report:Report"])


@pytest.mark.parametrize(
    ("key", "is_inspectable", "compared"),
    [("", True, 2), ("trainer.checks.weights_mb=0", True, 0), ("", False, 0)],
    ids=["sampled", "no sample", "an engine that cannot be inspected"],
)
def test_weights_count_as_compared_only_where_the_engines_tensors_were(
    key: str, is_inspectable: bool, compared: int, small_run: Overrides, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_inspectable:
        monkeypatch.setattr(agentrl.checks.weights, "InspectableEngine", str)
    with training([*small_run("data.val_files=null", "trainer.total_training_steps=2"), *filter(None, [key])]) as run:
        assert len(list(run)) == 2
        evaluated = run.evaluated
    assert (evaluated["weights/version"], evaluated.get("weights", 0)) == (2, compared)
