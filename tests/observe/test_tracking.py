from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

import pytest

from agentrl.config import Config, load_config
from agentrl.errors import CodeError, ConfigError, DataError, TrainingError, install_extra
from agentrl.observe.generations import Generation
from agentrl.observe.plain import PlainDisplay
from agentrl.observe.tracking import Console, RunInfo, Tracker, read_metrics, without_secrets
from agentrl.system.json_value import JSON
from agentrl.system.targets import load_target
from tests.naming import Names, naming
from tests.small_disk import small_disk_in


def tracker(
    dir: Path, *names: str, output: io.StringIO | None = None, options: dict[str, dict[str, Any]] | None = None
) -> Tracker:
    keys = {"logger": list(names or ("console", "jsonl")), "logger_options": options or {}}
    config = Config.model_validate({"trainer": keys})
    return Tracker.from_config(config.trainer, dir, config, PlainDisplay("run", output or io.StringIO()))


def test_one_object_a_line_with_the_step_first(tmp_path: Path) -> None:
    log = tracker(tmp_path / "run")
    log.log({"reward/mean": 0.1, "time/step": 2}, 1)
    log.log({"val/success_greedy": 1.0}, 2)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (
        '{"step": 1, "reward/mean": 0.1, "time/step": 2.0}\n{"step": 2, "val/success_greedy": 1.0}\n'
    )


def test_no_file_without_jsonl(tmp_path: Path) -> None:
    log = tracker(tmp_path, "console")
    log.log({"a": 1.0}, 1)
    log.truncate_after(0)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_are_null_and_warned_of_once(tmp_path: Path) -> None:
    output = io.StringIO()
    log = tracker(tmp_path, output=output)
    log.log({"actor/kl": math.nan, "b": math.inf, "c": 1.0}, 1)
    log.log({"actor/kl": math.nan}, 2)
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "actor/kl": None, "b": None, "c": 1.0},
        {"step": 2, "actor/kl": None},
    ]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert output.getvalue().count("actor/kl is nan; recorded as null") == 1
    assert output.getvalue().count("warning") == 2


def test_a_resumed_run_forgets_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    log = tracker(tmp_path)
    for step in range(6):
        log.log({"a": step / 7}, step)
    resumed = tracker(tmp_path)
    resumed.truncate_after(3)
    resumed.log({"a": 9.0}, 4)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[3]["a"] == 3 / 7
    assert lines[4]["a"] == 9.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_forgets_everything(tmp_path: Path) -> None:
    log = tracker(tmp_path)
    log.log({"a": 1.0}, 0)
    log.truncate_after(-1)
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    log.log({"a": 2.0}, 0)
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "a": 2.0}]


@pytest.mark.parametrize("torn", [b'{"step": 2, "a": 0.', b'{"step": 2, "a": 0.25}', b'{"step": 2, "a": "\xe2\x82'])
def test_a_last_line_cut_by_a_kill_does_not_spoil_the_next(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "a": 0.5}\n' + torn)
    log = tracker(tmp_path)
    log.log({"a": 1.0}, 3)
    steps = [line["step"] for line in read_metrics(path)]
    assert steps == ([1, 2, 3] if torn.endswith(b"}") else [1, 3])


def test_a_broken_line_elsewhere_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2,\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: .*\{\"step\": 2,.*delete the line"):
        read_metrics(path)
    path.write_text('{"step": 1}\n[2]\n')
    with naming(DataError, "line 2", "`step`"):
        read_metrics(path)


@pytest.mark.parametrize("package", ["mlflow", "swanlab", "tensorboard", "trackio", "wandb"])
def test_a_logger_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(package, package), None)
    with pytest.raises(ConfigError, match=rf"trainer\.logger names {package}.*{re.escape(install_extra(package))}"):
        tracker(tmp_path, package)


def mean_rewards(run: Path) -> list[tuple[int, float]]:
    """Read a run's numbers from tensorboard's files: (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars("reward/mean")]


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = tracker(tmp_path, "tensorboard")
    for step in range(4):
        first.log({"reward/mean": step / 4}, step)
    first.close()
    second = tracker(tmp_path, "tensorboard")
    second.truncate_after(1)
    second.log({"reward/mean": 9.0}, 2)
    second.close()
    assert mean_rewards(tmp_path) == [(0, 0.0), (1, 0.25), (2, 9.0)]


def test_tensorboard_forgets_steps_that_a_worker_s_death_undid(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    log = tracker(tmp_path, "tensorboard")
    log.truncate_after(-1)
    for step in range(4):
        log.log({"reward/mean": step / 4}, step)
    log.truncate_after(1)
    log.log({"reward/mean": 9.0}, 2)
    log.close()
    assert mean_rewards(tmp_path) == [(0, 0.0), (1, 0.25), (2, 9.0)]


def test_wandb_run_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (1, 2):
        log = tracker(tmp_path, "wandb")
        log.log({"reward/mean": 0.5, "bad": math.nan}, step)
        log.close()
    # offline-run-<time>-<id>, and -1 behind it for a second one of the same second
    runs = {path.name.split("-")[3] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert runs == {(tmp_path / "wandb_id").read_text()}


OPTIONS = "trainer.logger_options"
OWN = """
import json
from pydantic import BaseModel
from agentrl.observe.tracking import RunInfo, Sink

