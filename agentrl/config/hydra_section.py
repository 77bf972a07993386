"""Hydra's grammar of overrides, and its own keys, `hydra.*`: `hydra.searchpath` is taken, all others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON

SEARCHPATH = "hydra.searchpath"
INSTEAD = {
    "hydra.run": "trainer.default_local_dir names the run's folder",
    "hydra.sweep": "trainer.default_local_dir names the jobs' folders, e.g. 'x/${trainer.seed}'",
    "hydra.sweeper": "--multirun runs a job for each combination of listed values: key=a,b",
    "hydra.launcher": "--multirun runs jobs one after another",
    "hydra.mode": "--multirun runs several jobs",
    "hydra.output_subdir": "the whole config is config.yaml in the run's folder",
    "hydra.job.chdir": "the working directory stays, so that relative paths of the config mean the same everywhere",
}
"""Replacements of Hydra's keys, by the beginnings of the keys."""
ASKS_NOTHING: dict[str, JSON] = {"hydra.job.chdir": False, "hydra.output_subdir": None}
"""Values that ask for no more than happens without them."""
FILLED_IN = ("hydra.runtime.", "hydra.overrides.", "hydra.job.config_name", "hydra.job.override_dirname")
"""Beginnings of the keys that Hydra sets itself, over any YAML file."""


def read_override(text: str) -> Override:
    """Parse one override in Hydra's grammar. Raises ConfigError that shows how overrides are written.

    A value with an apostrophe that is no quotation mark, as in a path, is text.
    """
    key, equals, value = text.partition("=")
    parser = OverridesParser.create()
    try:
        return parser.parse_override(text)
    except HydraException as error:
        if equals and "'" in value and not value.startswith(tuple("'\"[{")):
            return parser.parse_override(f"{key}={quoted(value)}")
        raise ConfigError(
            f"{text}: this is no override ({error}). One is key=value, with lists as [a,b] and mappings as {{a: b}}; a "
            "value with blanks or other special characters has quotes inside those of the shell: 'key=\"a, b\"'"
        ) from error


def quoted(text: str) -> str:
    """Write a text in Hydra's grammar of overrides, in which no character then means anything."""
    # Before a quotation mark, backslashes are doubled.
    inner = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{inner}'"


def is_of_hydra(override: Override) -> bool:
    """Check whether an override sets a key, or a group, of Hydra's own."""
    return override.key_or_group.startswith(("hydra.", "hydra/"))


def faults_of_yaml(tree: DictConfig, default: DictConfig) -> list[str]:
    """Write the messages for keys of Hydra's own that YAML files set and that are not taken.

    Args:
        tree: what Hydra composed, with its section `hydra`.
        default: the same without any YAML file.
    """
    own, chosen = dict(leaves(default)), tree.hydra.runtime.choices
    # A group of Hydra's own, as `defaults: [override hydra/launcher: joblib]` chooses it, sets many keys at once.
    groups = [key for key, value in chosen.items() if default.hydra.runtime.choices.get(key, value) != value]
    within = tuple(f"{group.replace('/', '.')}." for group in groups)
    keys = [
        key
        for key, value in leaves(tree)
        if not any((key, value) in known.items() for known in (own, ASKS_NOTHING))
        and not key.startswith((*FILLED_IN, *within))
    ]
    return [fault for key in [*groups, *keys] if (fault := refused(key)) is not None]


def refused(key: str) -> str | None:
    """Write the message for a key, or a group, of Hydra's own that is not taken; None for a supported one."""
    if key == SEARCHPATH:
        return None
    place = f"{key.replace('/', '.')}."
    why = next((f": {text}" for name, text in INSTEAD.items() if place.startswith(f"{name}.")), "")
    return f"{key} has no effect here{why}. Leave it out; of Hydra's own keys only {SEARCHPATH} is taken"


def leaves(tree: DictConfig) -> Iterator[tuple[str, JSON]]:
    """Yield keys of the section `hydra`, dotted, and their values."""
    section: JSON = OmegaConf.to_container(tree.hydra, resolve=False, enum_to_str=True)  # type: ignore[assignment]
    waiting: list[tuple[str, JSON]] = [("hydra", section)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [(f"{key}.{name}", item) for name, item in value.items()]
        else:
            yield key, value
