"""Rules that a key declares next to its type: `Annotated[float, OnlyWith("use_kl_loss=true")]`.

A rule names other keys relative to its own section, or to one of the sections around it, the whole config last.
`OnlyWith("data.val_files")` at `trainer.test_freq` means the root's `data.val_files`.
"""

from __future__ import annotations

import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import yaml

from agentrl.config.declaration import Declaration, declaration_of
from agentrl.config.section import Finding
from agentrl.errors import ConfigError
from agentrl.system.config_files import find_file, our_folders
from agentrl.system.json_value import JSON, as_mapping
from agentrl.system.plugin import nearest
from agentrl.system.registry import Registry
from agentrl.system.targets import is_target


@dataclass(frozen=True, slots=True)
class Place:
    """The section in which a rule is declared, among all keys of the config."""

    section: str
    """Dotted path; empty for the whole config."""
    keys: Collection[str]

    def find(self, name: str) -> str | None:
        """Find the full path of the key that `name` means here; None where this config has no such key."""
        parts = self.section.split(".") if self.section else []
        paths = (".".join([*parts[:count], name]) for count in range(len(parts), -1, -1))
        return next((path for path in paths if path in self.keys), None)


@dataclass(frozen=True, slots=True)
class FromScript:
    """Keys that a rule judges otherwise where a script, and no command line, gives the config."""

    supplied: Collection[str] = ()
    """Keys whose part the script gives as objects, so that keys which need them are not without effect."""
    lent: Collection[str] = ()
    """Keys with the defaults of another trainer, of which one without effect is no mistake of the user's."""


NO_SCRIPT = FromScript()


@dataclass(frozen=True, slots=True)
class Values:
    """A config's values by key, and the keys that the user gave."""

    all: Mapping[str, JSON]
    given: Collection[str]
    """Without keys that are set to a default which asks for nothing: null, false, 0 or something empty."""
    supplied: Collection[str] = ()
    """Keys whose part a script gives as objects."""

    def names(self, key: str) -> list[str]:
        """Return the text, or the list of texts, that the key's type allows; empty for null."""
        value = self.all[key]
        return [name for name in (value if isinstance(value, list) else [value]) if isinstance(name, str)]

    def mapping(self, key: str) -> Mapping[str, JSON]:
        """Return the mapping that the key's type demands."""
        return as_mapping(self.all[key])


class Rule(ABC):
    """One rule of a key, or of every key of a section."""

    looks_up: ClassVar[bool] = False
    """True when the rule looks for the files or the code that a value names."""

    def text(self, place: Place) -> str:
        """Write the rule as a sentence for the page of keys; empty where it does not apply to this config."""
        return ""

    @abstractmethod
    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        """Write the messages for `key`; empty where it keeps the rule."""

    def findings(self, key: str, values: Values, place: Place) -> list[Finding]:
        """Judge `key`."""
        return [Finding(fault, key=key) for fault in self.faults(key, values, place)]

    def uses(self, value: JSON, home: Path) -> str:
        """Name what a value other than the default makes a command use besides data; empty where there is nothing.

        Args:
            value: as a config that is read back from a run has it, not validated.
            home: folder of that config.
        """
        return ""


_CONDITION = re.compile(r"([\w.]+)(?:=(.+)| above (\d+))?")


@dataclass(frozen=True, slots=True)
class Condition:
    """`key` (is set, and no off switch), `key=value or value` or `key above number`."""

    name: str
    values: tuple[JSON, ...] | None
    above: int | None

    @staticmethod
    def parse(text: str) -> Condition:
        """Read a condition. Raises ValueError for another form."""
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ValueError(f"expected key, key=value or key above number, found {text!r}")
        name, values, above = match.groups()
        return Condition(
            name,
            tuple(yaml.safe_load(value) for value in values.split(" or ")) if values else None,
            int(above) if above else None,
        )

    def holds(self, value: JSON) -> bool:
        """Check whether the key's value fulfils the condition."""
        if self.values is not None:
            return value in self.values
        if self.above is not None:
            return isinstance(value, int | float) and value > self.above
        return value not in (None, False, {}, [])

    def text(self, key: str) -> str:
        """Write the condition with the key's full path."""
        if self.values is not None:
            return f"{key}={' or '.join(map(shown, self.values))}"
        return key if self.above is None else f"{key} above {self.above}"


def found(conditions: Iterable[Condition], place: Place) -> list[tuple[str, Condition]]:
    """Pair the conditions with the full paths of their keys, without those on keys that this config does not have."""
    keys = ((place.find(condition.name), condition) for condition in conditions)
    return [(key, condition) for key, condition in keys if key is not None]


