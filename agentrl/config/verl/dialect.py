"""verl's dialect: a YAML file that says `dialect: verl` is written in verl's keys, and has verl's defaults.

`dialect: verl-0.2` is that of verl's first releases: the same keys, of which their code made something else.
"""

from __future__ import annotations

from collections.abc import Collection

from agentrl.config.checks import check_rules
from agentrl.config.keys import defaults, flatten, leaf_keys
from agentrl.config.rules import shown
from agentrl.config.section import Section
from agentrl.system.json_value import JSON


def idle_keys(config: Section, given: Collection[str]) -> dict[str, str]:
    """Find the given keys that have no effect with the others: each as `key=value`."""
    faults = (fault.partition(" has no effect") for fault in check_rules(config, given))
    return {told.partition("=")[0]: told for told, has_none, _ in faults if has_none}


def without_effect(config: Section, typed: Collection[str]) -> list[str]:
    """Write one note for the keys of a command that have no effect in it, which verl allows."""
    found = idle_keys(config, typed).values()
    return [f"without effect in this command: {', '.join(found)}"] if found else []


def differing(config: Section) -> dict[str, tuple[JSON, JSON]]:
    """Find the keys that are not at their defaults: (value, default) of each."""
    leaves = leaf_keys(type(config))
    default = flatten(defaults(type(config)), leaves)
    values = flatten(config.model_dump(mode="json"), leaves)
    return {key: (value, default[key]) for key, value in values.items() if value != default[key]}


def differences(config: Section, typed: Collection[str]) -> list[str]:
    """Write one note for the values that are not agentrl's defaults, and that the command does not say."""
    found = [
        f"{key}={shown(value)} ({shown(default)})"
        for key, (value, default) in differing(config).items()
        if key not in typed
    ]
    return [f"verl's defaults hold, agentrl's in parentheses: {', '.join(found)}"] if found else []
