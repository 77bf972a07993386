"""What `make` says when it cannot set up, and what CI does not let pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.forked import ForkedPython

CPU, CUDA = "constraints/cpu.txt", "constraints/cuda.txt"
FAKE_GPU = 'echo "GPU 0: NVIDIA H200 (UUID: GPU-0)"; echo "GPU 1: NVIDIA H200 (UUID: GPU-1)"'


@pytest.fixture(autouse=True)
def fake_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `nvidia-smi`, first on PATH, that knows of no GPU whatever the machine has; `tell` changes it."""
    program = tmp_path / "fake" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    tell(program, "exit 9")
    return program


def tell(program: Path, what: str) -> None:
    program.write_text(f"#!/bin/sh\n{what}\n")
    program.chmod(0o755)


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    # Without what an outer `make test` leaves in the environment for its children, or the machine's own GPU.
    left_out = ("MFLAGS", "CONSTRAINTS", "TORCH_INDEX", "PYTHON", "VENV", "ARGS", "PROCESSES")
    environment = {name: value for name, value in os.environ.items() if "MAKE" not in name and name not in left_out}
    environment.setdefault("NVIDIA_GPUS", "/nowhere")
    return subprocess.run(["make", *arguments], cwd=PROJECT, capture_output=True, text=True, env=environment)


def made(venv: Path, constraints: str) -> None:
    """Pretend that an environment was set up so."""
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "pip").touch()
    (venv / f".setup-{Path(constraints).name}").touch()


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
    found = installs("\n".join(plan))
    assert [line.split()[-1] for line in found] == ["torch", "'.'"]
    assert all("-c constraints/cpu.txt" in line for line in found)
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in found[0]
    for goal in ("setup", "test", "lint", "seed"):
        everything = installs(make("-n", goal, f"VENV={tmp_path}/venv").stdout)
        assert [line.split()[-1] for line in everything] == ["torch", "'.[dev]'"]
    newest = make("-n", "setup", "CONSTRAINTS=", f"VENV={tmp_path}/venv").stdout
    assert "-c constraints" not in newest and "--upgrade" in newest


def installs(plan: str) -> list[str]:
    return [
        line.split(" install ")[1].split(" ||")[0]
        for line in plan.splitlines()
        if "-m pip" in line and " install " in line
    ]


