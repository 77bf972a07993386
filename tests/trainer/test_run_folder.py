"""What a refused command leaves of an older run."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
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


@pytest.mark.parametrize("name", ["sglang", "embedded"])
def test_a_logger_that_is_missing_moves_no_older_run(
    small_run: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("agentrl.config.checks.is_installed", lambda name: True)  # SGLang, which is not started
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}\n')
    more = ["trainer.logger=[jsonl,wandb]", "trainer.resume_mode=disable", f"actor_rollout_ref.rollout.name={name}"]
    assert main(small_run(*more)) == 2
    assert "names wandb, which is not installed" in capsys.readouterr().err
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
    with pytest.raises(ConfigError, match="cannot be written"):
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
held = begun(folder_of(sys.argv[1]))
if os.fork():
    print("begun", flush=True)
time.sleep(60)
"""


def folder_of(path: str | Path) -> RunFolder:
    config = Config()
    trainer = config.trainer.model_copy(update={"default_local_dir": str(path)})
    return RunFolder(config.model_copy(update={"trainer": trainer}), None, PlainDisplay("run", io.StringIO()))


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
        with pytest.raises(ConfigError, match=rf"another command trains there .*process {holder.pid} of "):
            folder_of(path)
        assert {file: file.read_bytes() for file in path.iterdir()} == before
        holder.kill()
        holder.wait()
        begun(folder_of(path))
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
