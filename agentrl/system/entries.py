"""Entries of the YAML files that name user code (tools, interactions, agent loops), and that code by its name.

Every fault is a ConfigError that names the file, the entry, the expected and the found value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from agentrl.errors import ConfigError
from agentrl.system.bounded_yaml import load_yaml
from agentrl.system.config_files import find_file
from agentrl.system.json_value import map_texts
from agentrl.system.plugin import Base, adapted, check_base, import_object, nearest, with_present_keys
from agentrl.system.targets import is_target, load_target
from agentrl.system.texts import read_text


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of the list in a YAML file. `${yaml_dir}` in its strings is the file's directory."""

    file: Path
    key: str
    index: int
    values: dict[str, object]

    @property
    def where(self) -> str:
        """File, key and index of the entry, with its name: how messages refer to it."""
        named = next((self.values[key] for key in ("name", "class_name", "function") if key in self.values), None)
        return f"{self.file}: {self.key}[{self.index}]" + (f" ({named})" if named is not None else "")

    def error(self, message: str) -> ConfigError:
        """Make a ConfigError whose message begins with the entry's place."""
        return ConfigError(f"{self.where}: {message}")

    def check_keys(self, known: Iterable[str]) -> None:
        """Raise ConfigError naming the first unknown key and the nearest known one."""
        known = list(known)
        for key in self.values:
            if key not in known:
                raise self.error(f"unknown key {key!r}{nearest(str(key), known)}; known keys are {', '.join(known)}")

    def renamed(self, names: Mapping[str, str]) -> Entry:
        """Return the entry under present names of its keys and its config's, by earlier ones. Raises ConfigError."""
        try:
            values = with_present_keys(self.values, names)
            if isinstance(config := values.get("config"), dict):
                values["config"] = with_present_keys(config, names)
        except ConfigError as error:
            raise self.error(str(error)) from error
        return replace(self, values=values)

    def text(self, key: str) -> str:
        """Return a required, non-empty string. Raises ConfigError."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(f"`{key}` must be a non-empty string, found {value!r}")
        return value

    def mapping(self, key: str) -> dict[str, object]:
        """Return a mapping; empty when the key is absent or null. Raises ConfigError."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"`{key}` must be a mapping, found {type(value).__name__} {value!r}")
        return value or {}

    def load(self, name: str, base: Base | None = None) -> Any:
        """Load the object of a dotted name or a target; with `base`, a subclass of it. Raises ConfigError."""
        return load_object(name, self.where, base)


def read_entries(path: str | Path, key: str, *, bare: bool = False) -> list[Entry]:
    """Read the entries of a YAML file: a mapping with the one key `key`, a list of mappings; with `bare`, only the
    list.

    A relative path is searched in the working directory, else in the package's `configs/`. Raises ConfigError: no such
    file, not YAML, a key twice, another shape.
    """
    file = Path(find_file(key, str(path)))
    try:
        content = load_yaml(read_text(file), _UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    if bare:
        if not isinstance(content, list):
            raise ConfigError(f"{file}: expected a list (lines that start with `-`), found {type(content).__name__}")
        content = {key: content}
    if not isinstance(content, dict) or key not in content:
        found = f"the keys {', '.join(map(repr, content))}" if isinstance(content, dict) else type(content).__name__
        raise ConfigError(f"{file}: expected a mapping with the key `{key}`, found {found}")
    if len(content) > 1:
        others = ", ".join(repr(name) for name in content if name != key)
        raise ConfigError(f"{file}: unknown key {others}; the only key is `{key}`")
    if not isinstance(content[key], list):
        raise ConfigError(f"{file}: `{key}` must be a list (lines that start with `-`), found {content[key]!r}")
    entries, folder = [], str(file.absolute().parent)
    for index, values in enumerate(content[key]):
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {key}[{index}] must be a mapping, found {values!r}")
        entries.append(Entry(file, key, index, map_texts(values, lambda text: text.replace("${yaml_dir}", folder))))
    return entries


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses a repeated key in one mapping, where plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_object(name: str, key: str, base: Base | None = None) -> Any:
    """The object of a dotted name or a target; with `base`, a subclass of it.

    Raises ConfigError that begins with `key`, the key or entry that holds the name.
    """
    found = adapted(load_target(name, key)) if is_target(name) else None
    try:
        if found is None:
            return import_object(name, base)
        check_base(name, found, base)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return found
