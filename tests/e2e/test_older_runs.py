"""Runs of earlier versions are read, continued and shown. A run that cannot be is refused, and left as it is."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl import evaluate, generate, preferences, sft
from agentrl.checkpoint import manifest
from agentrl.config import load_config
from agentrl.config.read_back import END
from agentrl.replay.__main__ import main as replay
from agentrl.system.versions import FOLDER, RECORD, check_folder, package_versions, sign, writer_of
from agentrl.train import main as train
from agentrl.trajectory.parquet import read_trajectories
from agentrl.version import __version__
from agentrl.view.__main__ import main as view
from agentrl.view.run import open_run
from agentrl.view.viewer import Viewer
from tests.e2e.test_train import lines
from tests.view.made import as_seen

ARCHIVES = sorted((Path(__file__).resolve().parents[1] / "recorded_runs").glob("*.tar.xz"))
TURNS, AHEAD = Path("runs/turns"), Path("runs/ahead")
CHECKPOINT = TURNS / "checkpoints" / "step_000002"
GOES_ON = ["--trust", "trainer.total_training_steps=3"]
UID = "train/2/0/1"
READERS: dict[str, Callable[[], int]] = {
    "train": lambda: train([*config_of(TURNS), *GOES_ON]),
    "train ahead": lambda: train([*config_of(AHEAD), "--trust"]),
    "view": lambda: view([str(TURNS), "--export", "shown.html", "--steps", "2"]),
    "replay": lambda: replay([str(TURNS), "--uid", UID, "--trust"]),
    "evaluate": lambda: evaluate.main([f"data.path={TURNS}", "custom_reward_function.path=reward.py"]),
    "generate": lambda: generate.main(generated("again.parquet", TURNS / "policy")),
}
"""Commands that read a run."""


def config_of(run: Path) -> list[str]:
    return ["--config-path", str(run), "--config-name", "config"]


def generated(name: str, model: Path) -> list[str]:
    return [
        "data.path=data/val.parquet",
        f"data.output_path={name}",
        f"model.path={model}",
        "data.max_response_length=4",
        "rollout.multi_turn.tool_config_path=data/tools.yaml",
    ]


@pytest.fixture(scope="session", params=ARCHIVES, ids=lambda path: path.name.partition(".")[0])
def archive(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(request.param) as file:
        file.extractall(folder, filter="data")
    return folder


@pytest.fixture
def older(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the runs, which is the working directory, as their configs name files relative to it."""
    folder = tmp_path / "older"
    shutil.copytree(archive, folder)
    monkeypatch.chdir(folder)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Digests of all files of a folder. The lock of a run holds no content of it."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "running.lock"
    }


def test_a_run_goes_on(older: Path) -> None:
    before = lines(TURNS)
    assert READERS["train"]() == 0
    after = lines(TURNS)
    assert after[: len(before)] == before and [one["step"] for one in after] == [0, 1, 2, 3]
    assert (TURNS / "policy" / "trained_steps").read_text() == "3\n"
    (wrote,) = json.loads((TURNS / RECORD).read_text())["written_by"]
    assert wrote["after_step"] == 2 and wrote["versions"].items() >= package_versions().items()


def test_a_run_that_was_killed_ahead_goes_on_with_each_prompt_once(older: Path) -> None:
    assert train([*config_of(AHEAD), "--trust"]) == 0
    batches = [json.loads(line) for line in (AHEAD / "ledger.jsonl").read_text().splitlines()]
    assert [batch["step"] for batch in batches] == list(range(1, 7))
    ordinals = [one for batch in batches for first, end in batch["trained"] for one in range(first, end)]
    assert sorted(ordinals) == list(range(12))
    assert [one["step"] for one in lines(AHEAD)] == list(range(1, 7))


@pytest.mark.parametrize(("name", "main"), [("sft", sft.main), ("pairs", preferences.main)])
def test_tuning_goes_on(older: Path, name: str, main: Callable[[list[str]], int]) -> None:
    run = Path("runs") / name
    (before,) = lines(run)
    assert main([*config_of(run), "trainer.total_epochs=2"]) == 0
    first, second = lines(run)
    assert first == before and second["step"] == 2


