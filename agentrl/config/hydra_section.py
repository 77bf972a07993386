"""Hydra's own keys, `hydra.*`: the supported ones, and why others are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON, as_mapping

NOW = "${now:%Y-%m-%d}/${now:%H-%M-%S}"
RUN_DIR, SWEEP_DIR, SUBDIR = "run.dir", "sweep.dir", "sweep.subdir"
DEFAULTS = {RUN_DIR: f"outputs/{NOW}", SWEEP_DIR: f"multirun/{NOW}", SUBDIR: "${hydra.job.num}"}
"""Keys that Hydra sets by itself, which do not count as given."""
PARAMS = "hydra.sweeper.params."
TAKEN = {
    "hydra.run.dir": "the run's folder, as trainer.default_local_dir",
    "hydra.sweep.dir": "the folder of a sweep",
    "hydra.sweep.subdir": "a job's folder in it",
    "hydra.searchpath": "further folders of YAML files",
    "hydra.job.name": "a name for the folders above",
    "hydra.job.chdir": "only false",
    "hydra.output_subdir": "only null",
    f"{PARAMS}<key>": "values of a key, with --multirun",
}
"""The accepted keys, each with its meaning here."""
OF_SWEEPS = ("hydra.sweep.", PARAMS)
"""Beginnings of the keys that are read with --multirun only. A YAML file may have them for its sweeps."""
FILLED_IN = ("hydra.runtime.", "hydra.overrides.", "hydra.job.config_name", "hydra.job.override_dirname")
"""Beginnings of the keys that Hydra sets itself, over any YAML file."""
_OF_HYDRA = re.compile(r"\$\{(hydra[.:][^{}]+|now:[^{}]+)\}")


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


def fault_of(override: Override, *, multirun: bool) -> str | None:
    """Write the message for an override of a key of Hydra's own that is not taken; None for a supported override."""
    key = override.key_or_group
    if key.startswith(OF_SWEEPS) and not multirun:
        return f"{key} is read with --multirun only"
    return refused(key, override.value())


def faults_of_yaml(tree: DictConfig, default: DictConfig) -> list[str]:
    """Write the messages for keys of Hydra's own that YAML files set and that are not taken.

    Args:
        tree: what Hydra composed, with its section `hydra`.
        default: the same without any YAML file.
    """
    own, chosen = dict(leaves(default)), tree.hydra.runtime.choices
    # A group of Hydra's own, as `defaults: [override hydra/launcher: joblib]` chooses it, sets many keys at once.
    groups = {key: value for key, value in chosen.items() if default.hydra.runtime.choices.get(key, value) != value}
    within = tuple(f"{group.replace('/', '.')}." for group in groups)
    keys = {
        key: value
        for key, value in leaves(tree)
        if (key, value) not in own.items() and not key.startswith((*FILLED_IN, *within))
    }
    return [fault for key, value in {**groups, **keys}.items() if (fault := refused(key, value)) is not None]


def refused(key: str, value: object) -> str | None:
    """Write the message for a key of Hydra's own with a value that is not taken; None for a supported one."""
    if key == "hydra.job.chdir" and value:
        return (
            "hydra.job.chdir=true: the working directory stays as it is, so that relative paths of the config mean the "
            "same everywhere; hydra.run.dir names the run's folder"
        )
    if key == "hydra.output_subdir" and value is not None:
        return f"{key}={value}: the whole config is config.yaml in the run's folder; leave {key} out"
    if key in ("hydra/launcher", "hydra/sweeper"):
        said = f"{key}={value}: jobs of a sweep run one after another, all combinations of the values; leave {key} out"
        return None if value == "basic" else said
    if key == "hydra.mode":
        return f"{key}={value}: several jobs are asked for by --multirun"
    if key in TAKEN or key.startswith(PARAMS):
        return None
    known = ", ".join(f"{name} ({what})" for name, what in TAKEN.items())
    return f"{key}: of Hydra's own keys these are taken: {known}"


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


def given_dir(tree: DictConfig, name: str) -> str | None:
    """Return `hydra.<name>` as it is written, where YAML or command line set it; None for Hydra's own default."""
    section, key = name.split(".")
    written = as_mapping(OmegaConf.to_container(tree.hydra[section], resolve=False)).get(key)  # type: ignore[arg-type]
    return None if written == DEFAULTS[name] else str(written)


def resolved(text: str, tree: DictConfig, job: Mapping[str, str] = {}) -> str:
    """Fill in Hydra's own interpolations (`${hydra.job.name}`, `${now:%Y}`), and leave our keys' as they are.

    job: values of a sweep's job, by their names under `hydra.job`.
    """

    def found(match: re.Match[str]) -> str:
        name = match[1].replace("hydra:", "hydra.", 1)
        number = name.removeprefix("hydra.job.")
        if number in job:
            return job[number]
        return str(OmegaConf.create({"found": f"${{{name}}}", "hydra": tree.hydra}).found)

    return _OF_HYDRA.sub(found, text)