class OnlyWith(Rule):
    """The key has an effect only where one of the conditions holds. Set elsewhere, it is refused.

    Conditions on keys that a config does not have are left out; without a condition the rule does not apply.

    Args:
        because: the reason, which follows "as".
        off: values that ask for nothing, and may be set everywhere.
    """

    def __init__(self, *conditions: str, because: str = "", off: Collection[JSON] = ()) -> None:
        self.conditions = tuple(map(Condition.parse, conditions))
        self.because, self.off = because, off

    def _needed(self, place: Place) -> str:
        needed = " or ".join(condition.text(key) for key, condition in found(self.conditions, place))
        return needed + (f", as {self.because}" if self.because else "")

    def text(self, place: Place) -> str:
        return f"Only with {self._needed(place)}." if found(self.conditions, place) else ""

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        if key not in values.given or values.all[key] in self.off:
            return []
        here = found(self.conditions, place)
        met = (other in values.supplied or condition.holds(values.all[other]) for other, condition in here)
        if not here or any(met):
            return []
        return [f"{key}={shown(values.all[key])} has no effect: it needs {self._needed(place)}"]

    def findings(self, key: str, values: Values, place: Place) -> list[Finding]:
        remedy = f"Set that, or leave {key} out"
        return [Finding(fault, "no effect", key, remedy) for fault in self.faults(key, values, place)]


class ReadBy(OnlyWith):
    """The key has an effect only with an algorithm that reads it.

    Built-in algorithms are named here, so that judging a key imports no algorithm, and with it torch. A user's own
    algorithm declares the key.

    Args:
        registries: of the algorithms that may read it; their `key` is where the config names one.
        conditions: "adv_estimator=gae or rloo", and others that are enough.
        declares: says whether a declaration means this key.
    """

    def __init__(
        self,
        registries: Sequence[Registry],
        *conditions: str,
        declares: Callable[[Declaration], bool],
        off: Collection[JSON] = (),
    ) -> None:
        super().__init__(*conditions, off=off)
        self.registries, self.declares = registries, declares

    def _needed(self, place: Place) -> str:
        return f"{super()._needed(place)}, or an algorithm of yours that declares it"

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        faults = super().faults(key, values, place)
        for registry in self.registries if faults else ():
            name = str(values.all[registry.key])
            try:
                if not registry.is_built_in(name) and self.declares(declaration_of(registry.get(name))):
                    return []
            except ConfigError:
                return []  # a choice that does not exist is reported at its own key
        return faults


def itself(of: str) -> Condition:
    """Read a condition on a key's own value: "value or value", "above number", or nothing: it is set."""
    return Condition.parse(f"it {of}" if of.startswith("above") else f"it={of}" if of else "it")


class Needs(Rule):
    """While the key holds `of` (by itself: while it is set), a condition must hold.

    A condition on a key that the config does not have is left out. `what` describes it, or says why.
    """

    def __init__(self, condition: str, what: str = "", *, of: str = "") -> None:
        self.condition, self.what, self.of, self._while = Condition.parse(condition), what, of, itself(of)

    def _needed(self, key: str, found: str = "") -> str:
        return self.condition.text(key) + found + (f", {self.what}" if self.what else "")

    def text(self, place: Place) -> str:
        key = place.find(self.condition.name)
        return f"{f'{self.of}: needs' if self.of else 'Needs'} {self._needed(key)}." if key is not None else ""

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        other = place.find(self.condition.name)
        if other is None or not self._while.holds(values.all[key]) or self.condition.holds(values.all[other]):
            return []
        found = values.all[other]
        told = f" (found {shown(found)})" if found is not None else ""
        return [f"{key}={shown(values.all[key])} needs {self._needed(other, told)}"]


class ConflictsWith(Rule):
    """While the key holds `of` (by itself: while it is set), no condition may hold.

    Conditions on keys that the config does not have are left out. `why` gives reason and remedy.
    """

    def __init__(self, *conditions: str, why: str, of: str = "") -> None:
        self.conditions, self.why = tuple(map(Condition.parse, conditions)), why
        self.of, self._while = of, itself(of)

    def text(self, place: Place) -> str:
        others = " or ".join(condition.text(key) for key, condition in found(self.conditions, place))
        return f"{f'{self.of}: not' if self.of else 'Not'} with {others}." if others else ""

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        here = found(self.conditions, place)
        holding = [other for other, condition in here if condition.holds(values.all[other])]
        if not holding or not self._while.holds(values.all[key]):
            return []
        others = " and ".join(f"{other}={shown(values.all[other])}" for other in holding)
        return [f"{key}={shown(values.all[key])} conflicts with {others}: {self.why}"]


