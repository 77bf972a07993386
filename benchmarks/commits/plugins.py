"""OLD's docs/extending.md on NEW's package: the page's parts are written as they stand, and its tests run them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from agentrl.system.json_value import JSON
from benchmarks.commits.sides import Side

PAGE = "docs/extending.md"
TEST = "tests/e2e/test_extending.py"
ROOMS = ("agentrl", "configs", "data_prep", "interactions", "sandbox", "tools")
"""Folders of the project that a user's files import or name."""


def run(old: Side, new: Side) -> JSON:
    """Lay OLD's page and tests over NEW's package, and run them. Raises RuntimeError where one fails."""
    folder = new.results / "plugins"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ROOMS:
        shutil.copytree(new.tree / name, folder / name)
    for name in ("tests", "docs", "benchmarks", "labs", "examples"):
        if (old.tree / name).exists():  # commits of November 2026 have no labs
            shutil.copytree(old.tree / name, folder / name)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(old.tree / name, folder / name)
    mixed = Side(new.name, folder, new.results, new.python, None, new.assets)
    words = ["-m", "pytest", TEST, "--whole", "-q", "-pno:cacheprovider", f"--rootdir={folder}"]
    log = mixed.run(words, folder)
    return log.read_text(encoding="utf-8").strip().splitlines()[-1]


def check(old: Side, new: Side) -> Iterator[str]:
    """Run the page of each side's OLD on NEW."""
    try:
        said = new.kept(f"plugins-{old.results.name}", run, old, new)
    except RuntimeError as error:
        yield str(error)
    else:
        print(f"  {said}", flush=True)
