"""What a step enters: every thread, coroutines and generators, of the folder's files alone, while it is counted."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.training.step_footprint import main, table, traced_threads
from tests.conftest import PROJECT

ENGINE = """
import asyncio, threading

class Engine:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        self.loop.run_forever()

    async def generate(self):
        return sum(ids())

    def never(self): ...

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

def ids():
    yield 1
"""
STEP_OF_IT = """
import asyncio, json, threading

def step(engine):
    waiting = asyncio.run_coroutine_threadsafe(engine.generate(), engine.loop)
    worker = threading.Thread(target=write)
    worker.start()
    worker.join()
    record()
    def waits():
        return waiting.result()
    json.dumps([waits() for _ in range(2)])

def write(): ...

def record():
    return sorted([2, 1], key=lambda one: -one)
"""


def test_what_any_thread_enters_is_counted_once(tmp_path: Path) -> None:
    package = tmp_path / "package"
    (package / "engine").mkdir(parents=True)
    (package / "engine" / "core.py").write_text(ENGINE)
    (package / "step.py").write_text(STEP_OF_IT)
    for twin in (package / "a.py", package / "b.py", tmp_path / "package_of_another.py"):
        twin.write_text("def same(): ...\n")
    with traced_threads(package) as trace:
        engine = runpy.run_path(str(package / "engine" / "core.py"))["Engine"]()
        step = runpy.run_path(str(package / "step.py"))["step"]
        same = [runpy.run_path(str(file))["same"] for file in (*package.glob("?.py"), *tmp_path.glob("*.py"))]
        try:
            with trace.counting():
                for one in same:
                    one()
                step(engine)
                step(engine)
        finally:
            engine.close()
        files = trace.files()
    assert {file: sorted(names) for file, names in files.items()} == {
        "a.py": ["same"],
        "b.py": ["same"],
        "step.py": ["record", "step", "step.<locals>.waits", "write"],
        "engine/core.py": ["Engine.generate", "ids"],
    }
    assert sys.getprofile() is None
    assert table(files).splitlines()[4:] == ["| engine | 1 | 2 |", "| step.py | 1 | 4 |", "| all | 4 | 8 |"]


def test_what_has_come_and_gone_since_an_earlier_run_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "a=1": {"a.py": ["f", "f.<locals>.one", "f.<locals>.one"], "b.py": ["g"]},
        "a=2": {"a.py": ["h", "f", "f.<locals>.one"], "b.py": ["g"]},
    }
    monkeypatch.setattr("benchmarks.training.step_footprint.record", lambda keys: runs[keys[0]])
    main(["--json", str(tmp_path / "before.json"), "a=1"])
    capsys.readouterr()
    main(["--names", "--against", str(tmp_path / "before.json"), "a=2"])
    names, _, rest = capsys.readouterr().out.partition("- a.py f.<locals>.one\n+ a.py h\n")
    assert names == "a.py\n    h\n    f\n    f.<locals>.one\nb.py\n    g\n"
    assert rest == table(runs["a=2"]) + "\n"


@pytest.mark.slice(0, "long run")
@pytest.mark.timeout(900)
def test_a_step_of_the_quickstart_is_followed(tmp_path: Path) -> None:
    """Its numbers are a report; a step that skipped its rollouts, its checks or its own file would not be followed."""
    command = [sys.executable, "-m", "benchmarks.training.step_footprint", "--json", str(tmp_path / "step.json")]
    done = subprocess.run(command, cwd=PROJECT, env={**os.environ, "PYTHONPATH": str(PROJECT)})
    assert done.returncode == 0
    files = json.loads((tmp_path / "step.json").read_text())
    for file in ("trainer/step.py", "engines/embedded/engine.py", "checks/runner.py"):
        assert file in files, sorted(files)
