"""The wheel: what is in it works from any directory, beside a user's own folders."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    done = subprocess.run([*pip, str(out), str(PROJECT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("agentrl-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    done = subprocess.run([*pip, str(target), str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def run(program: str, installed: Path, cwd: Path) -> str:
    """Run in `cwd` with the installed wheel before, and the checkout off, the import path."""
    guard = f"import sys; sys.path = [p for p in sys.path if p != {str(PROJECT)!r}]\n"
    done = subprocess.run(
        [sys.executable, "-c", guard + program],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_source_and_config_file_is_in_the_wheel(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, place in [(name, name) for name in ("agentrl", "data_prep", "sandbox", "tools", "interactions")] + [
        ("configs", "agentrl/_configs")
    ]:
        for file in (PROJECT / folder).rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"{place}/{file.relative_to(PROJECT / folder)}" in inside
    assert not any(name.startswith(("tests/", "benchmarks/", "configs/")) for name in inside)


def test_the_config_loads_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    program = (
        "import agentrl\n"
        f"assert agentrl.__file__.startswith({str(installed)!r}), agentrl.__file__\n"
        "from agentrl.config import load_config\n"
        "from agentrl.system.config_files import configs_dir\n"
        "config = load_config([])\n"
        "print(configs_dir())\n"
        "print(config.actor_rollout_ref.rollout.multi_turn.tool_config_path)\n"
    )
    configs = installed / "agentrl" / "_configs"
    assert run(program, installed, tmp_path).split() == [str(configs), str(configs / "tools" / "quickstart.yaml")]


def test_a_users_folder_of_tools_adds_to_ours(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mine.py").write_text("def double(x: int) -> int:\n    return 2 * x\n")
    program = (
        "import tools.mine, tools.calculator, interactions.gsm8k, data_prep.gsm8k\n"
        "print(tools.mine.__file__)\nprint(tools.calculator.__file__)\n"
    )
    mine, ours = run(program, installed, tmp_path).split()
    assert Path(mine) == tmp_path / "tools" / "mine.py"
    assert Path(ours) == installed / "tools" / "calculator.py"


def test_a_users_own_yaml_builds_on_the_installed_one(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("defaults: [train, _self_]\ntrainer: {experiment_name: job}\n")
    program = (
        "from agentrl.config import load_config\n"
        "print(load_config(['--config-path', '.', '--config-name', 'job']).trainer.default_local_dir)\n"
    )
    assert run(program, installed, tmp_path).strip() == "runs/job"


def test_the_retriever_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("tantivy", reason="the extra `retriever` is not installed")
    (tmp_path / "c.jsonl").write_text('{"contents": "Zed"}\n')
    program = (
        "import runpy, sys\n"
        "sys.argv = ['retriever', 'index', 'c.jsonl', 'made']\n"
        "runpy.run_module('tools.retriever', run_name='__main__', alter_sys=True)\n"
    )
    assert run(program, installed, tmp_path).strip() == "made: 1 documents"
    assert (tmp_path / "made" / "retriever.json").exists()