def test_a_run_is_shown(older: Path) -> None:
    viewer = Viewer([open_run(str(TURNS)), open_run(str(AHEAD)), open_run("runs/generated.parquet")])
    (recorded, *_) = read_trajectories(TURNS / "trajectories" / "train_000002.parquet")
    shown = as_seen(viewer.trajectory((0, "train_000002", 0)))
    (window,) = shown["transcripts"]
    assert (window["ids"], window["mask"]) == (recorded.transcripts[0].ids, recorded.transcripts[0].mask)
    assert shown["messages"][-1]["content"] == recorded.messages[-1].get("content")
    assert shown["score"] == recorded.score
    assert READERS["view"]() == 0 and Path("shown.html").stat().st_size > 10_000


def test_a_trajectory_is_sampled_again(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert READERS["replay"]() == 0
    assert "(version 1): 16 tokens, all the same" in capsys.readouterr().out


def test_a_run_is_scored_again(older: Path) -> None:
    scored = ["custom_reward_function.path=reward.py", "data.output_path=again.json"]
    assert evaluate.main([f"data.path={TURNS}", *scored]) == 0
    compared: dict[str, Any] = json.loads(Path("again.json").read_text())["comparison"]
    assert compared["all"]["mean_difference"] == 0, "the same scorer gives the scores that the run recorded"
    assert evaluate.main(["data.path=runs/generated.parquet", *scored[:1], "data.output_path=generated.json"]) == 0


def test_a_config_and_a_policy_are_read(older: Path) -> None:
    config = load_config([*config_of(TURNS), "--trust"])
    assert config.actor_rollout_ref.rollout.n == 2 and config.data.max_response_length == 16
    assert READERS["generate"]() == 0


def as_another(run: Path, number: int, version: str) -> None:
    """Give a run's folder the record of another version, and its config the end that such runs have."""
    sign(run, 0)
    with (run / "config.yaml").open("a") as file:
        file.write(END)
    record = json.loads((run / RECORD).read_text())
    record["written_by"][-1]["versions"]["agentrl"] = version
    (run / RECORD).write_text(json.dumps(record | {"format": number, "unheard": ["of"]}))


def reseal(checkpoint: Path, change: dict[str, Any]) -> None:
    """Write a checkpoint's record with other values, as the version that has them would."""
    record = json.loads((checkpoint / manifest.STATE_FILE).read_text())
    del record["checksum"]
    manifest.write_record(checkpoint, record | change)


def refused(name: str, older: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused, and write nothing; return its message."""
    before = contents(older)
    capsys.readouterr()
    status = READERS[name]()
    message = capsys.readouterr().err
    assert status == 2 and "Traceback" not in message, message
    assert contents(older) == before, f"{name} is refused, and nothing is half-written"
    return message[message.index("error: ") :]


OF_THE_FOLDER = ["train", "view", "replay", "evaluate"]


@pytest.mark.slice(3, "matrix")
@pytest.mark.parametrize("number", [FOLDER.newest + 1, FOLDER.oldest - 1], ids=["newer", "older"])
@pytest.mark.parametrize("name", OF_THE_FOLDER)
def test_a_run_of_another_format_is_refused(
    older: Path, name: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    as_another(TURNS, number, "7.5.1")
    message = refused(name, older, capsys)
    assert f"{TURNS / RECORD} has format {number}, by agentrl 7.5.1" in message
    assert f"agentrl {__version__} reads {FOLDER.newest}. Use agentrl 7.5.1" in message
    assert ("or a later one" in message) == (number > FOLDER.newest)


def test_a_config_of_ones_own_next_to_runs_needs_no_last_line(older: Path) -> None:
    for name in ("config.yaml", "job.yaml"):
        (older / name).write_text("defaults: [train, _self_]\ndata: {train_batch_size: 6}")
        (older / "checkpoints").mkdir(exist_ok=True)
        found = load_config(["--config-path", str(older), "--config-name", Path(name).stem, "--trust"])
        assert found.data.train_batch_size == 6


def test_a_run_that_cannot_be_read_is_moved_aside(older: Path) -> None:
    """By the remedy that a message names, with a config of one's own."""
    Path("mine").mkdir()
    shutil.copy(TURNS / "config.yaml", "mine/config.yaml")
    as_another(TURNS, FOLDER.newest + 1, "7.5.1")
    before = contents(TURNS)
    assert train([*config_of(Path("mine")), *GOES_ON, "trainer.resume_mode=disable"]) == 0
    assert contents(Path("runs/turns.1")) == before and [one["step"] for one in lines(TURNS)] == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [2, 4], ids=["older", "newer"])
@pytest.mark.parametrize("name", ["train", "replay"])
def test_a_checkpoint_of_another_format_is_refused(
    older: Path, name: str, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in CHECKPOINT.parent.iterdir():
        reseal(path, {"format": number, "versions": {"agentrl": "7.5.1"}, "unheard": "of"})
    message = refused(name, older, capsys)
    assert (
        f"state.json has format {number}, by agentrl 7.5.1; agentrl {__version__} reads 3. Use agentrl 7.5.1" in message
    )


def test_the_state_of_a_worker_in_another_format_is_refused(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint is whole, and only the writer of its weights is another."""
    file = CHECKPOINT / "policy" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3}))
    record = manifest.read_record((CHECKPOINT / manifest.STATE_FILE).read_bytes(), "x")
    (CHECKPOINT / manifest.STATE_FILE).unlink()
    manifest.seal(CHECKPOINT, record.step, record.fingerprint, record.state)
    assert f"{file} has format 3, by an agentrl" in refused("train", older, capsys)


def test_a_later_versions_key_in_a_config_names_that_version(older: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_another(TURNS, FOLDER.newest, "7.5.1")
    config = (TURNS / "config.yaml").read_text()
    (TURNS / "config.yaml").write_text(config.removesuffix(END) + "later: {key: 1}\n" + END)
    message = refused("train", older, capsys)
    assert "config.yaml was written by agentrl 7.5.1" in message and "later.key" in message


def test_a_later_versions_columns_and_keys_are_passed_over(older: Path) -> None:
    as_another(TURNS, FOLDER.newest, "7.5.1")
    check_folder(TURNS)
    assert writer_of(TURNS).startswith("agentrl 7.5.1 (commit") or writer_of(TURNS) == "agentrl 7.5.1"
    assert READERS["train"]() == 0
    first, second = json.loads((TURNS / RECORD).read_text())["written_by"]
    assert first["versions"]["agentrl"] == "7.5.1" and second["versions"]["agentrl"] == __version__


READ_BY = {
    "train": ("checkpoints/", "config.yaml", "metrics.jsonl", RECORD, "updates/"),
    "train ahead": ("checkpoints/", "journal/", "ledger.jsonl"),
    "view": ("config.yaml", "metrics.jsonl", "trajectories/", "updates/", RECORD),
    "replay": ("checkpoints/", "config.yaml", "trajectories/", RECORD),
    "evaluate": ("trajectories/", RECORD),
    "generate": ("policy/",),
}
"""Files and folders of a run that a command opens."""


def run_of(command: str) -> Path:
    return AHEAD if command == "train ahead" else TURNS


def copied_in_part() -> list[tuple[str, str, str]]:
    """List each reader with each file that it opens and each way in which a copy may end early."""
    with tarfile.open(ARCHIVES[-1]) as file:
        names = [one.name.removeprefix("./") for one in file if one.isfile()]
    return [
        (command, str(path), cut)
        for command, read in READ_BY.items()
        for path in (*map(Path, names), TURNS / RECORD)
        if path.is_relative_to(run_of(command)) and str(path.relative_to(run_of(command))).startswith(read)
        for cut in ("missing", "empty", "cut")
    ]


@pytest.mark.slice(12, "hostile")
@pytest.mark.parametrize(("command", "name", "cut"), copied_in_part())
def test_a_run_that_was_copied_in_part_is_read_or_refused(
    older: Path, command: str, name: str, cut: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command either does its work, or names the file or its folder, and never ends with a traceback."""
    path = Path(name)
    if path.name == RECORD or command == "evaluate":
        as_another(TURNS, FOLDER.newest, "7.5.1")
    if cut == "missing":
        path.unlink()
    else:
        size = random.Random(f"{command} {name}").randrange(1, path.stat().st_size)
        path.write_bytes(path.read_bytes()[: 0 if cut == "empty" else size])
    before = contents(older)
    capsys.readouterr()
    status = READERS[command]()
    said = capsys.readouterr().err
    assert status in (0, 2) and "Traceback" not in said, said
    if status == 2:
        told = said[said.index("error: ") :]
        assert path.name in told or str(path.parent) in told, told
        assert command != "evaluate" or path.name == RECORD or "agentrl 7.5.1" in told, told
        assert contents(older) == before, "a command that is refused writes nothing"
