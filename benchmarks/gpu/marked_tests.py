"""The tests that need a GPU (marked `gpu`), in the files where they are; each is a row."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from benchmarks.gpu.part import row, setting

TESTS = Path(__file__).resolve().parents[2] / "tests"
WORDS = ("pytest.mark.gpu", "tests.devices import DEVICES")
"""Words of a file with such a test: the mark, or the list of devices whose second entry has it."""
TIMEOUT = 100
"""Seconds of one test: the first one compiles."""


def files() -> list[Path]:
    """Files that hold a test with the mark; the tests of SGLang need it installed, and run by `make test-sglang`."""
    found = [file for file in sorted(TESTS.rglob("test_*.py")) if "sglang" not in file.parts]
    return [file for file in found if any(word in file.read_text(encoding="utf-8") for word in WORDS)]


def outcome(line: str) -> tuple[str, str] | None:
    """(test, outcome) of a line of `pytest -v`."""
    found = re.match(r"(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", line)
    return None if found is None else (found[1], found[2].lower())


def main() -> None:
    setting(__doc__)
    names = [str(file.relative_to(TESTS.parent)) for file in files()]
    options = ["-m", "gpu", "-v", "--tb=short", "-p", "no:cacheprovider", f"--timeout={TIMEOUT}"]
    words = [sys.executable, "-m", "pytest", *options, *names]
    counts: Counter[str] = Counter()
    with subprocess.Popen(words, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            if (found := outcome(line)) is not None:
                counts[found[1]] += 1
                row(found[0], outcome=found[1])
    row("all", outcome=", ".join(f"{count} {name}" for name, count in counts.items()) or "none ran", files=len(names))
    nothing = 5  # what pytest ends with where every test was left out
    if running.returncode not in (0, nothing) or (running.returncode == nothing and counts):
        sys.exit(f"pytest ended with status {running.returncode}")


if __name__ == "__main__":
    main()
