"""verl's dialect: a YAML file that says `dialect: verl` is written in verl's keys, and has verl's defaults.

`dialect: verl-0.2` is that of verl's first releases: the same keys, of which their code made something else.
"""

from __future__ import annotations

from collections.abc import Collection

from agentrl.config.checks import idle_keys
from agentrl.config.dialect import Dialect, Reading
from agentrl.config.keys import differing, leaf_keys, unknown_keys
from agentrl.config.rules import shown
from agentrl.config.section import Section
from agentrl.config.sections.sft import TuningConfig
from agentrl.config.sections.training import Config
from agentrl.system.entries import Entry
from agentrl.verl.classes import translated
from agentrl.verl.keys.entries import Values
from agentrl.verl.keys.translation import (
    Translation,
    refusals,
    spelled,
    spellings,
    summary,
    translate,
    verls_keys,
)

MAINS = {
    "generation": "generate",
    "ppo_generation": "generate",
    "evaluation": "evaluate",
    "sft_trainer": "sft",
    "sft_trainer_engine": "sft",
}
"""YAML files of verl's other mains, and the module that does their work here."""


class VerlReading(Reading):
    """Keys of a config as verl's dialect reads them."""

    def __init__(self, found: Translation, faults: list[str], *, is_whole: bool) -> None:
        super().__init__(found.values if is_whole else {}, faults, found.strangers)
        self.translation, self.is_whole = found, is_whole

    def notes(self, config: Section, typed: Collection[str]) -> list[str]:
        """Write what became of verl's keys, and where a whole config holds verl's defaults in place of ours."""
        every = isinstance(config, Config | TuningConfig) and config.trainer.show_verl_notes
        if not self.is_whole:
            return summary(self.translation, None, every=every)
        said = {name for key in typed for name in (key, *self.translation.translated.get(key, ()))}
        told = summary(self.translation, typed, every=every)
        return [*without_effect(config, typed), *told, *differences(config, said)]


class Verl(Dialect):
    """verl's keys, classes and YAML files."""

    def translate(self, values: Values, schema: type[Section]) -> VerlReading:
        """Translate a config in verl's keys."""
        found = translate(values, schema)
        faults = refusals(found, values)
        if found.strangers:
            faults.append(unknown_keys(found.strangers, [*leaf_keys(schema), *verls_keys()]))
        return VerlReading(found, faults, is_whole=True)

    def spelled(self, unknown: Values, values: Values, schema: type[Section]) -> VerlReading:
        """Note verl's keys without effect here, and refuse its spellings of ours."""
        found = spelled(unknown, leaf_keys(schema))
        faults = [*spellings(found, unknown, has_dialect=schema is Config), *refusals(found, unknown)]
        return VerlReading(found, faults, is_whole=False)

    def entry(self, entry: Entry) -> Entry:
        """Put our class and keys in the place of verl's."""
        return translated(entry)

    def advice(self, name: str) -> str:
        """Write which main does the work of one of verl's, and which of verl's choices there is."""
        if "@" in name:
            return ". Of verl's own choices model_engine is there (dp or megatron)"
        return f" (verl's {name} is python -m agentrl.{MAINS[name]} here)" if name in MAINS else ""


def without_effect(config: Section, typed: Collection[str]) -> list[str]:
    """Write one note for the keys of a command that have no effect in it, which verl allows."""
    found = idle_keys(config, typed).values()
    return [f"without effect in this command: {', '.join(found)}"] if found else []


def differences(config: Section, typed: Collection[str]) -> list[str]:
    """Write one note for the values that are not agentrl's defaults, and that the command does not say."""
    found = [
        f"{key}={shown(value)} ({shown(default)})"
        for key, (value, default) in differing(config).items()
        if key not in typed
    ]
    return [f"verl's defaults hold, agentrl's in parentheses: {', '.join(found)}"] if found else []
