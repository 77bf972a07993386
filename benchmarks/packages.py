"""Files and environments of the package index that tests and benchmarks need: fetched once, and kept in a folder."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

INDEX = "https://pypi.org/simple"
TIMEOUT = 60.0
"""Seconds of silence of the index."""


def install(requirements: Sequence[str], folder: Path) -> Path:
    """Return the folder below `folder` that holds the packages and what they need, for PYTHONPATH.

    Ends the program where pip cannot install them.
    """
    parts = [*sorted(requirements), sys.version]
    target = folder / f"packages-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"
    done = target / "done"
    if not done.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target), "--upgrade"]
        if subprocess.run([*pip, *requirements]).returncode:
            sys.exit(f"error: pip could not install {' '.join(requirements)} into {target}")
        done.touch()
    return target


def fetch(name: str, file: str, sha256: str, folder: Path) -> Path:
    """Return one file of the package `name`, as the index has it. An sdist is not built: pip would build it.

    Ends the program where the index cannot be reached, or the file is another.
    """
    path = folder / file
    if not path.exists():
        _download(name, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        sys.exit(f"error: {path}: expected the SHA-256 {sha256}, found {found}; delete the file and try again")
    return path


def _download(name: str, path: Path) -> None:
    asked = urllib.request.Request(f"{INDEX}/{name}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(asked, timeout=TIMEOUT) as answer:
            files = json.load(answer)["files"]
        (url,) = [file["url"] for file in files if file["filename"] == path.name]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, partial.open("wb") as out:
            while part := answer.read(1 << 20):
                out.write(part)
        partial.replace(path)
    except (OSError, ValueError, KeyError) as fault:
        sys.exit(f"error: {path.name} could not be fetched from {INDEX} ({fault}); put it into {path.parent}")
