"""Entry points: objects that an annex of agentrl, or another distribution, brings for the core to find by name.

An annex lists its own in `entry_points.txt` in its folder, in the format of installed distributions. So a checkout on
PYTHONPATH has them without an installation, and the core names no annex: without the folder the names are gone.
"""

from __future__ import annotations

import configparser
from collections import defaultdict
from functools import cache
from importlib import metadata

from agentrl.errors import ConfigError
from agentrl.system.config_files import PACKAGE

GROUP = "agentrl."
"""The beginning of each group's name."""


@cache
def of_annexes(group: str) -> dict[str, str]:
    """Map the names of a group that annexes bring to their `module:object`."""
    found: dict[str, str] = {}
    for file in sorted(PACKAGE.glob("*/entry_points.txt")):
        lines = configparser.ConfigParser(delimiters="=", interpolation=None)
        lines.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
        lines.read_string(file.read_text(encoding="utf-8"))
        found |= dict(lines[GROUP + group]) if lines.has_section(GROUP + group) else {}
    return found


@cache
def of_distributions(group: str) -> dict[str, str]:
    """Map the names of a group that installed distributions bring to their `module:object`.

    Raises ConfigError for a name that two of them bring, or that an annex has.
    """
    owners: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for entry in metadata.entry_points(group=GROUP + group):
        owners[entry.name].add((entry.dist.name if entry.dist is not None else "?", entry.value))
    for name, found in owners.items():
        if len(found) > 1 or name in of_annexes(group):
            named = " and ".join(f"{value} of {owner}" for owner, value in sorted(found))
            own = of_annexes(group).get(name)
            raise ConfigError(
                f"entry point {GROUP}{group}: {name} is brought more than once, by {named}"
                + (f", and is {own} of agentrl" if own else "")
                + ": uninstall one of the distributions"
            )
    return {name: next(iter(found))[1] for name, found in owners.items()}


def parts(group: str) -> dict[str, str]:
    """Map all names of a group to their `module:object`."""
    return {**of_annexes(group), **of_distributions(group)}
