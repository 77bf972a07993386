"""What a refused command leaves of an older run."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from agentrl.checkpoint.manager import CheckpointManager
from agentrl.checkpoint.remote import ObjectStore
from agentrl.config import Config
from agentrl.errors import ConfigError
from agentrl.observe.plain import PlainDisplay
from agentrl.observe.tracking import Tracker
from agentrl.train import main
from agentrl.trainer.run_folder import RunFolder
from tests.naming import assert_names, naming


@pytest.mark.parametrize("name", ["sglang", "embedded"])
def test_a_logger_that_is_missing_moves_no_older_run(
    small_run: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("agentrl.config.installed.is_installed", lambda name: True)  # SGLang, which is not started
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    more = ["trainer.logger=[jsonl,wandb]", "trainer.resume_mode=disable", f"actor_rollout_ref.rollout.name={name}"]
    assert main(small_run(*more)) == 2
    assert_names(capsys.readouterr().err, "wandb", "not installed")
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def test_the_store_is_told_of_no_run_that_could_not_begin_here(tmp_path: Path) -> None:
    config = Config()
    config = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"default_local_dir": str(tmp_path / "run")})}
    )
    display = PlainDisplay("run", io.StringIO())
    store = ObjectStore(f"file://{tmp_path}/store", warn=display.warn)
    folder = RunFolder(config, store, display)
    tracker = Tracker.from_config(config.trainer, tmp_path / "run", config, display)
    checkpoints = CheckpointManager(tmp_path / "run" / "checkpoints", keep=None, fingerprint={}, store=store)
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    with naming(ConfigError, "cannot be written"):
        folder.begin(tracker.truncate_after, checkpoints, 0)
    assert not (tmp_path / "store" / "config.yaml").exists()
    (tmp_path / "run" / "config.yaml").rmdir()
    folder.begin(tracker.truncate_after, checkpoints, 0)
    written = (tmp_path / "run" / "config.yaml").read_bytes()
    assert (tmp_path / "store" / "config.yaml").read_bytes() == written != b""


HOLDER = """
import os, sys, time
from agentrl.trainer.run_folder import RunFolder
from tests.trainer.test_run_folder import folder_of, begun
held = folder_of(sys.argv[1], *sys.argv[2:])
if sys.argv[2:]:  # checked, and begins when it is told to
    print("checked", flush=True)
    sys.stdin.readline()
begun(held)
if os.fork():
    print("begun", flush=True)
time.sleep(60)
"""


def folder_of(path: str | Path, resume_mode: str = "auto", *, val_only: bool = False) -> RunFolder:
    config = Config()
    keys = {"default_local_dir": str(path), "resume_mode": resume_mode, "val_only": val_only}
    trainer = config.trainer.model_copy(update=keys)
    return RunFolder(config.model_copy(update={"trainer": trainer}), None, PlainDisplay("run", io.StringIO()))


@pytest.mark.parametrize("is_live", [True, False])
def test_a_val_only_moves_no_checkpoint_of_a_run_that_goes_on(tmp_path: Path, is_live: bool) -> None:
    """A save is between its two renames, or was killed there."""
    run = begun(folder_of(tmp_path))
    aside = tmp_path / "checkpoints" / ".step_000001.replaced"
    aside.mkdir(parents=True)
    if not is_live:
        run.close()
    for _ in range(2):  # the second finds the lock of the first
        with closing(folder_of(tmp_path, val_only=True)) as folder:
            folder.clear()
            CheckpointManager(aside.parent, keep=None, owned=folder.is_owned())
    assert aside.exists() == is_live


def begun(folder: RunFolder) -> RunFolder:
    display = PlainDisplay("run", io.StringIO())
    tracker = Tracker.from_config(Config().trainer, folder.path, Config(), display)
    folder.begin(
        tracker.truncate_after, CheckpointManager(folder.path / "checkpoints", keep=None, fingerprint={}, store=None), 0
    )
    return folder


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path: Path) -> None:
    """A child that outlives the killed process keeps nobody out."""
    path = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"begun\n"
        before = {file: file.read_bytes() for file in path.iterdir()}
        with naming(ConfigError, holder.pid):
            folder_of(path)
        assert {file: file.read_bytes() for file in path.iterdir()} == before
        holder.kill()
        holder.wait()
        begun(folder_of(path))
    finally:
        os.killpg(holder.pid, signal.SIGKILL)


def test_of_two_that_were_checked_at_once_one_begins(tmp_path: Path) -> None:
    """The other one changes nothing of its folder: in particular it does not move a live run aside."""
    path = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), "disable"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"checked\n"
        others = [folder_of(path, mode) for mode in ("disable", "disable", "auto")]
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"begun\n"
        before = {file: file.read_bytes() for file in path.iterdir()}
        begins: list[Callable[[], object]] = [others[0].clear, *(partial(begun, one) for one in others[1:])]
        for begin in begins:
            with naming(ConfigError, holder.pid):
                begin()
        assert {file: file.read_bytes() for file in path.iterdir()} == before
        assert [one.name for one in tmp_path.iterdir()] == ["run"]
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()


MANY = """
import os, sys
from agentrl.errors import ConfigError
from tests.trainer.test_run_folder import begun, folder_of
go, end, told = os.pipe(), os.pipe(), os.pipe()
for _ in range(8):
    if os.fork() == 0:
        folder = folder_of(sys.argv[1], "disable")
        os.write(told[1], b".")
        os.read(go[0], 1)
        try:
            begun(folder)
            os.write(told[1], b"B")
        except ConfigError:
            os.write(told[1], b"-")
        os.read(end[0], 1)
        os._exit(0)
for _ in range(8):
    os.read(told[0], 1)
os.write(go[1], b"." * 8)
print("".join(sorted(os.read(told[0], 1).decode() for _ in range(8))), flush=True)
os.write(end[1], b"." * 8)
"""


def test_of_many_that_come_at_once_one_begins_and_the_earlier_run_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("earlier")
    done = subprocess.run([sys.executable, "-c", MANY, str(tmp_path / "run")], capture_output=True, text=True)
    assert done.stdout == "-------B\n", done.stderr[-2000:]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "run.1"]
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text() == "earlier"
    assert (tmp_path / "run" / "config.yaml").is_file()
