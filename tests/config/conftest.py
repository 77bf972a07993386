"""Where SGLang is installed, and where it is not, whatever this machine has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def sglang_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name can be found; imported, it would fail."""
    package = tmp_path / "site-packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('SGLang was imported')\n")
    monkeypatch.syspath_prepend(str(package.parent))


@pytest.fixture
def sglang_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in sys.modules is how Python itself marks a module that is not to be found."""
    monkeypatch.setitem(sys.modules, "sglang", None)
