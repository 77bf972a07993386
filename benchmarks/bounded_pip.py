"""pip for the environments and folders that benchmarks make: an index that cannot be reached costs seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RETRIES, TIMEOUT = 1, 15.0
"""Retries of each request to an index, and its timeout in seconds of silence."""


def pip(*words: str, python: str | Path = sys.executable, retries: int = RETRIES, timeout: float = TIMEOUT) -> None:
    """Run `pip words...` of `python`; ends the program with what to do where pip fails."""
    bounds = ["--disable-pip-version-check", "--retries", str(retries), "--timeout", str(timeout)]
    done = subprocess.run([str(python), "-m", "pip", *bounds, *words])
    if done.returncode != 0:
        sys.exit(
            f"error: pip {' '.join(words)} failed, see above. Where no package index can be reached: PIP_INDEX_URL=... "
            "names another, PIP_FIND_LINKS=folder a folder of wheels"
        )
