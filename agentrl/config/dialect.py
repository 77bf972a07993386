"""Dialects: how other trainers write configs, read as ours.

The registry of dialects is text, and no module of a dialect is imported before a config says `dialect: NAME`, has a key
that is not ours, or names a class of the dialect's trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from agentrl.config.registries import DIALECTS
from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.system.entries import Entry
from agentrl.system.json_value import JSON
from agentrl.system.parts import parts

DIALECT = "dialect"
"""The key by which a YAML file names the dialect of all its keys."""


@dataclass(slots=True)
class Reading:
    """Keys of a config as a dialect reads them."""

    values: dict[str, JSON] = field(default_factory=dict)
    """Values of our keys, by dotted path."""
    faults: list[str] = field(default_factory=list)
    """Messages about keys and values that are refused."""
    strangers: list[str] = field(default_factory=list)
    """Keys that the dialect does not know."""
    said: list[str] = field(default_factory=list)
    """Lines that are logged at once, also where the config is wrong."""

    def notes(self, config: Section, typed: Collection[str]) -> list[str]:
        """Write the lines that are logged once the config is right; `typed`: the keys of the command line."""
        return []


@dataclass(frozen=True, slots=True)
class Dialect:
    """Another trainer's way to write configs, as functions; functions that its trainer has no use for are left out."""

    whole: Callable[[Mapping[str, JSON], type[Section]], Reading] | None = None
    """Reads a whole config that says `dialect: NAME`, by its values (interpolations resolved) and the schema."""
    spelled: Callable[[Mapping[str, JSON], Mapping[str, JSON], type[Section]], Reading] = (
        lambda unknown, values, schema: Reading(strangers=list(unknown))
    )
    """Reads the keys of a config in our own words that are not ours, by them, all values that are, and the schema."""
    entry: Callable[[Entry], Entry] = lambda entry: entry
    """Puts a class of ours in the place of the trainer's in an entry of a YAML file of tools, interactions or loops.
    Raises ConfigError for a class without a replacement."""
    advice: Callable[[str], str] = lambda name: ""
    """Writes advice about one of the trainer's YAML files, or choices GROUP@PACKAGE, that is not here."""
    lent: Callable[[], Mapping[str, JSON]] = lambda: {}
    """Reads defaults of the trainer, by dotted path, that are no part of a config and that its interpolations may
    name."""


def dialect_of(name: str) -> Dialect:
    """Find the dialect of a name or target. Raises ConfigError with the known names."""
    found = DIALECTS.get(name)
    if not isinstance(found, Dialect):
        raise ConfigError(f"{DIALECT}={name}: expected a Dialect of agentrl.config.dialect, found {found!r:.200}")
    return found


def all_dialects() -> list[Dialect]:
    """List every dialect that has a name, each once."""
    return list(dict.fromkeys(dialect_of(name) for name in DIALECTS.names()))


def advice(name: str) -> str:
    """Write the advice of dialects about a YAML file, or a choice GROUP@PACKAGE, that is not here."""
    return "".join(dialect.advice(name) for dialect in all_dialects())


def translated(entry: Entry) -> Entry:
    """Return an entry of tools, interactions or loops with our class in the place of another trainer's."""
    name = entry.values.get("_target_" if "_target_" in entry.values else "class_name")
    package = name.partition(".")[0] if isinstance(name, str) else ""
    dialect = parts("packages").get(package, package)
    return dialect_of(dialect).entry(entry) if dialect in DIALECTS.names() else entry
