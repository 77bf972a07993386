"""Dialects: found by name, a user's too, and only where a config is not in our own words."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.config import SFTConfig, load_config
from agentrl.config.registries import DIALECTS
from agentrl.errors import ConfigError
from agentrl.tool.toolset import ToolSet
from tests.naming import Names, assert_names, naming

MINE = """
from agentrl.config.dialect import Dialect, Reading


class Told(Reading):
    def notes(self, config, typed):
        return [f"typed: {sorted(typed)}, trained on {config.data.train_files}"]


def whole(values, schema):
    faults = ["steps: expected below 9"] if values["steps"] == 9 else []
    return Told({"data.train_files": values["input"], "trainer.total_training_steps": values["steps"]}, faults)


def spelled(unknown, values, schema):
    if "batch" not in unknown:
        return Reading(strangers=list(unknown))
    said = [f"batch={unknown['batch']} is read"]
    return Told({"data.train_batch_size": unknown["batch"]}, strangers=[*unknown][1:], said=said)


def entry(entry):
    entry.values["class_name"] = "tools.calculator.CalculatorTool"
    return entry


MINE = Dialect(whole, spelled, entry, lambda name: " (write job)" if name == "their_job" else "")
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "job.yaml").write_text(f"dialect: {tmp_path}/mine.py:MINE\ninput: x.parquet\nsteps: 3\n")
    return tmp_path


@pytest.fixture
def named(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the dialect the name `theirs`."""
    monkeypatch.setattr(DIALECTS, "_registered", {})
    DIALECTS.register("theirs")(DIALECTS.get(f"{mine}/mine.py:MINE"))


def test_a_config_in_our_own_words_imports_no_dialect() -> None:
    program = (
        "import sys\n"
        "from agentrl.config import load_config\n"
        "from agentrl.tool.toolset import ToolSet\n"
        "def annex(): return [name for name in sys.modules if name.startswith('agentrl.verl')]\n"
        "load_config(['trainer.total_epochs=3', 'algorithm=ppo'])\n"
        "ToolSet.from_yaml('tools/calculator.yaml')\n"
        "assert not annex(), annex()\n"
        "try: load_config(['rollout.max_head_offpolicyness=0'])\n"
        "except Exception as error: assert 'a key of AReaL' in str(error)\n"
        "assert annex(), 'the same program sees one that is imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_users_dialect_reads_a_whole_config(mine: Path, caplog: pytest.LogCaptureFixture) -> None:
    argv = ["--config-path", str(mine), "--config-name", "job"]
    config = load_config([*argv, "++input=y.parquet"])
    assert (config.data.train_files, config.trainer.total_training_steps) == ("y.parquet", 3)
    assert_names(caplog.messages, "typed:", "['input']", "y.parquet")
    with pytest.raises(ConfigError, match=r"^steps: expected below 9$"):
        load_config([*argv, "++steps=9"])


@pytest.mark.usefixtures("named")
def test_a_registered_dialect_reads_keys_that_are_not_ours(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config(["batch=32"])
    assert config.data.train_batch_size == 32
    assert caplog.messages.index("batch=32 is read") < [text[:5] for text in caplog.messages].index("typed")
    with naming(ConfigError, "unknown", "batches"):
        load_config(["batch=32", "batches=9"])
    with naming(ConfigError, "write job"):
        load_config([], "their_job")


@pytest.mark.usefixtures("named")
def test_a_registered_dialect_is_asked_for_classes_of_its_package(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: theirs.tools.Sums}]")
    assert ToolSet.from_yaml(str(tmp_path / "tools.yaml")).names == ToolSet.from_yaml("tools/calculator.yaml").names
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: others.tools.Sums}]")
    with pytest.raises(ConfigError, match="others"):
        ToolSet.from_yaml(str(tmp_path / "tools.yaml"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vrl", ("dialect:", "'vrl'", "'verl'", "verl-0.2", "unknown")),
        ("areal", "dialect=areal"),
        ("pathlib:Path", ("dialect=pathlib:Path", "Dialect", "agentrl.config.dialect")),
    ],
)
def test_what_is_no_dialect_is_refused(name: str, said: Names) -> None:
    with naming(ConfigError, said):
        load_config([f"dialect='{name}'"])


def test_only_trainings_are_written_in_a_dialect() -> None:
    with naming(ConfigError, "unknown", "dialect", "key"):
        load_config(["data.train_files=x", "model.path=m", "dialect=verl"], "sft", SFTConfig)
