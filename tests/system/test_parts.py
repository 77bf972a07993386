"""Entry points: annexes that are there or not, and a distribution of a stranger's."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.system.parts import of_annexes
from tests.conftest import PROJECT
from tests.naming import assert_names
from tests.test_structure import BROUGHT

STRANGER = {
    "pyproject.toml": """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "a-strangers"
version = "1"
[tool.hatch.build.targets.wheel]
packages = ["strangers"]
[project.entry-points."agentrl.commands"]
greet = "strangers.greet:main"
[project.entry-points."agentrl.dialects"]
terse = "strangers.terse:TERSE"
[project.entry-points."agentrl.agent_loops"]
strangers_loop = "strangers.loop:Loop"
[project.entry-points."agentrl.step_observers"]
teller = "strangers.teller:Teller"
[project.entry-points."agentrl.tables"]
".db" = "strangers.database:Database"
""",
    "strangers/__init__.py": "",
    "strangers/greet.py": '''"""`agentrl greet NAME`: say hello. Nothing else."""


def main(words):
    print("hello", *words)
    return 3
''',
    "strangers/terse.py": """from agentrl.config.dialect import Dialect, Reading

TERSE = Dialect(whole=lambda values, schema: Reading({"trainer.total_training_steps": values["steps"]}))
""",
    "strangers/loop.py": """from agentrl.agent_loop import AgentLoop


class Loop(AgentLoop):
    async def run(self, episode): ...
""",
    "strangers/database.py": """import json
import sqlite3

from agentrl.data.table import RowTable


class Database(RowTable):
    def rows(self):
        for (row,) in sqlite3.connect(f"file:{self.file}?mode=ro", uri=True).execute("select row from rows"):
            yield json.loads(row)
""",
    "strangers/teller.py": """from agentrl.trainer.observer import StepObserver


class Teller(StepObserver):
    def on_step(self, *_): ...
""",
}


def run(code: list[str], cwd: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *code], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package without the annexes."""
    root = tmp_path_factory.mktemp("core")
    (root / "agentrl").mkdir()
    for entry in (PROJECT / "agentrl").iterdir():
        if entry.name not in (*BROUGHT, "__pycache__"):
            (root / "agentrl" / entry.name).symlink_to(entry)
    # Modules that link elsewhere would look for annexes there.
    for name in ("__init__.py", "__main__.py", "system"):
        (root / "agentrl" / name).unlink()
    shutil.copytree(PROJECT / "agentrl/system", root / "agentrl/system")
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(PROJECT / "agentrl" / name, root / "agentrl" / name)
    for name in ("configs", "tools", "interactions", "data_prep", "sandbox"):
        (root / name).symlink_to(PROJECT / name)
    return root


def test_without_annexes_commands_say_what_is_missing(core: Path, tmp_path: Path) -> None:
    listed = run(["-m", "agentrl", "--help"], tmp_path, core)
    assert listed.returncode == 0 and "agentrl train " in listed.stdout
    assert not any(f"agentrl {name} " in listed.stdout for name in BROUGHT)
    gone = run(["-m", "agentrl", "view", "runs/x"], tmp_path, core)
    assert gone.returncode == 2 and "no command 'view'" in gone.stderr
    (tmp_path / "mine.yaml").write_text("dialect: verl\n")
    dialect = run(["-m", "agentrl.train", f"--config-path={tmp_path}", "--config-name=mine"], tmp_path, core)
    assert_names(dialect.stderr, "'verl'", "unknown")
    assert dialect.returncode == 2


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(300)
def test_without_annexes_the_core_trains(core: Path, tmp_path: Path) -> None:
    small = ["trainer.total_training_steps=1", "trainer.device=cpu", "data.train_batch_size=2", "data.val_files=null"]
    step = run(["-m", "agentrl.train", *small, "trainer.default_local_dir=run"], tmp_path, core)
    assert step.returncode == 0, step.stderr[-3000:] + step.stdout[-3000:]
    assert "to look at it" not in step.stdout + step.stderr
    words = ["data.train_files=runs/quickstart-assets/sft.parquet", "model.path=runs/quickstart-assets/warmed-up"]
    taught = run(
        ["-m", "agentrl.sft", *words, "trainer.total_training_steps=1", "data.on_bad_row=learn"], tmp_path, core
    )
    assert taught.returncode == 0, taught.stderr[-3000:]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the stranger's distribution is installed."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name, text in STRANGER.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(site), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return site


