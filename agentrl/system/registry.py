"""Objects that configs name: ours by a short name, and a user's by `module:object` or `path/to/file.py:object`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TypeVar, cast

import pydantic

from agentrl.errors import ConfigError
from agentrl.system.parts import of_annexes, of_distributions
from agentrl.system.plugin import adapted, describe, nearest
from agentrl.system.registrations import enter
from agentrl.system.targets import is_target, load_target, plain_name
from agentrl.system.user_code import code_error

T = TypeVar("T")
Made = TypeVar("Made")


class Registry:
    """Objects of one kind by name; built-in ones are imported on first use.

    A registry knows nothing of the kind's type, so that configs name what they never import: the room that asks for an
    object casts it to its contract.

    Args:
        what: names the kind in messages, e.g. "policy loss".
        key: the config key whose value is such a name.
        built_in: each name with its `module:object`.
        base: `module:Class`, the base class of every choice; None: the caller checks what it needs.
        functions: every choice must be callable.
        takes: names of the arguments that a function is called with, apart from its options; (): they are not checked.
        needing_options: the built-in choices with an option that has no default.
        targets: allow `module:object` and `path/to/file.py:object` next to names. False where names come from data,
            which nobody trusts with an import.
        group: entry points that are choices, too: `agentrl.<group>`.
    """

    def __init__(
        self,
        what: str,
        key: str,
        built_in: Mapping[str, str],
        *,
        base: str | None = None,
        functions: bool = False,
        takes: Sequence[str] = (),
        needing_options: Collection[str] = (),
        targets: bool = True,
        group: str | None = None,
    ) -> None:
        self.what, self.key, self._group = what, key, group
        self._built_in = {**built_in, **(of_annexes(group) if group is not None else {})}
        self._needing_options = frozenset(needing_options)
        self._base, self._functions, self.takes_targets = base, functions or bool(takes), targets
        self._takes = tuple(takes)
        self._registered: dict[str, object] = {}
        self._loaded: dict[str, object] = {}
        """Built-in objects that were chosen before."""

    def register(self, name: str) -> Callable[[T], T]:
        """Decorate an object that configs then name. Raises ValueError for a name that another object has.

        A name that code of a config registers ends with its run (`agentrl.system.registrations`).
        """

        def decorate(found: T) -> T:
            known = self._registered.get(name)
            if name in self._built_in or (known is not None and _place(known) != _place(found)):
                owner = self._built_in.get(name) or ".".join(_place(known))
                raise ValueError(f"{self.what} {name!r} is already registered by {owner}; choose another name")
            enter(self._registered, name, found)
            return found

        return decorate

    def is_built_in(self, name: str) -> bool:
        """Check whether `name` is one of ours."""
        return name in self._built_in

    def names(self) -> list[str]:
        """All short names, sorted."""
        return sorted({*self._built_in, *self._installed(), *self._registered})

    def _installed(self) -> Mapping[str, str]:
        """Choices that other distributions bring. They are looked for where a name is not ours."""
        return of_distributions(self._group) if self._group is not None else {}

    def get(self, name: str, key: str | None = None) -> object:
        """The object of a short name or a target; `key` names the config key where it is not `self.key`.

        Raises ConfigError with the known names, the reason why loading failed, or the required type.
        """
        if name in self._loaded:
            return self._loaded[name]
        key = key or self.key
        found = self._registered.get(name)
        if found is None:
            found = adapted(load_target(self._target(name, key), key))
        if self._functions and not callable(found):
            raise ConfigError(f"{key}={name}: expected a function, found {found!r:.200}")
        if self._base is not None:
            base = load_target(self._base, key)
            assert isinstance(base, type)
            if not (isinstance(found, type) and issubclass(found, base)):
                wanted = ".".join(_place(base))
                raise ConfigError(
                    f"{key}: expected a subclass of {wanted} as {self.what}, found {name} = {found!r:.200}"
                )
        if name in self._built_in:
            self._loaded[name] = found
        return found

    def check(
        self, name: str, options: Mapping[str, object] | None, key: str | None = None, options_key: str = ""
    ) -> None:
        """Raises ConfigError for a name that `get` refuses, and for options (`options_key`) that it does not take.

        A built-in choice that needs no options, and gets no options, is not imported. `options`: None where no key
        gives any.
        """
        if options or name not in self._built_in or name in self._needing_options:
            found, key = self.get(name, key), key or self.key
            if options is None and options_model(found) is not None:
                raise ConfigError(f"{key}={name}: a {self.what} has no options, found a parameter `options`")
            read_options(found, options or {}, options_key or key)
            self._check_arguments(found, f"{key}={name}")

    def _check_arguments(self, found: object, what: str) -> None:
        """Raise ConfigError for a function that cannot be called with the arguments that it is given."""
        if not self._takes:
            return
        assert callable(found), "get has checked it"
        try:
            signature = inspect.signature(found)
        except ValueError:  # compiled, without a signature
            return
        options = {"options": None} if options_model(found) is not None else {}
        try:
            signature.bind(*self._takes, **options)
        except TypeError as error:
            raise ConfigError(
                f"{what}: expected a function of ({', '.join(self._takes)}), which may have a parameter `options`, "
                f"annotated with a pydantic model; found {'.'.join(_place(found))}{signature} ({error})"
            ) from None

    def make(
        self,
        names: Sequence[str],
        options: Mapping[str, Mapping[str, object]],
        *given: object,
        methods: Sequence[str],
        on_made: Callable[[object], None],
    ) -> list[object]:
        """Make an object of each class that is named, of `given` and of its options, the key `<self.key>_options`.

        `on_made` gets each object, to have it closed, before the next one is made, which may fail.
        Raises ConfigError for wrong options and for `async` methods among `methods`, CodeError where making fails.
        """
        made: list[object] = []
        for name in names:
            found = cast(Callable[..., object], self.get(name))
            refuse_coroutines(self.key, name, found, methods)
            make = configured(found, options.get(name, {}), f"{self.key.removesuffix('s')}_options.{name}")
            try:
                made.append(make(*given))
                on_made(made[-1])
            except (Exception, SystemExit) as error:
                raise code_error(self.what, error, found) from error
        return made

    def _target(self, name: str, key: str) -> str:
        if name in self._built_in:
            return self._built_in[name]
        if self.takes_targets and is_target(name):
            return name
        if name in (installed := self._installed()):
            return installed[name]
        yours = (
            ", or name one of yours as package.module:object or path/to/file.py:object" if self.takes_targets else ""
        )
        raise ConfigError(
            f"{key}: unknown {self.what} {name!r}{nearest(name, self.names())}; known are "
            f"{_listed(self.names())}{yours}"
        )


def options_model(found: object) -> type[pydantic.BaseModel] | None:
    """The pydantic model that annotates the parameter `options` of a function, or of a class's constructor."""
    function = found.__init__ if isinstance(found, type) else found  # type: ignore[misc]
    if not callable(function) or "options" not in (parameters := inspect.signature(function).parameters):
        return None
    # This annotation alone: others may name imports for type checkers only.
    annotated = SimpleNamespace(__annotations__={"options": parameters["options"].annotation})
    hint = typing.get_type_hints(annotated, globalns=getattr(inspect.unwrap(function), "__globals__", {}))["options"]
    models = [one for one in (hint, *typing.get_args(hint)) if isinstance(one, type)]
    return next((one for one in models if issubclass(one, pydantic.BaseModel)), None)


