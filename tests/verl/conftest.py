"""Fixtures of loops and of small runs, and a folder with the files of verl's users."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent_loop.conftest import bench, chat, no_loop_outlives_its_test, tiny_dir
from tests.verl import users

__all__ = ["bench", "chat", "no_loop_outlives_its_test", "tiny_dir"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    users.write(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in users.FILES:
        sys.modules.pop(name, None)
