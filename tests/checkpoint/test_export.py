"""The exported policy, where a fault is injected: a rank that writes on another machine's disk."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.checkpoint.export import export_policy
from agentrl.errors import CheckpointError
from agentrl.observe.open import open_display
from tests.naming import naming


def test_a_policy_that_was_written_elsewhere_takes_the_place_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.checkpoint.state.SEEN_WITHIN", 0.0)
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("older")
    chat: Any = SimpleNamespace(tokenizer=None, vision=None)
    with (
        open_display("test") as display,
        naming(CheckpointError, "config.json"),
    ):
        export_policy(lambda dir, tokenizer: None, chat, 3, folder, None, display)
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("config.json", "older")]
