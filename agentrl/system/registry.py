"""Objects that configs name: ours by a short name, and a user's by `module:object` or `path/to/file.py:object`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import pydantic

from agentrl.errors import ConfigError
from agentrl.system.plugin import describe, nearest
from agentrl.system.targets import is_target, load_target

T = TypeVar("T")
Options = TypeVar("Options", bound=pydantic.BaseModel)


class Registry(Generic[T]):
    """Objects of one kind by name; built-in ones are imported when they are first asked for.

    Args:
        what: names the kind in messages, e.g. "policy loss".
        key: the config key whose value is such a name.
        built_in: each name with its `module:object`.
    """

    def __init__(self, what: str, key: str, built_in: Mapping[str, str]) -> None:
        self.what, self.key = what, key
        self._built_in = dict(built_in)
        self._registered: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorate an object that configs then name. Raises ValueError for a name that another object has."""

        def decorate(found: T) -> T:
            known = self._registered.get(name)
            if name in self._built_in or (known is not None and _place(known) != _place(found)):
                raise ValueError(f"{self.what} {name!r} is already registered by {self._owner(name)}")
            self._registered[name] = found
            return found

        return decorate

    def names(self) -> list[str]:
        """All short names, sorted."""
        return sorted({*self._built_in, *self._registered})

    def get(self, name: str) -> T:
        """The object of a short name or a target. Raises ConfigError with the known names, or why loading failed."""
        if name in self._registered:
            return self._registered[name]
        target = self._built_in.get(name, name)
        if not is_target(target):
            raise ConfigError(
                f"{self.key}: unknown {self.what} {name!r}{nearest(name, self.names())}; known are "
                f"{', '.join(self.names())}, or name one of yours as package.module:object or path/to/file.py:object"
            )
        found: T = load_target(target, self.key)
        return found

    def _owner(self, name: str) -> str:
        return self._built_in.get(name) or ".".join(_place(self._registered[name]))


def options_model(found: object) -> type[pydantic.BaseModel] | None:
    """The pydantic model that annotates the parameter `options` of a function, or of a class's constructor."""
    function = found.__init__ if isinstance(found, type) else found  # type: ignore[misc]
    if not callable(function) or "options" not in inspect.signature(function).parameters:
        return None
    model = typing.get_type_hints(function).get("options")
    return model if isinstance(model, type) and issubclass(model, pydantic.BaseModel) else None


def read_options(found: object, values: Mapping[str, Any], key: str) -> pydantic.BaseModel | None:
    """Check `values`, the mapping under the config key `key`, as options of `found`; None where it takes none.

    Raises ConfigError with the wrong key, its nearest one, and what was expected.
    """
    model = options_model(found)
    if model is None:
        if values:
            raise ConfigError(f"{key}: {', '.join(map(str, values))} set, and {'.'.join(_place(found))} has no options")
        return None
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{key}: {describe(error, model.model_fields)}") from error


def _place(found: object) -> tuple[str, str]:
    named = found if hasattr(found, "__qualname__") else type(found)
    return named.__module__, named.__qualname__
