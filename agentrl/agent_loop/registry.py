"""Agent loops by name: the package's own, and users' by decorator or YAML."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import cast

from agentrl.agent_loop.base import AgentLoop, Episode
from agentrl.config.dialect import translated
from agentrl.config.registries import AGENT_LOOPS
from agentrl.errors import ConfigError
from agentrl.system.call_journal import RENAMED
from agentrl.system.entries import Entry, read_entries
from agentrl.system.registrations import of_config
from agentrl.system.registry import configured, options_model, read_options
from agentrl.trajectory.sample import AGENT_ALIASES

ENTRY_KEYS = ("name", "_target_", "options", "on_resume")


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
    return cast(type[AgentLoop], AGENT_LOOPS.get(AGENT_ALIASES.get(name, name)))


def load_agent_loops(path: str | Path) -> dict[str, dict[str, object]]:
    """Register the loops of a YAML file, and return the options of each by its name.

    The file is a list of `name`, `_target_` (`my.module.Loop` or `path/to/file.py:Loop`) and, for a loop whose
    constructor has them, `options`; an `on_resume` overrides the class's own. Raises ConfigError naming the file
    and the entry.
    """
    return dict(map(_load_entry, read_entries(path, "agent_loops", bare=True)))


def _load_entry(entry: Entry) -> tuple[str, dict[str, object]]:
    entry = translated(entry).renamed(RENAMED)
    name, options = entry.text("name"), dict(entry.mapping("options"))
    loop = entry.load(entry.text("_target_"), AgentLoop)
    model = options_model(loop)
    if model is not None and model.model_config.get("extra") == "allow":  # all keys are arguments of its constructor
        options |= {key: value for key, value in entry.values.items() if key not in ENTRY_KEYS}
    else:
        entry.check_keys(ENTRY_KEYS)
    read_options(loop, options, f"{entry.where}: options")
    if (word := entry.values.get("on_resume")) is not None:
        if word not in ("answers", "none"):
            raise entry.error(f"on_resume is {word!r}; expected one of answers, none")
        named = {"__module__": loop.__module__, "__qualname__": loop.__qualname__, "__doc__": loop.__doc__}
        loop = type(loop.__name__, (loop,), {**named, "on_resume": word})
    try:
        if not (AGENT_LOOPS.is_built_in(name) and AGENT_LOOPS.get(name) is loop):
            with of_config():
                register(name)(loop)
    except ValueError as error:
        raise entry.error(str(error)) from error
    return name, options


def instantiate(
    names: Iterable[str], options: Mapping[str, Mapping[str, object]] | None = None
) -> dict[str, AgentLoop]:
    """Make one loop object for each name, with its `options`. Raises ConfigError for a loop that cannot be made."""
    loops = {}
    for name in dict.fromkeys(names):
        given = (options or {}).get(name, {})
        loops[name] = make_loop(name, configured(get_loop(name), given, f"agent loop {name!r}: options"))
    return loops


def make_loop(name: str, make: Callable[[], AgentLoop]) -> AgentLoop:
    """Call `make`, a loop's class. Raises ConfigError that names the loop."""
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"agent loop {name!r} cannot be made: {type(error).__name__}: {error}") from error


LoopFunction = Callable[[Episode], Awaitable[None]]


class FunctionLoop(AgentLoop):
    """Run `function(episode)`, which does what `AgentLoop.run` is asked for."""

    def __init__(self, function: LoopFunction) -> None:
        self.function = function

    @property
    def code(self) -> LoopFunction:
        return self.function

    async def run(self, episode: Episode) -> None:
        await self.function(episode)


def as_loop(name: str, given: AgentLoop | type[AgentLoop] | LoopFunction) -> AgentLoop:
    """Make the loop called `name` of an object, a class without arguments, or a coroutine function of an episode.

    Raises ConfigError for anything else, and for a class that cannot be made.
    """
    if isinstance(given, AgentLoop):
        return given
    if isinstance(given, type) and issubclass(given, AgentLoop):
        return make_loop(name, given)
    if inspect.iscoroutinefunction(given):
        return FunctionLoop(given)
    raise ConfigError(
        f"agent loop {name!r}: expected a subclass of agentrl.agent_loop.AgentLoop, an object of one, or "
        f"`async def {name}(episode)`; found {given!r:.100}"
    )
