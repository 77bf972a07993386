"""The accounts of `make test-all`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
BURNS = "import time\nwhile time.process_time() < 1: pass"
PROGRAM = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {BURNS!r}], start_new_session=True)
"""
RUN = """
import json, sys
from pathlib import Path
from tests import whole
whole.RESULTS = Path(sys.argv[1])
result = whole.run(whole.Part("some", [sys.executable, "-c", sys.argv[2]], False), "tree", "commit")
print(json.dumps(result.cpu_seconds))
"""


def test_the_cpu_time_of_processes_that_outlive_their_parent_counts(tmp_path: Path) -> None:
    """A daemon keeps its output open, as Ray's do: the part ends with it."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), PROGRAM], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) >= 1
