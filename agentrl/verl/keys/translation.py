"""Translation of a config in verl's keys, and the report of the changes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.checks import idle_keys
from agentrl.config.dialect import DIALECT, Reading
from agentrl.config.keys import MISSING, defaults, differing, flatten, leaf_keys, unknown_keys
from agentrl.config.rules import shown
from agentrl.config.section import Section
from agentrl.config.sections.sft import TuningConfig
from agentrl.config.sections.training import Config
from agentrl.system.json_value import JSON, as_object
from agentrl.verl.keys import families, rewrites
from agentrl.verl.keys.entries import VERL_0_2, Refusal, Values, VerlKey
from agentrl.verl.keys.table import VERL_KEYS


@dataclass(slots=True)
class Translation(Reading):
    """The keys of a config by how each was treated."""

    is_whole: bool = False
    """The whole config is written in verl's keys."""
    written: Values = field(default_factory=dict)
    """The values of that config."""
    name: str = ""
    """The YAML file of ours whose defaults hold, where it is another than `ppo_trainer`."""
    same: list[str] = field(default_factory=list)
    """Keys with the same name and meaning here."""
    translated: dict[str, dict[str, JSON]] = field(default_factory=dict)
    """Our keys and values, by the key of verl's that they replace."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Accepted keys without effect here, each with the reason."""
    loud: dict[str, str] = field(default_factory=dict)
    """Notes that are always logged."""
    unread: dict[str, str] = field(default_factory=dict)
    """A message for each key that nothing reads, as another key says so."""
    given: set[str] = field(default_factory=set)
    """Keys that are at no default of ours: of the command, or of a YAML file of the user's."""
    family: dict[str, tuple[JSON, JSON]] = field(default_factory=dict)
    """Our keys whose values are defaults of the family and not of verl 0.9.1: (value, verl 0.9.1's)."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """The reason for each key whose value would change the result and is not here."""

    def notes(self, config: Section, typed: Collection[str]) -> list[str]:
        """Write the treatment of verl's keys, and where a whole config holds verl's defaults in place of ours."""
        every = isinstance(config, Config | TuningConfig) and config.trainer.show_verl_notes
        if not self.is_whole:
            return summary(self, None, every=every)
        idle = without_effect(self, config, typed).values()
        texts = ["without effect in this command:\n" + "\n".join(f"  {text}" for text in idle)] if idle else []
        return [
            *texts,
            *contradictions(self, {*self.given, *typed}),
            *summary(self, typed, every=every),
            *self.of_family(typed),
            *differences(config, self.set_by(typed)),
        ]

    def set_by(self, typed: Collection[str]) -> set[str]:
        """Find our keys that the keys of the command set."""
        return {name for key in typed for name in (key, *self.translated.get(key, ()))}

    def asks(self, key: str) -> Mapping[str, JSON]:
        """Return our keys and values for a key of the config."""
        return self.translated.get(key, {key: self.written[key]})

    def of_family(self, typed: Collection[str]) -> list[str]:
        """Write one note for the defaults of the family that are not verl 0.9.1's and not in the command."""
        said = self.set_by(typed)
        found = [
            f"{key}={shown(value)}{'' if other == MISSING else f' ({shown(other)})'}"
            for key, (value, other) in self.family.items()
            if key not in said
        ]
        return [f"{self.name}: its defaults hold, verl 0.9.1's in parentheses: {', '.join(found)}"] if found else []


@functools.cache
def known_keys() -> frozenset[str]:
    """Read the keys that verl's releases and forks have; `.*` follows a key that may get keys of its own."""
    return frozenset(Path(__file__).with_name("known_keys.txt").read_text(encoding="utf-8").split())


@functools.cache
def first_keys() -> frozenset[str]:
    """Read the keys that verl's first releases have: 0.1, 0.2 and 0.3.0, whose code reads some of them otherwise."""
    return frozenset(Path(__file__).with_name("first_keys.txt").read_text(encoding="utf-8").split())


def is_known(key: str) -> bool:
    """Check whether verl has a key, by itself or in a section that takes any."""
    known = known_keys()
    sections = itertools.accumulate(key.split("."), "{}.{}".format)
    return key in known or any(f"{section}.*" in known for section in sections)


@functools.cache
def entry_of(key: str) -> VerlKey | None:
    """Find the table's entry for a key of verl's; None for an unknown key.

    A pattern accepts only keys that verl has: a misspelled one is a stranger.
    """
    entry = next((entry for entry in VERL_KEYS if entry.matches(key)), None)
    return None if entry is not None and entry.accepts_by_pattern and not is_known(key) else entry


