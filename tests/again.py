"""Tests that failed in `.ci/run`, each once more and alone: a busy machine is told from a defect, but only once.

    python -m tests.again CACHE

`CACHE` is the `cache_dir` of the pytest run before. Exits with 0 where every test that failed there passes now. Such a
test depends on the machine, so its name is added to `tests/passed_alone.txt`, to be committed. A test whose name is
in the committed list already is not run again: it has to be mended, and its line removed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
LISTED = Path("tests") / "passed_alone.txt"
MOST = 10
"""Failures in one run that a busy machine may explain."""
STATUS = "agentrl/status"
"""Key of pytest's cache: the exit status of the run."""


def keep_status(session: pytest.Session, status: int) -> None:
    """Write the run's exit status into pytest's cache, from the process that has all results."""
    cache = getattr(session.config, "cache", None)  # absent with -p no:cacheprovider
    if cache is not None and not hasattr(session.config, "workerinput"):
        cache.set(STATUS, int(status))


def failures(cache: Path) -> list[str]:
    """Node ids of the tests that failed. Raises SystemExit where the run ended otherwise than by its tests."""

    def value(key: str) -> object:
        file = cache / "v" / key
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    status, failed = value(STATUS), value("cache/lastfailed")
    if status == 0:
        return []
    if status != 1 or not isinstance(failed, dict) or not failed:
        raise SystemExit(f"{cache}: pytest did not run to its end (exit status {status}): no test is run once more")
    nameless = sorted(node for node in failed if not node.partition("::")[0].endswith(".py"))
    if nameless:  # a worker of pytest-xdist that collected other tests than the first one
        raise SystemExit(f"{cache}: {nameless[0]} failed before its tests (pytest says why): no test is run once more")
    return sorted(failed)


def without_parameters(node: str) -> str:
    """The name by which a test is listed: `tests/a/test_b.py::test_c`, whatever the case."""
    return node.partition("[")[0]


def committed(project: Path) -> set[str]:
    """Names in the list as the last commit has it; none where that commit has no list."""
    shown = subprocess.run(["git", "show", f"HEAD:{LISTED}"], cwd=project, capture_output=True, text=True)
    return set(shown.stdout.split()) if shown.returncode == 0 else set()


def run_again(failed: Sequence[str], project: Path) -> int:
    """Run each test in a process of its own, and add the names of those that pass to the list.

    Returns the exit status: 0 only where all passed and none had been listed before.
    """
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed, more than the {MOST} that are run once more")
        return 1
    before = committed(project)
    passed, again = list[str](), list[str]()
    for node in failed:
        if without_parameters(node) in before:
            print(f"{node}: passed alone in an earlier run, and is in {LISTED}: mend it and remove its line")
            again.append(node)
            continue
        print(f"=== once more, alone: {node}", flush=True)
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node], cwd=project)
        (again if done.returncode else passed).append(node)
    if passed:
        file = project / LISTED
        names = set(file.read_text(encoding="utf-8").split()) if file.exists() else set()
        new = {without_parameters(node) for node in passed} - names
        file.write_text("".join(f"{name}\n" for name in sorted(names | new)), encoding="utf-8")
    print(f"passed alone: {len(passed)}")
    for node in passed:
        print(f"  {node}")
    if passed:
        print(f"their names belong into {LISTED}: commit it")
    if again:
        print(f"failed: {len(again)}")
        for node in again:
            print(f"  {node}")
    return 1 if again else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.again", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cache", type=Path, metavar="CACHE")
    failed = failures(parser.parse_args().cache)
    return run_again(failed, Path.cwd()) if failed else 0


if __name__ == "__main__":
    sys.exit(main())
