"""Agent loops by name: those of the package, and users' own by decorator or YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from agentrl.agent_loop.base import AgentLoop
from agentrl.errors import ConfigError
from agentrl.system.plugin import Entry, nearest, read_entries
from agentrl.trajectory.sample import AGENT_ALIASES

_LOOPS: dict[str, type[AgentLoop]] = {}


def register(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Register an agent loop (class decorator): rows whose `agent_name` is `name` run it.

    Raises ValueError when the name is taken.
    """

    def decorate(loop: type[AgentLoop]) -> type[AgentLoop]:
        known = _LOOPS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (loop.__module__, loop.__qualname__):
            raise ValueError(f"agent loop {name!r} is already registered by {known.__module__}.{known.__qualname__}")
        _LOOPS[name] = loop
        return loop

    return decorate


def agent_names() -> list[str]:
    """List all registered names, aliases not included."""
    return sorted(_LOOPS)


def get_loop(name: str) -> type[AgentLoop]:
    """Return the loop of a name or alias. Raises ConfigError naming the known ones."""
    name = AGENT_ALIASES.get(name, name)
    if name not in _LOOPS:
        raise ConfigError(
            f"unknown agent loop {name!r}: registered are {', '.join(agent_names())}{nearest(name, _LOOPS)}"
        )
    return _LOOPS[name]


def load_agent_loops(path: str | Path) -> list[str]:
    """Register the loops of a YAML file: a list of `name` and `_target_` (`my.module.Loop`). Returns their names.

    Raises ConfigError naming the file and the entry.
    """
    return [_load_entry(entry) for entry in read_entries(path, "agent_loops", bare=True)]


def _load_entry(entry: Entry) -> str:
    entry.check_keys(("name", "_target_"))
    name = entry.text("name")
    loop = entry.load(entry.text("_target_"), AgentLoop)
    try:
        register(name)(loop)
    except ValueError as error:
        raise entry.error(str(error)) from error
    return name


def instantiate(names: Iterable[str]) -> dict[str, AgentLoop]:
    """Make one loop object for each name. Raises ConfigError for a loop that cannot be made."""
    loops = {}
    for name in dict.fromkeys(names):
        try:
            loops[name] = get_loop(name)()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"agent loop {name!r} cannot be made: {type(error).__name__}: {error}") from error
    return loops