def read_options(found: object, values: Mapping[str, object], key: str) -> pydantic.BaseModel | None:
    """Check `values`, the mapping under the config key `key`, as options of `found`.

    Returns None where `found` takes no options. Raises ConfigError with the wrong key, its nearest one, and the type.
    """
    model = options_model(found)
    if model is None:
        if values:
            raise ConfigError(
                f"{key}: {', '.join(map(str, values))} set, and {'.'.join(_place(found))} has no options (a parameter "
                "`options` that is annotated with a pydantic model)"
            )
        return None
    known = [*model.model_fields, *(field.alias for field in model.model_fields.values() if field.alias)]
    if model.model_config.get("extra") != "allow":  # pydantic's own default is to ignore unknown fields
        for name in values:
            if name not in known:
                raise ConfigError(f"{key}: unknown key {name!r}{nearest(str(name), known)}; known are {_listed(known)}")
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(f"{key}: {describe(error, known)}") from error


def configured(found: Callable[..., Made], values: Mapping[str, object], key: str) -> Callable[..., Made]:
    """Return `found` with its parameter `options` set to the result of `read_options` on `values`, where it has one."""
    options = read_options(found, values, key)
    return found if options is None else partial(found, options=options)


def refuse_coroutines(key: str, name: str, found: object, methods: Sequence[str]) -> None:
    """Raise ConfigError for an `async` method among `methods` of a class, which is called and not awaited."""
    for method in methods:
        if inspect.iscoroutinefunction(getattr(found, method)):
            raise ConfigError(
                f"{key}: {name}.{method} must be a plain function (`def`), found `async def`: it is called, and not "
                "awaited"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _place(found: object) -> tuple[str, str]:
    named = found if hasattr(found, "__qualname__") else type(found)
    return plain_name(named.__module__), named.__qualname__