class NotAmong(Rule):
    """Entries of a mapping that cannot be given, by their name in `known_as`, each with a remedy."""

    def __init__(self, instead: Mapping[str, str], known_as: Callable[[str], str] = str) -> None:
        self.instead, self.known_as = instead, known_as

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        return [
            f"{key}.{name}: this argument cannot be given: {self.instead[self.known_as(name)]}"
            for name in values.mapping(key)
            if self.known_as(name) in self.instead
        ]


class NamesFile(Rule):
    """The value names a file, in the working directory or else in `configs/`.

    Args:
        unless: beginnings of tags; a value in which one stands is the text itself, and no file's name.
    """

    looks_up = True

    def __init__(self, unless: Collection[str] = ()) -> None:
        self.unless = unless

    def is_name(self, value: str) -> bool:
        """Check whether the value is a file's name."""
        return not any(tag in value for tag in self.unless)

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        try:
            for name in filter(self.is_name, values.names(key)):
                find_file(key, name)
        except ConfigError as error:
            return [str(error)]
        return []


class Uses(Rule):
    """A value other than the default names more than data, e.g. code or a host."""

    def __init__(self, what: str) -> None:
        self.what = what

    def text(self, place: Place) -> str:
        return "Read back from a run with `--trust` only."

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        return []

    def uses(self, value: JSON, home: Path) -> str:
        return "" if value in (None, [], {}) else self.what


class UsesFile(Uses):
    """The value names a file that names code. Files in our own folders are trusted."""

    def uses(self, value: JSON, home: Path) -> str:
        try:
            file = Path(find_file("", str(value))).resolve()
        except ConfigError:
            return super().uses(value, home)
        ours = any(file.is_relative_to(folder.resolve()) for folder in our_folders())
        return "" if ours else super().uses(value, home)


class Writes(Uses):
    """The value is a place that is written. Places in the working directory, or in the run's own, are trusted."""

    def __init__(self) -> None:
        super().__init__("a place outside the working directory and the run's folder, to write to")

    def text(self, place: Place) -> str:
        return ""

    def uses(self, value: JSON, home: Path) -> str:
        place = Path(str(value)).expanduser().resolve()
        inside = any(place.is_relative_to(folder.resolve()) for folder in (Path(), home))
        return "" if inside else super().uses(value, home)


class Names(Rule):
    """The value, or each one of a list, is a name of a registry, or a target where the registry takes them.

    `options`: the key of the named object's options, a mapping; None: it takes no options.
    """

    looks_up = True

    def __init__(self, registry: Registry, options: str | None = None) -> None:
        self.registry, self.options = registry, options

    def text(self, place: Place) -> str:
        yours = "of yours as package.module:object or path/to/file.py:object"
        if not self.registry.names():
            return f"Ones {yours}."
        return f"One of {', '.join(self.registry.names())}{f', or one {yours}' if self.registry.takes_targets else ''}."

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        options_key = place.find(self.options) if self.options is not None else None
        options = values.mapping(options_key) if options_key is not None else None
        return [fault for name in values.names(key) for fault in self.faults_of(name, key, options, options_key or "")]

    def faults_of(self, name: str, key: str, options: Mapping[str, JSON] | None, options_key: str) -> list[str]:
        """Write the message for one name, if the registry refuses it."""
        try:
            self.registry.check(name, options, key, options_key)
        except ConfigError as error:
            return [str(error)]
        return []

    def uses(self, value: JSON, home: Path) -> str:
        names = value if isinstance(value, list) else [value]
        return "code" if any(isinstance(name, str) and is_target(self.target(name)) for name in names) else ""

    def target(self, name: str) -> str:
        """Return the part of a name that may be a target."""
        return name


class NamesEach(Names):
    """The entries of a list are names of a registry; their options are under their names in the mapping `options`."""

    def faults(self, key: str, values: Values, place: Place) -> list[str]:
        assert self.options is not None
        names, options_key = values.names(key), place.find(self.options)
        assert options_key is not None
        options = {name: as_mapping(own) for name, own in values.mapping(options_key).items()}
        unread = [
            f"{options_key}.{name} has no effect: {key}={','.join(names)} does not name it{nearest(name, names)}"
            for name in options
            if name not in names
        ]
        found = (self.faults_of(name, key, options.get(name, {}), f"{options_key}.{name}") for name in names)
        return [*itertools.chain.from_iterable(found), *unread]


def shown(value: JSON) -> str:
    """Write a value as a user does."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
