"""Engines by name, and what those over servers may know of one another."""

from __future__ import annotations

from pathlib import Path

import agentrl.engines.servers
from agentrl.config.registries import ENGINES


def test_every_named_engine_has_a_builder() -> None:
    assert {"embedded", "sglang"} <= set(ENGINES.names())
    assert all(callable(ENGINES.get(name)) for name in ENGINES.names())


def test_what_all_servers_share_knows_no_server_software() -> None:
    files = list(Path(agentrl.engines.servers.__path__[0]).rglob("*.py"))
    assert files and not [file for file in files if "engines.sglang" in file.read_text(encoding="utf-8")]