class Options(BaseModel):
    name: str = "own.txt"

class Lines(Sink):
    def __init__(self, run: RunInfo, options: Options):
        self.path = run.dir / options.name
        self.title = f"{run.project}/{run.experiment} {run.config['trainer']['total_epochs']}"

    def write(self, step, metrics):
        if step == 3:
            raise KeyError("reward")
        self.path.write_text(f"{self.title} {step} {json.dumps(dict(metrics))}")

    def truncate_after(self, step):
        self.path.unlink(missing_ok=True)

    def close(self):
        self.path.rename(self.path.with_suffix(".done"))
"""


CLOSING = """
from agentrl.observe.tracking import Sink

told = []

class First(Sink):
    def write(self, step, metrics): ...
    def truncate_after(self, step): ...
    def close(self): told.append(type(self).__name__)

class Second(First):
    def close(self):
        super().close()
        raise ValueError("it is gone")

class Broken(First):
    def __init__(self, run): raise ValueError("no room")
"""


def test_all_loggers_are_closed_in_reverse_order_also_where_one_cannot_be_made_or_closed(tmp_path: Path) -> None:
    (tmp_path / "closing.py").write_text(CLOSING)
    told = cast(list[str], load_target(f"{tmp_path}/closing.py:told", "x"))
    names = [f"{tmp_path}/closing.py:{name}" for name in ("First", "Second", "Broken")]
    with pytest.raises(CodeError, match="it is gone"):
        tracker(tmp_path, *names[:2]).close()
    assert told == ["Second", "First"]
    with pytest.raises(CodeError, match="no room"):
        tracker(tmp_path, *names)
    assert told == ["Second", "First"] * 2


def test_a_users_logger(tmp_path: Path) -> None:
    file = tmp_path / "lines.py"
    file.write_text(OWN)
    name = f"{file}:Lines"
    log = tracker(tmp_path, name, "jsonl", options={name: {"name": "mine.txt"}})
    log.truncate_after(-1)
    log.log({"a": math.inf}, 2)
    assert (tmp_path / "mine.txt").read_text() == 'agentrl/quickstart 1 2 {"a": null}'
    with pytest.raises(CodeError, match=r"logger .*lines\.py:Lines \(lines\.Lines\.write\): KeyError: 'reward'"):
        log.log({"a": 1.0}, 3)
    log.close()
    assert (tmp_path / "mine.done").exists() and len(read_metrics(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (["trainer.logger=[jsonl,wndb]"], ("trainer.logger", "'wndb'", "'wandb'", "unknown")),
        (["trainer.logger=json:dumps"], ("trainer.logger", "agentrl.observe.tracking.Sink")),
        (["trainer.logger=[wandb]", f"{OPTIONS}.wandb.entiti=x"], ("key 'entiti'", "'entity'", "unknown")),
        ([f"{OPTIONS}.wandb.entity=x"], ("logger_options.wandb", "trainer.logger=console,jsonl", "no effect")),
        ([f"{OPTIONS}.jsonl.file=x"], ("logger_options.jsonl", "JsonLines")),
    ],
)
def test_a_wrong_logger_or_option_is_told_with_the_config(keys: list[str], says: Names) -> None:
    with naming(ConfigError, says):
        load_config(keys)
    assert load_config(["trainer.logger=[wandb]", f"{OPTIONS}.wandb.tags=[a]"]).trainer.logger_options == {
        "wandb": {"tags": ["a"]}
    }


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with small_disk_in(tmp_path, "64k") as mount:
        yield mount


def test_a_full_disk_leaves_the_earlier_lines_whole(small_disk: Path) -> None:
    log = tracker(small_disk)
    metrics = {f"metric/{index}": float(index) for index in range(300)}
    written = 0
    with naming(TrainingError, "metrics.jsonl"):
        for step in range(100):
            log.log(metrics, step)
            written = step
    content = (small_disk / "metrics.jsonl").read_bytes()
    assert content.endswith(b"}\n")
    assert [json.loads(line)["step"] for line in content.splitlines()] == list(range(written + 1))
    with pytest.raises(TrainingError, match="the disk is full"):
        log.truncate_after(written - 1)  # needs room for the shorter copy
    assert (small_disk / "metrics.jsonl").read_bytes() == content


SPOKEN = Generation(2, "val/0/0", "math", "tool_agent", "completed", "What?\n", "Four.", 1.0, 1.0)


def test_generations_are_tables_where_loggers_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = tracker(tmp_path, "console", "jsonl", "tensorboard", "wandb")
    log.log_generations([], 1)
    log.log_generations([SPOKEN, SPOKEN], 2)
    log.log({"reward/mean": 0.5}, 2)
    log.close()
    (file,) = (tmp_path / "val_generations").iterdir()
    assert file.name == "000002.jsonl"
    assert [json.loads(line)["output"] for line in file.read_text().splitlines()] == ["Four.", "Four."]
    assert [path.name for path in tmp_path.glob("wandb/offline-run-*/files/media/table/val/*.json")]
    assert any(b"Four." in path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())


class FakePackage(ModuleType):
    """Stands for swanlab and trackio where they are not installed: `init`, and what runs and tables are given."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.begun: list[dict[str, object]] = []
        self.logged: list[tuple[dict[str, object], int]] = []
        self.finished = 0
        self.name = ""

    def init(self, **given: object) -> FakePackage:
        self.begun.append(given)
        self.name = str(given["name"])
        return self

    def log(self, numbers: dict[str, object], step: int) -> None:
        self.logged.append((numbers, step))

    def finish(self) -> None:
        self.finished += 1

    def Table(self, columns: list[str], data: list[list[object]]) -> object:
        return dict(zip(columns, data[0], strict=True))

    def Text(self, content: str, caption: str) -> object:
        return content


