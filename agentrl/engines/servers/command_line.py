"""Arguments of a server as words of its command line."""

from __future__ import annotations

import json
from collections.abc import Mapping

from agentrl.system.json_value import JSON


def words(name: str, value: JSON) -> list[str]:
    """Write an argument as words of a command line."""
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, Mapping):
        return [flag, json.dumps(dict(value))]
    if isinstance(value, list | tuple):
        return [flag, *(str(item) for item in value)]
    if isinstance(value, str) and value.startswith("-"):
        return [f"{flag}={value}"]  # else it is read as another argument
    return [flag, str(value)]