def translate(values: Values, schema: type[Section]) -> Translation:
    """Translate the values of a config in verl's keys, interpolations resolved; the dialect's key may be with them."""
    found = _translated(values, schema)
    if families.held(values):
        found.name = str(values[families.FAMILY])
        other, default = _translated(families.in_the_base(values), schema).values, flatten(defaults(schema), {})
        for key, value in found.values.items():
            base = other.get(key, default.get(key, MISSING))
            if base != value:
                found.family[key] = (value, base)
    return found


def _translated(values: Values, schema: type[Section]) -> Translation:
    found, leaves = Translation(is_whole=True, written=values, given=families.given(values)), leaf_keys(schema)
    ours = {DIALECT, families.FAMILY} if families.own_defaults(values.get(families.FAMILY)) else {DIALECT}
    entries = {key: entry_of(key) for key in values if key not in ours}
    for key, entry in entries.items():
        if entry is None and key in leaves:
            found.same.append(key)
            found.values[key] = values[key]
        elif entry is None:
            found.strangers.append(key)
    setters = dict[str, str]()
    for key in sorted(entries, key=found.given.__contains__):  # the user's keys replace defaults of others
        if (entry := entries[key]) is not None:
            setters |= dict.fromkeys(_apply(entry, key, values, found), key)
    _note_replaced(found, setters)
    if values.get(DIALECT) == VERL_0_2:
        found.loud[f"{DIALECT}={VERL_0_2}"] = rewrites.first_releases(values)
    found.faults = [*refusals(found, values), *contradictions(found, found.given)]
    if found.strangers:
        verls = [key.removesuffix(".*") for key in sorted(known_keys())]
        found.faults.append(unknown_keys(found.strangers, [*leaves, *verls]))
    return found


def _note_replaced(found: Translation, setters: Mapping[str, str]) -> None:
    """Note the keys of our names whose values another key replaces; null asks for nothing.

    `setters`: the last key of verl's that sets a key of ours, by that key.
    """
    for key in [key for key in found.same if not isinstance(found.written[key], dict)]:
        value, held = found.written[key], found.values[key]
        if value not in (None, held):
            by = setters[key]
            found.same.remove(key)
            found.unread[key] = (
                f"{key}={shown(value)} has no effect: {by}={shown(found.written[by])} sets it to {shown(held)}"
            )


def _apply(entry: VerlKey, key: str, values: Values, found: Translation) -> dict[str, JSON]:
    """Sort a key into `found`; returns our keys and values for it, none where it is refused."""
    value = values[key]
    try:
        ours = _ours(entry, key, values)
    except Refusal as error:
        found.unsupported[key] = str(error)
        return {}
    if entry.unread(value, values):
        found.unread[key] = f"{key}={shown(value)} has no effect: {entry.text}"
    elif ours == {key: value}:
        found.same.append(key)
    elif ours:
        found.translated[key] = ours
        if entry.is_loud and entry.asks(value, values):
            found.loud[key] = f"{entry.text}: {', '.join(shown(one) for one in ours.values())} here"
    else:
        found.ignored[key] = entry.text
        if entry.is_loud and entry.asks(value, values):
            found.loud[key] = entry.text
    for name, one in ours.items():
        old = found.values.get(name)
        found.values[name] = {**as_object(old), **one} if isinstance(one, dict) and isinstance(old, dict) else one
    return ours


def _ours(entry: VerlKey, key: str, values: Values) -> dict[str, JSON]:
    """Return our keys and values for one of verl's; raise Refusal with the reason for a value that is refused."""
    value = values[key]
    if entry.translate is not None:
        return entry.translate(value, values)
    if entry.into is not None:
        return {entry.into: {key.removeprefix(entry.pattern[:-1]): value}}
    if entry.accepted is not None and not any(value == one for one in entry.accepted):
        raise Refusal(entry.text)
    return {}


