"""The coding programs that tests run: `make setup-programs`, or the folder that AGENTRL_PROGRAMS names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PROGRAMS = Path(os.environ.get("AGENTRL_PROGRAMS", Path(__file__).resolve().parents[1] / ".programs")) / "bin"


def program(name: str) -> Path:
    """Return a program's executable, or skip the test."""
    if not (PROGRAMS / name).exists():
        pytest.skip(f"{PROGRAMS / name} is not there: make setup-programs")
    return PROGRAMS / name
