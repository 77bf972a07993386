"""A config from Python values, by the same overrides as on the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Protocol

from agentrl.config.hydra_section import quoted
from agentrl.config.load import load_config
from agentrl.config.rules import FromScript
from agentrl.config.sections.training import Config
from agentrl.errors import ConfigError


class _Named(Protocol):
    """A function or a class, which a key names by its module and its own name."""

    __module__: str
    __qualname__: str


Value = str | int | float | bool | Path | Sequence["Value"] | Mapping[str, "Value"] | _Named | None
"""Values that a key can be set to."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Keys that the arguments of another trainer stand for."""

    keys: Mapping[str, Value]
    lent: Collection[str]
    """Keys with that trainer's defaults; one without an effect is no mistake of the user's."""


Overrides = Mapping[str, Value] | Sequence[str] | Translation
"""Values by dotted key, {"trainer.seed": 2}, or arguments of a command line, ["trainer.seed=2"]."""


def as_config(given: Config | Overrides, supplied: Collection[str] = ()) -> Config:
    """Return a config as it is, or load the training config with overrides.

    supplied: keys whose part a script gives as objects.

    Raises ConfigError as `load_config`, and for a value of a type that no key has.
    """
    if isinstance(given, Config):
        return given
    script = FromScript(supplied)
    if isinstance(given, Translation):
        script, given = FromScript(supplied, given.lent), given.keys
    if isinstance(given, Mapping):
        given = [as_override(key, value) for key, value in given.items()]
    return load_config(list(given), script=script)


def as_override(key: str, value: Value) -> str:
    """Write an override in Hydra's grammar. Raises ConfigError for a value of a type that no key has."""
    return f"{key}={_text(key, value)}"


def _text(key: str, value: Value) -> str:
    """The value in Hydra's grammar of overrides."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | Path():
            return quoted(str(value))
        case Mapping():
            return "{" + ",".join(f"{name}:{_text(key, inner)}" for name, inner in value.items()) + "}"
        case list() | tuple():
            return "[" + ",".join(_text(key, inner) for inner in value) + "]"
        case FunctionType() | type():
            if "<" in value.__qualname__:  # of a lambda, or inside a function
                raise ConfigError(
                    f"{key}: {value.__qualname__} has no name in its module {value.__module__}, by which it could be "
                    "found; define it at the top level of a file, or of a notebook's cell. Numbers that differ by run "
                    "are options of it (docs/extending.md)"
                )
            return _text(key, f"{value.__module__}:{value.__qualname__}")
    raise ConfigError(
        f"{key}: expected text, a path, a number, a bool, None, a function, a class, a list or a mapping of such; "
        f"found {value!r:.100} of type {type(value).__name__}{_instead(value)}"
    )


def _instead(value: object) -> str:
    """Say what takes the place of an object that can be called."""
    if not callable(value):
        return ""
    return ". A function takes its numbers as options, which keys set: a parameter `options` (docs/extending.md)"
