"""Loading of user code that YAML files and dotted names refer to: tools, interactions, scorers.

Every fault is a ConfigError that says which file, which entry, what was expected and what was found.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pydantic
import yaml

from agentrl.errors import ConfigError
from agentrl.system.config_files import find_file

Base = type | tuple[type, ...]
"""Class, or several, of which a loaded class must be a subclass."""

SHARED_NAMESPACES = ("tools", "interactions")
"""Top-level folders without `__init__.py`: the package's and a user's of the same name are one namespace package."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of the list in a YAML file. `${yaml_dir}` in its strings is the file's directory."""

    file: Path
    key: str
    index: int
    values: dict[str, Any]

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

    def text(self, key: str) -> str:
        """Return a required, non-empty string. Raises ConfigError."""
        value = self.values.get(key)
        if not isinstance(value, str) or not value:
            raise self.error(f"`{key}` must be a non-empty string, found {value!r}")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """Return a mapping; empty when the key is absent or null. Raises ConfigError."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.error(f"`{key}` must be a mapping, found {type(value).__name__} {value!r}")
        return value or {}

    def load(self, name: str, base: Base | None = None) -> Any:
        """Import the object of a dotted name; with `base`, a subclass of it. Raises ConfigError."""
        try:
            found = import_object(name, base)
        except ConfigError as error:
            raise self.error(str(error)) from error
        return found


def read_entries(path: str | Path, key: str, *, bare: bool = False) -> list[Entry]:
    """Read the entries of a YAML file: a mapping with the one key `key`, a list of mappings; with `bare`, only the
    list.

    A relative path is looked for in the working directory, else in the package's `configs/`. Raises ConfigError: no
    such file, not YAML, a key twice, another shape.
    """
    file = Path(find_file(key, str(path)))
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), Loader=_UniqueKeys)
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
    entries = []
    for index, values in enumerate(content[key]):
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {key}[{index}] must be a mapping, found {values!r}")
        entries.append(Entry(file, key, index, _with_directory(values, str(file.absolute().parent))))
    return entries


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that refuses a key that stands twice in one mapping, where plain YAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _with_directory(value: Any, directory: str) -> Any:
    if isinstance(value, str):
        return value.replace("${yaml_dir}", directory)
    if isinstance(value, dict):
        return {key: _with_directory(item, directory) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_directory(item, directory) for item in value]
    return value


def import_object(name: str, base: Base | None = None) -> Any:
    """Import `my.module.Thing`. Raises ConfigError: what is missing, what is nearest, or what hides it."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"expected a dotted name like `my.module.Name`, found {name!r}")
    module = import_module(module_name)
    found = getattr(module, attribute, None)
    if found is None:
        kind = "class" if base else "attribute"
        candidates = [key for key, value in vars(module).items() if base is None or _is_subclass(value, base)]
        listed = f"; it has {', '.join(sorted(candidates))}" if base and candidates else ""
        raise ConfigError(f"module {module_name!r} has no {kind} {attribute!r}{nearest(attribute, candidates)}{listed}")
    if base is not None and not _is_subclass(found, base):
        # A room exports what is in its `contract`, and users import it from there.
        wanted = " or ".join(f"{one.__module__.removesuffix('.contract')}.{one.__name__}" for one in _each(base))
        raise ConfigError(f"{name} must be a subclass of {wanted}, found {found!r}")
    return found


def import_module(name: str) -> ModuleType:
    """Import a module. Raises ConfigError that tells a missing module from an error inside it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"importing module {name!r} failed: {error}") from error
        raise ConfigError(_why_not_found(name, error.name)) from error
    except Exception as error:
        raise ConfigError(f"importing module {name!r} failed: {type(error).__name__}: {error}") from error


def _why_not_found(name: str, missing: str) -> str:
    top = name.partition(".")[0]
    hiding = getattr(sys.modules.get(top), "__file__", None)
    if top in SHARED_NAMESPACES and hiding is not None:
        return (
            f"module {name!r} not found: {hiding} hides agentrl's own `{top}/`; rename that file "
            f"(a `{top}/` folder without __init__.py adds to ours instead)"
        )
    parent, _, last = missing.rpartition(".")
    paths = getattr(sys.modules.get(parent), "__path__", None) if parent else sys.path
    siblings = [module.name for module in pkgutil.iter_modules(paths)] if paths else []
    hint = nearest(last, siblings)
    return f"module {missing!r} not found{hint} (is it installed, or beside the directory you start from?)"


def _is_subclass(value: object, base: Base) -> bool:
    return isinstance(value, type) and issubclass(value, base) and value not in _each(base)


def _each(base: Base) -> tuple[type, ...]:
    return base if isinstance(base, tuple) else (base,)


def nearest(name: str, known: Iterable[str]) -> str:
    """Format the closest of `known` as `; did you mean 'x'?`; empty where none is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def describe(error: pydantic.ValidationError, known: Iterable[str] = ()) -> str:
    """Format the faults of a pydantic model in one line; an unknown key with the nearest of `known`."""
    faults = []
    for item in error.errors():
        key = ".".join(map(str, item["loc"]))
        if item["type"] == "extra_forbidden":
            faults.append(f"unknown key {key!r}{nearest(key, known)}")
        elif item["type"] == "missing":
            faults.append(f"key {key!r} is missing")
        elif item["type"] == "value_error":  # a validator's own words: it knows what of the value may be shown
            faults.append(f"{key}: {item['ctx']['error']}".removeprefix(": "))
        else:
            faults.append(f"{key}: {item['msg']}, found {item['input']!r}")
    return "; ".join(faults)
