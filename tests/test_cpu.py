"""CPU-seconds of tests: each is counted where it runs, and sums are by folder and by file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cpu import table

PROJECT = Path(__file__).resolve().parent.parent
BUSY = """
import time

def test_busy():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass

def test_asleep():
    time.sleep(1)
"""
PLUGIN = """
from tests.cpu import CPUTable

def pytest_configure(config):
    config.pluginmanager.register(CPUTable())
"""


def test_what_a_test_computes_is_counted_and_what_it_waits_is_not(tmp_path: Path) -> None:
    """In another process, too."""
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_busy.py").write_text(BUSY)
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "-n", "1"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    (seconds,) = (line.split()[0] for line in done.stdout.splitlines() if line.endswith(" all"))
    assert 0.3 <= float(seconds) < 1, done.stdout


def test_sums_are_by_folder_and_by_file() -> None:
    found = table({"tests/a/test_x.py": 2.0, "tests/a/b/test_y.py": 1.5, "tests/test_z.py": 3.0})
    sums = [line.split() for line in found]
    assert sums[:4] == [["6.5", "all"], ["3.5", "tests/a"], ["3.0", "tests/test_z.py"], []]
    assert sums[4:] == [["3.0", "tests/test_z.py"], ["2.0", "tests/a/test_x.py"], ["1.5", "tests/a/b/test_y.py"]]