def spelled(unknown: Values, values: Values, schema: type[Section]) -> Translation:
    """Judge keys that the schema does not have, in a config without verl's dialect.

    A key without effect is ignored; a key that another key replaces is refused with the name of that key. A key of
    verl's that is the end of a schema's key counts as a shortened form of it, and so as unknown.
    """
    found, leaves = Translation(), leaf_keys(schema)
    for key in unknown:
        entry = entry_of(key)
        if unknown[key] is None and is_known(key):
            found.ignored[key] = "null asks for nothing"
            continue
        if entry is None:
            found.strangers.append(key)
            continue
        try:
            ours = _ours(entry, key, unknown)
        except Refusal as error:
            if any(leaf.endswith(f".{key}") for leaf in leaves):
                found.strangers.append(key)
            else:
                found.unsupported[key] = str(error)
            continue
        if ours.keys() == {key}:  # a key of other commands
            found.strangers.append(key)
        elif ours:
            found.translated[key] = ours
        else:
            found.ignored[key] = entry.text
            if entry.unread(unknown[key], unknown):
                found.loud[key] = f"it has no effect: {entry.text}"
    found.faults = [*spellings(found, unknown, has_dialect=schema is Config), *refusals(found, unknown)]
    return found


def spellings(found: Translation, values: Values, *, has_dialect: bool) -> list[str]:
    """Write a line for each key that is verl's spelling of others, where users set these by their own names.

    `has_dialect`: the command is a training's, which verl's dialect is for.
    """
    other = ", or start python -m agentrl.verl.main_ppo, which has verl's defaults, too" if has_dialect else ""
    lines = []
    for key, ours in found.translated.items():
        here = ", ".join(f"{name}={shown(value)}" for name, value in ours.items())
        lines.append(f"{key}={shown(values[key])} is verl's spelling of {here}; write that{other}")
    return lines


def summary(found: Translation, typed: Collection[str] | None, *, every: bool) -> list[str]:
    """Write a note of all keys without effect, and a note of the keys that are arranged differently.

    Args:
        typed: the keys to report; None: all.
        every: name each key, not only their number.
    """
    ignored = {key: why for key, why in found.ignored.items() if typed is None or key in typed}
    texts = []
    if ignored and every:
        texts.append("keys of verl's without effect here:\n" + "\n".join(f"  {k}: {why}" for k, why in ignored.items()))
    elif ignored:
        texts.append(
            f"{len(ignored)} keys of verl's have no effect of their own here (trainer.show_verl_notes=true lists them)"
        )
    unlisted = {key: why for key, why in found.loud.items() if not (every and key in ignored)}
    return texts + aloud(unlisted)


def aloud(loud: Mapping[str, str]) -> list[str]:
    """Write a line for each note that is always logged, with its keys."""
    return [f"{', '.join(keys)}: {why}" for why, keys in _by_reason(loud).items()]


def _by_reason(found: Mapping[str, str]) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    for key, why in found.items():
        keys.setdefault(why, []).append(key)
    return keys


def refusals(found: Translation, values: Values) -> list[str]:
    """Write a line for each reason of a refusal, with its keys and values."""
    return [
        f"{', '.join(f'{key}={shown(values[key])}' for key in keys)} would change the result, and is not here: {why}"
        for why, keys in _by_reason(found.unsupported).items()
    ]


def contradictions(found: Translation, given: Collection[str]) -> list[str]:
    """Write a line for each two of the given keys that are names of one thing and have other values."""
    lines, first = [], dict[str, tuple[str, JSON]]()
    for key, whole in found.written.items():
        if key not in given:
            continue
        name = key if (entry := entry_of(key)) is None else entry.first_name(key)
        for part, value in flatten({name: whole}, {}).items():
            other, before = first.setdefault(part, (key, value)) if value is not None else (key, value)
            if before != value and found.asks(other) != found.asks(key):
                lines.append(
                    f"{key}={shown(whole)} and {other}={shown(found.written[other])} contradict each other, and are "
                    "one key here: leave one of them out"
                )
    return lines


def without_effect(found: Translation, config: Section, typed: Collection[str]) -> dict[str, str]:
    """Write a message for each key of the user's that has no effect, which verl allows."""
    keys = [key for key in dict.fromkeys([*typed, *found.given]) if key not in found.ignored]
    ours = {key: [*found.translated.get(key, [key])] for key in keys}
    idle = idle_keys(config, {name for names in ours.values() for name in names})
    told = {key: idle[names[0]] for key, names in ours.items() if all(name in idle for name in names)}
    return told | {key: found.unread[key] for key in keys if key in found.unread}


def differences(config: Section, typed: Collection[str]) -> list[str]:
    """Write one note for the values that are not agentrl's defaults, and that the command does not say."""
    found = [
        f"{key}={shown(value)} ({shown(default)})"
        for key, (value, default) in differing(config).items()
        if key not in typed
    ]
    return [f"verl's defaults hold, agentrl's in parentheses: {', '.join(found)}"] if found else []
