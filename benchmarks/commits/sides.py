"""Checkouts of two commits, and commands that run in one of them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec

from agentrl.system.json_value import JSON

P = ParamSpec("P")
TREE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two commits."""

    name: str
    """`old` or `new`."""
    tree: Path
    """Its checkout."""
    results: Path
    """Folder of its results, which outlives the checkout."""
    python: str
    sglang_python: str | None
    """Interpreter of the environment with SGLang; None where there is none."""
    assets: Path
    """Policy, data and scorer, made once for both sides."""

    def environment(self) -> dict[str, str]:
        """Make the environment of its processes: its own code first, one thread, a fixed order of sets."""
        fixed = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1"}
        return {**os.environ, **fixed, "PYTHONPATH": str(self.tree)}

    def run(self, words: Sequence[object], folder: Path, python: str | None = None, limit: float = 3600) -> Path:
        """Run `python WORDS` in `folder` and return the file of its output.

        Raises RuntimeError with the output's end where it fails or takes longer than `limit` seconds.
        """
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "output.log"
        said = [str(word) for word in words]
        with log.open("w", encoding="utf-8") as out:
            try:
                done = subprocess.run(
                    [python or self.python, *said],
                    cwd=folder,
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    timeout=limit,
                )
                status = str(done.returncode)
            except subprocess.TimeoutExpired:
                status = f"ended after {limit:g} s"
        if status != "0":
            tail = log.read_text(encoding="utf-8", errors="replace")[-1500:]
            raise RuntimeError(f"{self.name}: {' '.join(said)[:300]}: {status}\n{tail}")
        return log

    def kept(self, name: str, make: Callable[P, JSON], *given: P.args, **named: P.kwargs) -> JSON:
        """Read a result, or make it of what is given and keep it."""
        file = self.results / f"{name}.json"
        if not file.exists():
            found = make(*given, **named)
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(".partial")
            partial.write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
            partial.rename(file)
        read: JSON = json.loads(file.read_text(encoding="utf-8"))
        return read


def commit_hash(commit: str) -> str:
    """Find a commit's hash. Raises SystemExit for one that there is not."""
    words = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    found = subprocess.run(words, cwd=TREE, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"{commit}: not a commit of {TREE}")
    return found.stdout.strip()


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit of this repository out into a folder. Raises SystemExit for a name without a commit."""
    made = subprocess.run(
        ["git", "worktree", "add", "--detach", str(folder), commit], cwd=TREE, capture_output=True, text=True
    )
    if made.returncode:
        raise SystemExit(f"{commit}: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=TREE, check=True)


@contextmanager
def both(
    commits: Sequence[str], out: Path, trees: Path, python: str, sglang_python: str | None
) -> Iterator[tuple[Side, Side]]:
    """Check both commits out below `trees`; results of each are below `out`, by role and hash."""
    old, new = (commit_hash(commit) for commit in commits)
    with checked_out(old, trees / "old") as old_tree, checked_out(new, trees / "new") as new_tree:
        sides = [
            Side(name, tree, out / f"{name}-{found[:12]}", python, sglang_python, out / "assets")
            for name, tree, found in (("old", old_tree, old), ("new", new_tree, new))
        ]
        yield sides[0], sides[1]
