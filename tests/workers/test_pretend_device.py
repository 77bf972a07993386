"""Update, critic and embedded engine on a pretend device, which no GPU is needed for: where a GPU refuses to mix
tensors of host and device, or its kernels refuse what they are given, the device refuses it, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.on_pretend_device import CHECKS


@pytest.fixture(scope="module")
def raised(tiny_policy: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.workers.on_pretend_device", str(tiny_policy)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_a_pretend_device(check: str, raised: dict[str, str]) -> None:
    assert check not in raised, raised[check]