@pytest.mark.parametrize("name", ["swanlab", "trackio"])
def test_a_run_elsewhere_is_gone_on_with_fake_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, name, fake)
    for step in (1, 2):
        log = tracker(tmp_path, name)
        assert not fake.begun or step > 1, "nothing is begun before the run's checks have passed"
        log.log_generations([SPOKEN], step)
        log.log({"reward/mean": 0.5, "bad": math.nan}, step)
        log.close()
    assert fake.finished == 2 and [step for _, step in fake.logged] == [1, 1, 2, 2]
    assert fake.logged[1][0] == {"reward/mean": 0.5}
    assert "Four." in str(fake.logged[0][0]["val/generations"])
    first, second = fake.begun
    changing = {"resume"} if name == "trackio" else set()
    assert {key for key in first if first[key] != second[key]} == changing
    assert (first["project"], first["name"]) == ("agentrl", "quickstart")


def test_a_package_that_begins_no_run_ends_the_start_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakePackage()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    monkeypatch.setattr(fake, "init", lambda **_: 1 / 0)
    with naming(ConfigError, "trainer.logger", "ZeroDivisionError", "logger_options.trackio"):
        tracker(tmp_path, "trackio").truncate_after(-1)


def test_what_fails_elsewhere_is_told_once_and_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, warned = FakePackage(), list[str]()
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    log = tracker(tmp_path, "swanlab", "jsonl")
    log.truncate_after(-1)
    monkeypatch.setattr(fake, "log", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(fake, "finish", lambda: 1 / 0)
    monkeypatch.setattr(log._display, "warn", warned.append)
    for step in (1, 2):
        log.log_generations([SPOKEN], step)
        log.log({"reward/mean": 0.5}, step)
    log.close()
    (told,) = warned
    assert told.startswith("logger swanlab: ZeroDivisionError: division by zero; it lacks")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_mlflow_run_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database
    uri = f"file://{tmp_path}/mlruns"
    for step in (1, 2):
        log = tracker(tmp_path, "mlflow", options={"mlflow": {"tracking_uri": uri}})
        log.log_generations([SPOKEN], step)
        log.log({"val/x/mean@4": 0.5 * step, "bad": math.nan, "val/c++/../x": 1.0}, step)
        log.close()
    assert len(list(tmp_path.rglob("artifacts/val_generations/*.json"))) == 2
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("agentrl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == (tmp_path / "mlflow_id").read_text() and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "val/x/mean_at_4")
    assert [(one.step, one.value) for one in history] == [(1, 0.5), (2, 1.0)]
    named = client.get_metric_history(run.info.run_id, "val/c__/x")
    assert len(named) == 2, "a name that MLflow refuses would take the step's other numbers with it"


def test_remote_loggers_are_given_no_secrets() -> None:
    config: dict[str, JSON] = {
        "env_vars": {"HF_TOKEN": "a", "AWS_SECRET_ACCESS_KEY": "b", "NCCL_DEBUG": "INFO"},
        "urls": ["http://me:word@host:1/v1", "s3://bucket/a@b"],
        "headers": [{"Authorization": "Bearer c"}],
        "data": {"prompt_key": "prompt", "api_key_env": "MY_KEY", "max_tokens": 3, "token": None},
    }
    assert without_secrets(config) == {
        "env_vars": {"HF_TOKEN": "[secret]", "AWS_SECRET_ACCESS_KEY": "[secret]", "NCCL_DEBUG": "INFO"},
        "urls": ["http://[secret]@host:1/v1", "s3://bucket/a@b"],
        "headers": [{"Authorization": "[secret]"}],
        "data": config["data"],
    }


class Kept(Console):
    """Logger that keeps the config that it is given."""

    given: ClassVar[list[object]] = []

    def __init__(self, run: RunInfo) -> None:
        self.given.append(run.config)


class Sent(Kept):
    """The same as a logger that sends."""

    is_remote = True


def test_a_tracker_hides_secrets_from_remote_loggers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "given", [])
    run = RunInfo(tmp_path, {"env_vars": {"HF_TOKEN": "a"}}, "agentrl", "one")
    Tracker([f"{__name__}:Kept", f"{__name__}:Sent"], {}, run, PlainDisplay("run", io.StringIO()))
    assert Kept.given == [run.config, {"env_vars": {"HF_TOKEN": "[secret]"}}]
