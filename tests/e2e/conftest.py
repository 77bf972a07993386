"""Whole runs of the commands, with a policy and data small enough for seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import forked

PROJECT = Path(__file__).resolve().parents[2]


def command(arguments: list[str], cwd: Path, timeout: float = 170) -> subprocess.CompletedProcess[str]:
    """`python -m agentrl.train ...` in its own process, away from the checkout."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.run(
        [sys.executable, "-m", "agentrl.train", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def forked_command(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same in a forked process, which begins at once."""
    return forked(["-m", "agentrl.train", *arguments], cwd)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for two checkpoints and not for three."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)
