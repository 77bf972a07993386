"""A user's file that has the name of agentrl's package, next to the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import PROJECT
from tests.naming import assert_names


def test_the_command_of_the_page_works_next_to_a_file_that_hides_it(tmp_path: Path) -> None:
    (tmp_path / "data_prep.py").write_text("mine = True\n")
    words = ["-P", "-m", "data_prep.gsm8k", "--help"]
    assert f"python {' '.join(words)}" in (PROJECT / "docs" / "troubleshooting.md").read_text()

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    hidden = run(words[1:])
    assert_names(hidden.stderr, "__path__", "'data_prep'")
    assert hidden.returncode == 1
    found = run(words)
    assert found.returncode == 0 and "--source" in found.stdout
