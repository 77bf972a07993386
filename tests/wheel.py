"""The wheel, installed once for all tests of a run, and programs that import from it alone: what a user has."""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.forked import PRELOADED, PROJECT, become

PATIENCE = 780
"""Seconds after which a program is ended."""
Run = Callable[[Sequence[str], Path], None]
"""Runs `python WORDS...` in a folder and fails where its exit status is not 0."""
SERVER = f"""
import atexit, gc, importlib, json, os, runpy, signal, sys, time
from pathlib import Path
checkout, patience, *preloaded = sys.argv[1:]
sys.path = [path for path in sys.path if path not in ("", checkout)]
for name in preloaded:
    importlib.import_module(name)
print(importlib.import_module("agentrl").__file__, flush=True)

{inspect.getsource(become)}
for line in sys.stdin:
    child = os.fork()
    if not child:  # what it raises ends it as it would end a program
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        become(*json.loads(line))
        sys.exit(0)
    end = time.monotonic() + float(patience)
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            done = os.waitpid(child, 0)
            break
        time.sleep(0.02)
    print(os.waitstatus_to_exitcode(done[1]), flush=True)
"""
"""Runs one program a line, each in a process forked from one that has imported what they import (tests/forked.py)."""


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of all processes that share the tests."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def agentrl_wheel(shared_folder: Path) -> Path:
    """The wheel, which one process makes for all."""
    made = _made_once(shared_folder / "wheel", "wheel", "--no-build-isolation", str(PROJECT), folder="--wheel-dir")
    return next(made.glob("agentrl-*.whl"))


@pytest.fixture(scope="session")
def installed(agentrl_wheel: Path, shared_folder: Path) -> Path:
    """A folder with the wheel's packages, which one process makes for all."""
    return _made_once(shared_folder / "site", "install", str(agentrl_wheel), folder="--target")


def _made_once(path: Path, command: str, *words: str, folder: str) -> Path:
    """Have pip make `path`, the option `folder`, where no other process has; it is whole when it is there."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            new = path.with_suffix(".new")
            pip = [sys.executable, "-m", "pip", command, "--no-deps", "--no-index", *words, folder, str(new)]
            done = subprocess.run(pip, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            new.rename(path)
    return path


@pytest.fixture(scope="session")
def run_wheel(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs a page's command as its reader does: with the wheel, and the checkout off the import path."""
    said = tmp_path_factory.mktemp("said") / "output"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(PROJECT), str(PATIENCE), *PRELOADED],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=said.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
    )
    assert server.stdin is not None and server.stdout is not None
    origin = server.stdout.readline().strip()
    assert origin == str(installed / "agentrl" / "__init__.py"), origin

    def run(words: Sequence[str], cwd: Path) -> None:
        assert server.stdin is not None and server.stdout is not None
        # As the test has changed it; the checkout stays off the import path.
        further = [
            path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", str(PROJECT))
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), *further])}
        said.unlink(missing_ok=True)
        server.stdin.write(json.dumps([list(words), str(cwd), environment, [str(said)] * 2]) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        assert status == "0", f"{' '.join(words)}\nexit status {status}\n{said.read_text(errors='replace')[-6000:]}"

    yield run
    server.stdin.close()
    server.wait()
