"""Fixtures of loops and of small runs, and a folder with the files of verl's users."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent_loop.conftest import bench, chat, no_loop_outlives_its_test, tiny_dir
from tests.e2e.conftest import data_dir, policy_dir, reward_file, small_run
from tests.verl import users

__all__ = [
    "bench",
    "chat",
    "data_dir",
    "no_loop_outlives_its_test",
    "policy_dir",
    "reward_file",
    "small_run",
    "tiny_dir",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    users.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in users.FILES:
        sys.modules.pop(name, None)