def test_a_strangers_distribution_adds_a_command_a_dialect_a_loop_and_an_observer(site: Path, tmp_path: Path) -> None:
    path = Path(f"{site}:{PROJECT}")
    listed = run(["-m", "agentrl", "--help"], tmp_path, path)
    assert "agentrl greet        say hello\n" in listed.stdout and "agentrl view         look at runs" in listed.stdout
    assert (done := run(["-m", "agentrl", "greet", "you"], tmp_path, path)).returncode == 3, done.stderr
    assert done.stdout == "hello you\n"
    (tmp_path / "mine.yaml").write_text("dialect: terse\nsteps: 7\n")
    words = ["-m", "agentrl.train", f"--config-path={tmp_path}", "--config-name=mine", "--cfg", "job"]
    assert "total_training_steps: 7\n" in (shown := run(words, tmp_path, path)).stdout, shown.stderr
    code = """
from agentrl.config import load_config
from agentrl.config.registries import AGENT_LOOPS, STEP_OBSERVERS
assert load_config(["trainer.observers=[teller]"]).trainer.observers == ["teller"]
print(STEP_OBSERVERS.get("teller").__name__, AGENT_LOOPS.get("strangers_loop").__name__)
"""
    assert (found := run(["-c", code], tmp_path, path)).stdout == "Teller Loop\n", found.stderr


def test_a_strangers_distribution_reads_files_of_its_own(site: Path, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": text}], "remark": text} for text in "ab"]
    with closing(sqlite3.connect(tmp_path / "mine.db")) as database, database:
        database.execute("create table rows (row text)")
        database.executemany("insert into rows values (?)", [(json.dumps(row),) for row in rows])
    code = """
from agentrl.data.dataset import FileDataset
data = FileDataset("mine.db")
print([data[row].prompt[0]["content"] for row in range(len(data))], data.notes)
"""
    found = run(["-c", code], tmp_path, Path(f"{site}:{PROJECT}"))
    assert found.stdout == "['a', 'b'] {'mine.db': 'columns that are not read: remark'}\n", found.stdout + found.stderr


def test_two_distributions_with_one_name_are_refused_by_both_names(site: Path, tmp_path: Path) -> None:
    for name, group, target in (("other", "commands", "greet = other:x"), ("third", "dialects", "verl = third:x")):
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[agentrl.{group}]\n{target}\n")
    path = Path(f"{tmp_path}:{site}:{PROJECT}")
    twice = run(["-m", "agentrl", "greet"], tmp_path, path)
    assert (help := run(["-m", "agentrl", "--help"], tmp_path, path)).returncode == 2 and help.stderr.startswith(
        "error: "
    )
    assert_names(twice.stderr, "strangers.greet:main", "a-strangers")
    assert twice.returncode == 2
    ours = run(["-c", "from agentrl.config.registries import DIALECTS; DIALECTS.get('nonsense')"], tmp_path, path)
    assert_names(ours.stderr, "agentrl.verl.dialect:VERL")


def test_commands_that_cannot_be_run_are_named_in_a_line(tmp_path: Path) -> None:
    info = tmp_path / "faulty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (tmp_path / "faulty.py").write_text(
        "from agentrl.errors import DataError\nNUMBER = 3\n"
        "def refuses(words):\n    raise DataError('no row \\x1b[2J')\n"
    )
    (tmp_path / "breaks.py").write_text("raise OSError('no disk')\n")
    targets = {
        "gone": ("no_such_module:main", "module 'no_such_module' not found"),
        "less": ("faulty:main", "faulty has no 'main'"),
        "number": ("faulty:NUMBER", "expected a function of the words that follow, found 3"),
        "breaks": ("breaks:main", "OSError: no disk"),
        "refuses": ("faulty:refuses", "no row ␛[2J"),
        "train": ("faulty:refuses", ""),
    }
    lines = [f"{name} = {target}\n" for name, (target, _) in targets.items()]
    (info / "entry_points.txt").write_text("[agentrl.commands]\n" + "".join(lines))
    path = Path(f"{tmp_path}:{PROJECT}")
    listed = run(["-m", "agentrl", "--help"], tmp_path, path)
    assert listed.returncode == 0 and "the main job (not faulty:refuses)\n" in listed.stdout
    assert "(cannot be found: no_such_module:main)\n" in listed.stdout
    for name, (target, problem) in targets.items():
        if problem:
            done = run(["-m", "agentrl", name], tmp_path, path)
            assert done.returncode == 2 and done.stderr.count("\n") == 1 and problem in done.stderr, done.stderr
            assert name == "refuses" or f"entry point agentrl.commands: {name} = {target}" in done.stderr


def test_every_entry_point_of_an_annex_is_there() -> None:
    from agentrl.system.targets import load_target

    groups = ("commands", "dialects", "evaluate", "reward_managers", "scorers", "suites")
    found = {f"{group}: {name}": target for group in groups for name, target in of_annexes(group).items()}
    assert len(found) > 15
    for name, target in found.items():
        assert load_target(target, name) is not None
