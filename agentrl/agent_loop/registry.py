"""Agent loops by name: the ready ones, and users' own by decorator or YAML."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from agentrl.agent_loop.base import AgentLoop
from agentrl.data.sample import AGENT_ALIASES
from agentrl.errors import ConfigError

_LOOPS: dict[str, type[AgentLoop]] = {}


def register(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Class decorator: rows whose `agent_name` is `name` run this loop. Raises ValueError when the name is taken."""

    def decorate(loop: type[AgentLoop]) -> type[AgentLoop]:
        known = _LOOPS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (loop.__module__, loop.__qualname__):
            raise ValueError(f"agent loop {name!r} is already registered by {known.__module__}.{known.__qualname__}")
        _LOOPS[name] = loop
        return loop

    return decorate


def agent_names() -> list[str]:
    """All registered names, aliases not included."""
    return sorted(_LOOPS)


def get_loop(name: str) -> type[AgentLoop]:
    """The loop of that name or alias. Raises ConfigError naming the known ones."""
    name = AGENT_ALIASES.get(name, name)
    if name not in _LOOPS:
        nearest = difflib.get_close_matches(name, _LOOPS, 1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"unknown agent loop {name!r}: registered are {', '.join(agent_names())}{hint}")
    return _LOOPS[name]


def load_agent_loops(path: str | Path) -> list[str]:
    """Register the loops of a YAML file: a list of `name` and `_target_` (`my.module.Loop`). Returns their names.

    Raises ConfigError naming the file and the entry.
    """
    try:
        entries = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"agent_loop_config_path: cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"agent_loop_config_path: {path} is not valid YAML: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(
            f"{path}: expected a list of entries with `name` and `_target_`, found {type(entries).__name__}"
        )
    return [_load_entry(entry, f"{path}: entry {index}") for index, entry in enumerate(entries)]


def _load_entry(entry: object, where: str) -> str:
    if not isinstance(entry, dict) or set(entry) != {"name", "_target_"}:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise ConfigError(f"{where}: expected exactly the keys `name` and `_target_`, found {found}")
    module_name, _, attribute = str(entry["_target_"]).rpartition(".")
    try:
        loop = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: _target_ {entry['_target_']!r} cannot be imported: {error}") from error
    if not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
        raise ConfigError(f"{where}: _target_ {entry['_target_']!r} is not a subclass of agentrl.agent_loop.AgentLoop")
    _LOOPS[str(entry["name"])] = loop
    return str(entry["name"])


def instantiate(names: Iterable[str]) -> dict[str, AgentLoop]:
    """One loop object for each name."""
    return {name: get_loop(name)() for name in dict.fromkeys(names)}
