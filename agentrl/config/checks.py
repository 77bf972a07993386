"""Checks of a whole config: the rules of its keys, and of its sections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from agentrl.config.keys import all_keys, defaults, entry_of, flatten, leaf_keys
from agentrl.config.rules import Names, Place, Values
from agentrl.config.section import Finding, Section
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON, as_mapping


def check(
    config: Section,
    given: Collection[str],
    ours: Callable[[], Collection[str]] = tuple,
    supplied: Collection[str] = (),
) -> list[str]:
    """Return the remarks. Raises ConfigError with a line for each key that the config cannot have with the others.

    Args:
        given: the keys that the user gave.
        ours: finds those that a YAML file of ours gave: one without an effect is no mistake of the user's.
        supplied: keys whose part a script gives as objects.
    """
    found = list(findings(config, given, supplied))
    wrong = [finding for finding in found if finding.kind != "remark"]
    if any(finding.kind == "no effect" for finding in wrong):
        own = ours()
        wrong = [finding for finding in wrong if finding.kind != "no effect" or finding.key not in own]
    if wrong:
        raise ConfigError("\n".join(dict.fromkeys(map(str, wrong))))
    return [finding.text for finding in found if finding.kind == "remark"]


def findings(
    config: Section, given: Collection[str], supplied: Collection[str] = (), *, look_up: bool = True
) -> Iterator[Finding]:
    """Yield all findings of the rules of keys, then of the rules of sections; `given`: the keys that the user gave.

    look_up: false: no file and no code that a key names is looked for.
    """
    yield from of_keys(config, given, supplied, look_up=look_up)
    yield from of_sections(config)


def of_keys(
    config: Section, given: Collection[str], supplied: Collection[str] = (), *, look_up: bool = True
) -> Iterator[Finding]:
    """Yield the findings of the rules that keys declare; a key that one denies its effect is judged no further."""
    keys, leaves = all_keys(type(config)), leaf_keys(type(config))
    found, default = flatten(config.model_dump(mode="json"), leaves), flatten(defaults(type(config)), leaves)
    effective = {key for key in given if key in found and (found[key] or found[key] != default[key])}
    values = Values(found, effective, supplied)
    for path, key in keys.items():
        for rule, section in key.rules:
            if rule.looks_up and not look_up:
                continue
            judged = rule.findings(path, values, Place(section, keys))
            if isinstance(rule, Names):
                about = " ".join((key.field.description or "").split())
                judged = [Finding(f"{finding.text}. {about}", finding.kind, path) for finding in judged]
            yield from judged
            if any(finding.kind == "no effect" for finding in judged):
                break
        if (entry := entry_of(key.field.annotation)) is not None:
            for name, inner in values.mapping(path).items():
                yield from of_entry(f"{path}.{name}", entry, as_mapping(inner), values, given=path in effective)


def of_entry(
    at: str, entry: type[Section], inner: Mapping[str, JSON], whole: Values, *, given: bool
) -> Iterator[Finding]:
    """Yield the findings of the rules that the keys of a mapping's entry declare; the mapping's rule looks names up.

    given: the user gave the mapping, so that a key off its default may be without effect.
    """
    leaves = leaf_keys(entry)
    default, found = flatten(defaults(entry), leaves), flatten(inner, leaves)
    off_default = [f"{at}.{name}" for name, value in found.items() if given and value != default[name]]
    values = Values({**whole.all, **{f"{at}.{name}": value for name, value in found.items()}}, off_default)
    for name, key in all_keys(entry).items():
        for rule, section in key.rules:
            if not rule.looks_up:
                yield from rule.findings(f"{at}.{name}", values, Place(f"{at}.{section}".rstrip("."), values.all))


def of_sections(section: Section) -> Iterator[Finding]:
    """Yield the findings of a section, then of the sections in it."""
    yield from section.findings()
    for name in type(section).model_fields:
        inner = getattr(section, name)
        if isinstance(inner, Section):
            yield from of_sections(inner)


def idle_keys(config: Section, given: Collection[str]) -> dict[str, str]:
    """Find the given keys that have no effect with the others, each with the message that says what it needs."""
    found = of_keys(config, given, look_up=False)
    return {finding.key: finding.text for finding in found if finding.kind == "no effect"}