@pytest.mark.parametrize("by", ["nvidia-smi", "the driver's list"])
def test_a_new_environment_beside_a_gpu_gets_torch_with_cuda(
    tmp_path: Path, fake_nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "nvidia-smi":
        tell(fake_nvidia_smi, FAKE_GPU)
    else:
        place = tmp_path / "gpus" / "0000:01:00.0"
        place.mkdir(parents=True)
        (place / "information").write_text("Model: \t NVIDIA H200\nIRQ: 5\n")
        monkeypatch.setenv("NVIDIA_GPUS", str(place.parent))
    plan = make("-n", "train", f"VENV={tmp_path}/venv").stdout
    assert "setup: found NVIDIA GPU (NVIDIA H200): installing torch with CUDA; for the CPU build: make train" in plan
    assert [line.split() for line in installs(plan)] == [
        ["--no-deps", "-c", CUDA, "torch"],  # from the package index alone
        ["-c", CUDA, "-e", "'.'"],
    ]
    sglang = make("-n", "setup-sglang", f"VENV={tmp_path}/venv").stdout
    assert "-e '.[dev,sglang]'" in sglang and "sglang-cpu" not in sglang


def test_pins_for_cuda_are_those_for_the_cpu() -> None:
    lines = (PROJECT / CUDA).read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["-c cpu.txt"]


def test_without_a_gpu_the_cpu_build_is_taken_and_said(tmp_path: Path) -> None:
    plan = make("-n", "setup", f"VENV={tmp_path}/venv").stdout
    assert "setup: no NVIDIA GPU found: installing torch for the CPU; with CUDA: make setup CONSTRAINTS=" in plan


@pytest.mark.parametrize("given", [CPU, CUDA, ""])
def test_what_the_user_sets_wins_over_the_machine_and_over_what_was_made(
    tmp_path: Path, fake_nvidia_smi: Path, given: str
) -> None:
    tell(fake_nvidia_smi, FAKE_GPU)
    for name, constraints in (("new", None), ("cpu", CPU), ("cuda", CUDA)):
        if constraints is not None:
            made(tmp_path / name, constraints)
        plan = make("-n", "setup", f"CONSTRAINTS={given}", f"VENV={tmp_path / name}").stdout
        if given == constraints:
            assert installs(plan) == []
        else:
            assert all((f"-c {given}" in line) if given else ("-c" not in line) for line in installs(plan))
            assert len(installs(plan)) == (2 if given else 1)
            # pip takes the other build of the same version for what is wanted
            assert ("uninstall -q -y torch" in plan) == (constraints is not None)


def test_an_environment_keeps_the_torch_that_it_was_made_with_and_says_so(
    tmp_path: Path, fake_nvidia_smi: Path
) -> None:
    tell(fake_nvidia_smi, FAKE_GPU)
    made(tmp_path / "cpu", CPU)
    done = make("setup", f"VENV={tmp_path}/cpu")
    assert done.stdout.strip() == (
        f"setup: this machine has an NVIDIA GPU (NVIDIA H200), and {tmp_path}/cpu torch for the CPU; with CUDA: make "
        f"setup CONSTRAINTS={CUDA}"
    )
    for constraints in (CUDA, ""):
        venv = tmp_path / f"made-{Path(constraints).name}"
        made(venv, constraints)
        tell(fake_nvidia_smi, "exit 9")
        plan = make("-n", "train", f"VENV={venv}").stdout
        assert plan.strip() == f"{venv}/bin/python -m agentrl.train"


FAKE_PYTHON = """
case "$*" in
  *"-m pip"*) echo "pip $*";;
  *) echo "python $*";;
esac
"""
SLOW_PIP = """
[ "$5" = --no-deps ] || case "$*" in *"install -c"*)
  for package in 1 2 3; do
    mkdir -p "{venv}/lib/python3.11/site-packages/$package-1.dist-info"
    asked=$(wc -l < {log})
    until [ $(wc -l < {log}) -ge $((asked + 2)) ]; do /bin/sleep 0.01; done
  done;;
esac
"""
"""Installs three packages, one whenever the count before it was told."""


def fake_environment(tmp_path: Path, *stamps: str) -> Path:
    """An environment whose Python tells its words."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    tell(venv / "bin" / "python", FAKE_PYTHON)
    (venv / "bin" / "pip").touch()
    for stamp in stamps:
        (venv / stamp).touch()
    return venv


def test_training_installs_less_and_what_is_there_for_tests_serves_it(tmp_path: Path) -> None:
    venv = fake_environment(tmp_path)

    def stamps() -> list[str]:
        return sorted(path.name for path in venv.glob(".setup-*"))

    first = make("train", f"VENV={venv}")
    assert (first.returncode, stamps()) == (0, [".setup-train-cpu.txt"]), first.stderr
    assert re.search(r"^setup: about \d+ packages, [\d.]+ GB, \d+ minutes on two cores$", first.stdout, re.MULTILINE)
    assert "pip" not in make("train", f"VENV={venv}").stdout, "it is there"
    assert "-e .[dev]" in make("setup", f"VENV={venv}").stdout
    assert stamps() == [".setup-cpu.txt"]
    assert make("train", f"VENV={venv}").stdout.split("\n")[1:] == ["python -m agentrl.train", ""]
    os.utime(venv / ".setup-cpu.txt", (1, 1))  # pyproject.toml has changed since
    assert "-e .[dev]" in make("train", f"VENV={venv}").stdout, "what tests need is kept"


def test_an_environment_for_training_keeps_its_torch_when_tests_are_added(tmp_path: Path) -> None:
    venv = fake_environment(tmp_path, ".setup-train-cuda.txt")
    plan = make("-n", "setup", f"VENV={venv}").stdout
    assert all(f"-c {CUDA}" in line for line in installs(plan)) and "uninstall" not in plan
    assert "uninstall -q -y torch" in make("-n", "train", f"CONSTRAINTS={CPU}", f"VENV={venv}").stdout


def test_packages_are_counted_while_pip_works(tmp_path: Path, fake_nvidia_smi: Path) -> None:
    venv, log = fake_environment(tmp_path), tmp_path / "sleeps"
    log.touch()
    tell(fake_nvidia_smi.with_name("sleep"), f"echo >> {log}; exec /bin/sleep 0.01")
    tell(venv / "bin" / "python", SLOW_PIP.format(venv=venv, log=log))
    done = make("train", f"VENV={venv}")
    counted = re.findall(r"^setup: (\d) packages are installed$", done.stdout, re.MULTILINE)
    assert counted == ["1", "2", "3"], done.stdout
    tell(venv / "bin" / "python", "exit 3")
    failed = make("setup", f"VENV={venv}")
    assert failed.returncode != 0 and "setup: pip failed, see above" in failed.stdout


def test_every_call_of_pip_bounds_its_waiting_for_an_index(tmp_path: Path) -> None:
    plans = [
        make("-n", *words, f"VENV={tmp_path}/venv").stdout
        for words in (["setup-sglang"], ["setup-sglang", "CONSTRAINTS="], ["setup", f"CONSTRAINTS={CUDA}"])
    ]
    calls = [line for plan in plans for line in plan.splitlines() if "-m pip" in line]
    assert len(calls) == 4 + 2 + 2
    assert all("--retries 1 --timeout 15" in line and "PIP_INDEX_URL" in line for line in calls)


def test_make_installs_sglang_without_what_brings_cuda_or_with_all_of_it(tmp_path: Path) -> None:
    plan = make("-n", "test-sglang", "ARGS=-k contract", f"VENV={tmp_path}/venv").stdout.splitlines()
    assert plan[-1] == f"{tmp_path}/venv/bin/python -m pytest tests/sglang -k contract"
    *_, first, second = installs("\n".join(plan))
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
