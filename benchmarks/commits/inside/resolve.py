"""Resolves launch commands by a checkout's own code: `resolve.py TREE COMMANDS OUT`.

Writes each command's config, or its refusal's text, with what was logged. Imports nothing of benchmarks.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

TREE, COMMANDS, OUT = (Path(word) for word in sys.argv[1:4])
HOMES = ("agentrl.config", "agentrl.config.sections.offline")


class Told(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(record.getMessage())


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Name the leaves of nested mappings by dotted keys."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    return {key: leaf for name, one in value.items() for key, leaf in flat(one, f"{prefix}.{name}".lstrip(".")).items()}


def answer(command: dict[str, Any], told: Told) -> dict[str, Any]:
    """Resolve one command."""
    from agentrl.config import config_to_dict, load_config

    schemas = (getattr(importlib.import_module(home), command["schema"], None) for home in HOMES)
    schema = next((one for one in schemas if one is not None), None)
    told.lines.clear()
    os.chdir(command["folder"])
    try:
        config = load_config(command["argv"], command["name"], schema)  # type: ignore[arg-type]
        said: dict[str, Any] = flat(json.loads(json.dumps(config_to_dict(config), default=str)))
    except Exception as error:
        said = {"refused": f"{type(error).__name__}: {error}"}
    return {**said, "told": list(told.lines)}


def main() -> None:
    """Resolve all and write the answers."""
    fake = OUT.parent / "packages"
    (fake / "sglang").mkdir(parents=True, exist_ok=True)
    (fake / "sglang" / "__init__.py").touch()
    sys.path.append(str(fake))  # found, as where the servers are installed
    told = Told()
    logging.getLogger("agentrl").addHandler(told)
    logging.getLogger("agentrl").setLevel(logging.INFO)
    commands = json.loads(COMMANDS.read_text().replace("{tree}", str(TREE)))
    answers = [answer(command, told) for command in commands]
    OUT.write_text(json.dumps(answers, indent=1).replace(str(TREE), "{tree}"))


main()
