"""Import of user code by dotted names, and messages about wrong names and values."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TypeVar

import pydantic

from agentrl.errors import ConfigError
from agentrl.system.registrations import loading

MadeT = TypeVar("MadeT")
ValueT = TypeVar("ValueT")
Base = type | tuple[type, ...]
"""Class that a loaded class must be a subclass of; or a tuple of such classes."""

SHARED_NAMESPACES = ("tools", "interactions")
"""Top-level folders without `__init__.py`: the package's and a user's of the same name are one namespace package."""
OTHER_PACKAGES = ("data_prep", "sandbox")
"""Further top-level packages of agentrl, which a user's of the same name hides."""


def import_object(name: str, base: Base | None = None) -> object:
    """Import `my.module.Thing`. Raises ConfigError with the missing part, the nearest name, or the hiding module."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"expected a dotted name like `my.module.Name`, or path/to/file.py:Name, found {name!r}")
    module = import_module(module_name)
    found: object = getattr(module, attribute, None)
    if found is None:
        kind = "class" if base else "attribute"
        candidates = [key for key, value in vars(module).items() if base is None or _is_subclass(value, base)]
        listed = f"; it has {', '.join(sorted(candidates))}" if base and candidates else ""
        raise ConfigError(f"module {module_name!r} has no {kind} {attribute!r}{nearest(attribute, candidates)}{listed}")
    found = adapted(found)
    check_base(name, found, base)
    return found


def check_base(name: str, found: object, base: Base | None) -> None:
    """Raise ConfigError where `found`, the object that `name` names, is no subclass of `base`, if there is one."""
    if base is not None and not _is_subclass(found, base):
        # A room exports the names in its `contract`, and users import them from there.
        wanted = " or ".join(f"{one.__module__.removesuffix('.contract')}.{one.__name__}" for one in _each(base))
        raise ConfigError(f"{name} must be a subclass of {wanted}, found {found!r:.200}")


def adapted(found: object) -> object:
    """Return the adapter of `found` under this package's contracts: mostly `found` itself.

    A class that is written for another contract has a classmethod `adapted_class`, which returns the class that does.
    """
    make = getattr(found, "adapted_class", None)
    return make() if isinstance(found, type) and callable(make) else found


def with_present_names(made: MadeT, renamed: Mapping[str, str]) -> MadeT:
    """Give an object of a user's class the present names of attributes that it has under earlier names.

    renamed: present names by earlier ones. An attribute of the user's class overrides its base class's, by either name.
    """
    for old, new in renamed.items():
        first = next((one for one in type(made).__mro__ if old in vars(one) or new in vars(one)), None)
        if first is not None and new not in vars(first):  # set in the class, so that a property stays one
            setattr(first, new, vars(first)[old])
        given = getattr(made, "__dict__", {})
        if hasattr(made, old) and (not hasattr(made, new) or (old in given and new not in given)):
            setattr(made, new, getattr(made, old))
    return made


def with_present_keys(values: Mapping[str, ValueT], renamed: Mapping[str, str]) -> dict[str, ValueT]:
    """Copy a mapping under present names of its keys. Raises ConfigError for a key that stands under both names.

    renamed: present names by earlier ones.
    """
    for old, new in renamed.items():
        if old in values and new in values:
            raise ConfigError(f"`{old}` and `{new}` are the same key: write `{new}` alone")
    return {renamed.get(key, key): value for key, value in values.items()}


def import_module(name: str) -> ModuleType:
    """Import a module. Raises a ConfigError that separates a missing module from an error inside it."""
    try:
        with loading(name):
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
    if top in (*SHARED_NAMESPACES, *OTHER_PACKAGES) and hiding is not None:
        adds = f" (a `{top}/` folder without __init__.py adds to ours instead)" if top in SHARED_NAMESPACES else ""
        what = "file" if adds else "package"
        return f"module {name!r} not found: {hiding} hides agentrl's own `{top}/`; rename that {what}{adds}"
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
    """Format the closest of `known` as `; did you mean 'x'?`; empty where no name is close."""
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
        elif item["type"] == "value_error":  # a validator's own words: it knows which parts of the value may be shown
            faults.append(f"{key}: {item['ctx']['error']}".removeprefix(": "))
        else:
            faults.append(f"{key}: {item['msg']}, found {item['input']!r}")
    return "; ".join(faults)
