"""Engines by name, and what those over servers may know of one another."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import agentrl.engines.servers
from agentrl.config import RolloutConfig
from agentrl.config.registries import ENGINES


def test_every_name_that_the_config_takes_has_a_builder() -> None:
    assert sorted(get_args(RolloutConfig.model_fields["name"].annotation)) == ENGINES.names()
    assert all(callable(ENGINES.get(name)) for name in ENGINES.names())


def test_what_all_servers_share_knows_no_server_software() -> None:
    files = list(Path(agentrl.engines.servers.__path__[0]).rglob("*.py"))
    assert files and not [file for file in files if "engines.sglang" in file.read_text(encoding="utf-8")]
