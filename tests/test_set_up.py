"""What `make` says when it cannot set up, and what CI does not let pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.forked import ForkedPython


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # Without what an outer `make test` leaves in the environment for its children.
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "MFLAGS"}
    return subprocess.run(["make", *arguments], cwd=PROJECT, capture_output=True, text=True, env=environment)


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = make("train", f"PYTHON={old}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert f"agentrl needs Python 3.11 or newer; '{old}' is: Python 3.9.1" in done.stdout
    assert "make train PYTHON=python3.12" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_make_says_what_to_install_for_virtual_environments(tmp_path: Path) -> None:
    without = tmp_path / "python"
    without.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexit 0\n')
    without.chmod(0o755)
    done = make("test", f"PYTHON={without}", f"VENV={tmp_path}/venv")
    assert done.returncode != 0
    assert "sudo apt-get install python3-venv" in done.stdout


def test_make_passes_overrides_and_pins_torch_before_the_rest(tmp_path: Path) -> None:
    plan = make("-n", "train", "ARGS=trainer.seed=2 data.seed=3", f"VENV={tmp_path}/venv").stdout.splitlines()
    assert plan[-1] == f"{tmp_path}/venv/bin/python -m agentrl.train trainer.seed=2 data.seed=3"
    installs = [line for line in plan if " install " in line and "pip" in line.split(" install ")[0]]
    assert [line.split()[-1] for line in installs] == ["torch", "'.[dev]'"]
    assert all("-c constraints/cpu.txt" in line for line in installs)
    newest = make("-n", "setup", "CONSTRAINTS=", f"VENV={tmp_path}/venv").stdout
    assert "-c constraints" not in newest and "--upgrade" in newest


def test_make_installs_sglang_without_what_brings_cuda_or_with_all_of_it(tmp_path: Path) -> None:
    plan = make("-n", "test-sglang", "ARGS=-k contract", f"VENV={tmp_path}/venv").stdout.splitlines()
    assert plan[-1] == f"{tmp_path}/venv/bin/python -m pytest tests/sglang -k contract"
    first, second = (line.split(" install ")[1] for line in plan if "sglang-cpu" in line and " install " in line)
    assert first == "-c constraints/cpu.txt -e '.[dev,sglang-cpu]'"
    assert second == "--no-deps -r constraints/sglang-cpu.txt"
    on_gpus = make("-n", "setup-sglang", "CONSTRAINTS=", f"VENV={tmp_path}/venv").stdout
    assert "-e '.[dev,sglang]'" in on_gpus and "sglang-cpu" not in on_gpus


@pytest.mark.parametrize(("ci", "status", "says"), [("1", 1, "skipped in continuous integration"), ("0", 0, "skipped")])
def test_without_sglang_its_tests_say_so_and_ci_fails(tmp_path: Path, ci: str, status: int, says: str) -> None:
    program = tmp_path / "without_sglang.py"
    program.write_text("import sys, pytest; sys.modules['sglang'] = None; sys.exit(pytest.main(sys.argv[1:]))")
    words = [program, "-q", "-p", "no:cacheprovider", "tests/sglang/test_process.py"]
    done = ForkedPython(words, environment={"AGENTRL_CI": ci}).wait(100)
    assert (done.returncode, says in done.stdout) == (status, True), done.stdout + done.stderr
    assert "needs SGLang: make test-sglang" in done.stdout
    assert "passed" not in done.stdout


SKIPPING = """
import pytest

def test_reads(shared_data):
    pytest.skip("something is missing")

def test_reads_nothing():
    pytest.skip("not here")
"""


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize(
    ("ci", "shared", "status", "summary"),
    [("1", True, 1, "1 failed, 1 skipped"), ("0", True, 0, "2 skipped"), ("1", False, 0, "2 skipped")],
)
def test_ci_does_not_skip_tests_of_shared_data(
    tmp_path: Path, ci: str, shared: bool, status: int, summary: str
) -> None:
    tests = tmp_path / "project" / "tests"
    tests.mkdir(parents=True)
    shutil.copy(PROJECT / "tests" / "conftest.py", tests)
    (tests / "test_it.py").write_text(SKIPPING)
    if shared:
        (tmp_path / "shared" / "data").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        cwd=tmp_path,
        env={**os.environ, "AGENTRL_CI": ci},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, summary in done.stdout) == (status, True), done.stdout + done.stderr
