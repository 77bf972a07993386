"""What CI makes of tests that failed: a machine that was busy once is forgiven, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import LISTED, MOST, failures
from tests.conftest import PROJECT

CONFTEST = """
from tests.again import keep_status

def pytest_sessionfinish(session, exitstatus):
    keep_status(session, exitstatus)
"""

# A file that says how often a test has run, since each run is a process of its own.
TESTS = """
from pathlib import Path
import pytest

def runs(name):
    file = Path(__file__).with_name(name)
    file.write_text(file.read_text() + "." if file.exists() else ".")
    return len(file.read_text())

def test_right():
    pass

@pytest.mark.parametrize("case", ["a", "b[c]"])
def test_busy(case):
    assert case == "a" or runs("busy") > 1

def test_wrong():
    assert not FAILS
"""


class Checkout:
    """A repository with tests of its own, and `tests.again` beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # pytest alone starts in a fifth of the time that its plugins take.
        self.environment = {**os.environ, "PYTHONPATH": str(PROJECT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        (folder / "checks").mkdir(parents=True)
        (folder / "tests").mkdir()
        (folder / "checks" / "conftest.py").write_text(CONFTEST)
        self.git("init", "-q")

    def git(self, *words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        subprocess.run(["git", *author, *words], cwd=self.folder, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "-q", "-m", "all")

    def first(self, fails: bool, *words: str) -> int:
        for state in ("busy",):
            (self.folder / "checks" / state).unlink(missing_ok=True)
        (self.folder / "checks" / "test_it.py").write_text(f"FAILS = {fails}\n{TESTS}")
        return self.python("-m", "pytest", "-q", "-o", "cache_dir=cache", *words, "checks").returncode

    def again(self) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "tests.again", "cache")

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *words], cwd=self.folder, env=self.environment, capture_output=True, text=True
        )


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.mark.parametrize("words", [[], ["-p", "xdist", "-n", "2"]], ids=["one process", "two processes"])
def test_passes_alone_once_and_never_again(checkout: Checkout, words: list[str]) -> None:
    assert checkout.first(False, *words) == 1
    done = checkout.again()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed alone: 1\n  checks/test_it.py::test_busy[b[c]]\n" in done.stdout
    assert (checkout.folder / LISTED).read_text() == "checks/test_it.py::test_busy\n"

    # The list counts from the commit on that holds it.
    assert checkout.first(False) == 1
    assert checkout.again().returncode == 0
    checkout.commit()
    assert checkout.first(False) == 1
    done = checkout.again()
    assert done.returncode == 1
    assert "passed alone: 0\n" in done.stdout
    assert "test_busy[b[c]]: passed alone in an earlier run" in done.stdout
    assert "failed: 1\n" in done.stdout


def test_fails_where_it_fails_twice(checkout: Checkout) -> None:
    assert checkout.first(True) == 1
    done = checkout.again()
    assert done.returncode == 1
    assert "passed alone: 1\n  checks/test_it.py::test_busy[b[c]]\n" in done.stdout
    assert "failed: 1\n  checks/test_it.py::test_wrong\n" in done.stdout


def test_a_run_without_failures_is_not_run_again(checkout: Checkout) -> None:
    assert checkout.first(False, "-k", "right") == 0
    done = checkout.again()
    assert (done.returncode, done.stdout) == (0, "")


def test_many_failures_are_no_busy_machine(checkout: Checkout) -> None:
    (checkout.folder / "checks" / "test_many.py").write_text(
        f"import pytest\n@pytest.mark.parametrize('n', range({MOST + 1}))\ndef test_wrong(n):\n    assert False\n"
    )
    assert checkout.first(False, "-k", "wrong") == 1
    done = checkout.again()
    assert done.returncode == 1
    assert f"{MOST + 1} tests failed, more than" in done.stdout
    assert "once more, alone" not in done.stdout


@pytest.mark.parametrize("words", [["-k", "no such test"], ["--no-such-option"]])
def test_a_run_that_did_not_end_by_its_tests_has_failed(checkout: Checkout, words: list[str]) -> None:
    assert checkout.first(False, *words) not in (0, 1)
    done = checkout.again()
    assert done.returncode == 1
    assert "pytest did not run to its end" in done.stderr


def test_processes_that_collect_different_tests_have_failed(checkout: Checkout) -> None:
    (checkout.folder / "checks" / "test_drawn.py").write_text(
        "import os\nimport pytest\n@pytest.mark.parametrize('n', [os.getpid()])\ndef test_it(n):\n    pass\n"
    )
    assert checkout.first(False, "-p", "xdist", "-n", "2") == 1
    done = checkout.again()
    assert done.returncode == 1
    assert "failed before its tests" in done.stderr
    assert "once more, alone" not in done.stdout


def test_a_run_that_left_nothing_has_failed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="did not run to its end"):
        failures(tmp_path)


def test_each_listed_name_is_a_tests() -> None:
    for name in (PROJECT / LISTED).read_text(encoding="utf-8").split():
        file, _, test = name.partition("::")
        assert f"def {test.rpartition('::')[2]}(" in (PROJECT / file).read_text(encoding="utf-8"), name
