"""Agent loops by name: those of the package, and users' own by decorator or YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from agentrl.agent_loop.base import AgentLoop
from agentrl.config.registries import AGENT_LOOPS
from agentrl.errors import ConfigError
from agentrl.system.plugin import Entry, read_entries
from agentrl.system.registry import configured, read_options
from agentrl.system.targets import is_target, load_target
from agentrl.trajectory.sample import AGENT_ALIASES


def register(name: str) -> Callable[[type[AgentLoop]], type[AgentLoop]]:
    """Register an agent loop (class decorator): rows whose `agent_name` is `name` run it.

    Raises ValueError when the name is taken.
    """
    return AGENT_LOOPS.register(name)


def agent_names() -> list[str]:
    """List all registered names, aliases not included."""
    return AGENT_LOOPS.names()


def get_loop(name: str) -> type[AgentLoop]:
    """Return the loop of a name or alias. Raises ConfigError naming the known ones."""
    return AGENT_LOOPS.get(AGENT_ALIASES.get(name, name))


def load_agent_loops(path: str | Path) -> dict[str, dict[str, Any]]:
    """Register the loops of a YAML file, and return the options of each by its name.

    The file is a list of `name`, `_target_` (`my.module.Loop` or `path/to/file.py:Loop`) and, for a loop whose
    constructor has them, `options`. Raises ConfigError naming the file and the entry.
    """
    return dict(map(_load_entry, read_entries(path, "agent_loops", bare=True)))


def _load_entry(entry: Entry) -> tuple[str, dict[str, Any]]:
    entry.check_keys(("name", "_target_", "options"))
    name, options = entry.text("name"), entry.mapping("options")
    loop = _loop_of(entry)
    read_options(loop, options, f"{entry.where}: options")
    try:
        register(name)(loop)
    except ValueError as error:
        raise entry.error(str(error)) from error
    return name, options


def _loop_of(entry: Entry) -> type[AgentLoop]:
    target = entry.text("_target_")
    found = load_target(target, entry.where) if is_target(target) else entry.load(target, AgentLoop)
    if not (isinstance(found, type) and issubclass(found, AgentLoop)):
        raise entry.error(f"{target} must be a subclass of agentrl.agent_loop.base.AgentLoop, found {found!r:.200}")
    return found


def instantiate(names: Iterable[str], options: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, AgentLoop]:
    """Make one loop object for each name, with its `options`. Raises ConfigError for a loop that cannot be made."""
    loops = {}
    for name in dict.fromkeys(names):
        try:
            loops[name] = configured(get_loop(name), (options or {}).get(name, {}), f"agent loop {name!r}: options")()
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"agent loop {name!r} cannot be made: {type(error).__name__}: {error}") from error
    return loops
