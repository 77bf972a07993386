"""Loading: from the command line and YAML files to a checked config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from agentrl.config.checks import check
from agentrl.config.command_line import CommandLine, parse_command_line
from agentrl.config.keys import MISSING, all_keys, defaults, flatten, leaf_keys, nearest, nested
from agentrl.config.rules import NamesFile
from agentrl.config.section import Section
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import SFTConfig
from agentrl.config.sections.training import Config
from agentrl.config.verl_keys import translate
from agentrl.errors import ConfigError
from agentrl.system.config_files import configs_dir, find_file
from agentrl.system.publish import published

logger = logging.getLogger(__name__)

SchemaT = TypeVar("SchemaT", Config, SFTConfig, GenerateConfig, EvaluateConfig)

RECIPES = {"recipe/data": "data.train_files", "recipe/policy": "actor_rollout_ref.model.path"}
"""Config groups that hold only while their key says `quickstart`: what suits the tiny policy suits no other."""
EVERY_KEY = "every_key"
"""The key by which a YAML file says that it holds every key: one with its default value was then not given."""


def load_config(
    argv: Sequence[str],
    config_name: str = "train",
    schema: type[SchemaT] = Config,  # type: ignore[assignment]
) -> SchemaT:
    """Load `configs/<config_name>.yaml` with the overrides and flags of a command line.

    `--help` and `--cfg job` print and raise SystemExit(0). Raises ConfigError with a line for each wrong key: first for
    keys that do not exist and for values of the wrong kind, then for keys that do not fit together.
    """
    command = parse_command_line(argv, config_name, schema)
    try:
        config = checked(compose_keys(command, schema), schema)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).partition("Config search path")[0].strip()
        raise ConfigError(f"the config cannot be put together: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"a config file is not valid YAML: {error}") from error
    if command.show_config:
        sys.stdout.write(config_to_yaml(config))
        raise SystemExit(0)
    return config


def config_to_dict(config: Section) -> dict[str, Any]:
    """Convert a config to plain values, ready for YAML and JSON."""
    return config.model_dump(mode="json")


def config_to_yaml(config: Section) -> str:
    """Convert a config to YAML with every key, which loads as the same config."""
    return OmegaConf.to_yaml({EVERY_KEY: True, **config_to_dict(config)})


def write_config(config: Section, path: Path) -> None:
    """Write the config as YAML, whole or not at all; `--config-path <its folder> --config-name config` loads it."""
    with published(path) as temporary:
        temporary.write_text(config_to_yaml(config), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that YAML files and command line name."""

    values: Mapping[str, Any]
    """Values by dotted path, interpolations unresolved."""
    given: Collection[str]
    """The keys that the user gave, not a recipe of ours."""
    typed: Collection[str] = ()
    """The keys and sections that stand on the command line."""
    faults: Sequence[str] = ()
    """Messages for overrides that are wrong by themselves."""


def compose_keys(command: CommandLine, schema: type[Section]) -> Keys:
    """Let Hydra put YAML files and overrides together.

    Raises ConfigError for a file that is not there and for an override that cannot be read.
    """
    folder = folder_of(command)
    overrides = [Override.parse(text, folder, schema) for text in command.overrides]
    texts = [override.text for override in overrides if override.text is not None]
    tree, own = compose_trees(folder, command.config_name, texts, schema)
    typed = [override.key for override in overrides]
    deleted = [override.deletes for override in overrides if override.deletes is not None]
    known = known_by(schema)
    values = {key: value for key, value in flat(tree, known).items() if not is_at(key, deleted)}
    mine = {key: value for key, value in flat(own, known).items() if key in values}
    given = set_of(mine, schema, typed) if values.pop(EVERY_KEY, False) else mine.keys()
    return Keys(values, given, typed, [override.fault for override in overrides if override.fault is not None])


def set_of(values: Mapping[str, Any], schema: type[Section], typed: Collection[str]) -> set[str]:
    """Find the keys that count as given where a file holds every key: those that differ from the default, and those
    on the command line."""
    default = flatten(defaults(schema), leaf_keys(schema))
    return {key for key, value in values.items() if value != default.get(key, MISSING) or is_at(key, typed)}


def folder_of(command: CommandLine) -> Path:
    """Find the folder of the YAML file to start from. Raises ConfigError where the file is not there."""
    folder = command.config_path.expanduser().resolve() if command.config_path is not None else configs_dir()
    if not (folder / f"{command.config_name.removesuffix('.yaml')}.yaml").is_file():
        known = sorted({path.stem for place in {folder, configs_dir()} for path in place.glob("*.yaml")})
        raise ConfigError(f"--config-name {command.config_name}: no such file in {folder}; known: {', '.join(known)}")
    return folder


def compose_trees(folder: Path, name: str, texts: list[str], schema: type[Section]) -> tuple[DictConfig, DictConfig]:
    """Compose the tree with the quickstart's recipes that apply, and the one without any, which is the user's own."""
    tree = hydra_compose(folder, name, texts)
    chosen = tree.hydra.runtime.choices
    recipes = [
        group
        for group in RECIPES
        if chosen.get(group) == "quickstart" and not any(text.startswith(f"{group}=") for text in texts)
    ]
    if not recipes:
        return tree, tree
    own = hydra_compose(folder, name, [*texts, *(f"~{group}" for group in recipes)])
    dropped = [group for group in recipes if not applies(RECIPES[group], own, schema)]
    if dropped == recipes:
        return own, own
    return (hydra_compose(folder, name, [*texts, *(f"~{group}" for group in dropped)]) if dropped else tree), own


def hydra_compose(folder: Path, name: str, overrides: list[str]) -> DictConfig:
    """Compose one YAML file, those it builds on, and overrides; the tree has Hydra's own section `hydra`, too."""
    with initialize_config_dir(str(folder), version_base="1.3"):
        ours = f"hydra.searchpath=[file://{configs_dir()}]"
        return compose(name, overrides=[ours, *overrides], return_hydra_config=True)


def applies(key: str, own: DictConfig, schema: type[Section]) -> bool:
    """Say whether the recipe of `key` applies: the key is there, and says `quickstart`."""
    field = leaf_keys(schema).get(key)
    return field is not None and OmegaConf.select(own, key, default=field.default) == "quickstart"


def known_by(schema: type[Section]) -> dict[str, Any]:
    """Map the keys that may stand in a YAML file, those that are not read included, to their fields."""
    return (leaf_keys(schema.ignored) if schema.ignored is not None else {}) | leaf_keys(schema)


def flat(tree: DictConfig, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a tree that Hydra made to values by dotted path."""
    given = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])
    return flatten(OmegaConf.to_container(given, resolve=False), leaves)  # type: ignore[arg-type]


def is_at(key: str, places: Collection[str]) -> bool:
    """Say whether the key, or a section around it, is among `places`."""
    return any(key == place or key.startswith(f"{place}.") for place in places)


@dataclass(frozen=True, slots=True)
class Override:
    """One override of the command line."""

    key: str
    text: str | None = None
    """The override as Hydra takes it whether or not a YAML file holds its key; None: Hydra has no part in it."""
    deletes: str | None = None
    """The key or section that goes back to its default."""
    fault: str | None = None

    @staticmethod
    def parse(text: str, folder: Path, schema: type[Section]) -> Override:
        """Read one override. Raises ConfigError and Hydra's errors for one that cannot be read."""
        text = long_key(text, schema)
        override = OverridesParser.create().parse_override(text)
        if override.is_sweep_override():
            raise ConfigError(f"{text}: one value is expected; a list is written {override.key_or_group}=[a,b]")
        key, leaves = override.key_or_group, known_by(schema)
        deletes = override.is_delete()
        is_group = any((place / key).is_dir() for place in (folder, configs_dir()))
        if is_group and (deletes or "/" in key or isinstance(override.value(), str | list)):
            return Override(key, text)
        if deletes:
            known = key in leaves or is_section(key, leaves)
            return Override(key, deletes=key, fault=None if known else unknown_keys([key], list(leaf_keys(schema))))
        if is_section(key, leaves):
            return Override(key, fault=no_section(key, override.value(), leaves))
        return Override(key, "++" + text.lstrip("+"))


def long_key(text: str, schema: type[Section]) -> str:
    """Write an override with its key in full, where the schema takes a short one for it."""
    key = text.lstrip("+~")
    for short, long in schema.short_keys.items():
        if key.startswith(short):
            return text.removesuffix(key) + long + key.removeprefix(short)
    return text


def checked(keys: Keys, schema: type[SchemaT]) -> SchemaT:
    """Make the config of the schema's defaults and `keys`. Raises ConfigError as `load_config` does."""
    values = resolve(keys, schema)
    config = validate(values, schema, [*keys.faults, *faults_of_names(keys, schema)])
    check(config, keys.given)
    for path, key in all_keys(schema).items():
        if values.get(path) is not None and any(isinstance(rule, NamesFile) for rule, _ in key.rules):
            values[path] = find_file(path, values[path])
    return validate(values, schema)


def faults_of_names(keys: Keys, schema: type[Section]) -> list[str]:
    """Write the messages for keys that do not exist or are not read; log a note for each accepted key of verl."""
    leaves, known, found = leaf_keys(schema), known_by(schema), []
    unknown = {}
    for key, value in keys.values.items():
        if is_section(key, known):
            if value != {}:
                found.append(no_section(key, value, known))
        elif key not in known:
            unknown[key] = value
        elif key not in leaves and is_at(key, keys.typed):
            near = nearest(key, leaves, 1)
            found.append(
                f"{key}={value} has no effect: only training reads it"
                + (f"; did you mean {near[0]}?" if near else f". Leave {key} out")
            )
    strangers, notes, refused = translate({key: value for key, value in unknown.items() if value != {}})
    for note in notes:
        logger.warning("note: %s", note)
    return [*found, *refused, *([unknown_keys(strangers, list(leaves))] if strangers else [])]


def resolve(keys: Keys, schema: type[Section]) -> dict[str, Any]:
    """Return the values of the schema's keys by dotted path, interpolations resolved, without those still missing."""
    leaves, known = leaf_keys(schema), known_by(schema)
    tree = OmegaConf.create(defaults(schema.ignored) if schema.ignored is not None else {})
    for key, value in {**flatten(defaults(schema), leaves), **keys.values}.items():
        if key in known:
            OmegaConf.update(tree, key, value, merge=False)
    values = flatten(OmegaConf.to_container(tree, resolve=True), known)  # type: ignore[arg-type]
    return {key: value for key, value in values.items() if key in leaves and value != MISSING}


def is_section(key: str, leaves: Mapping[str, Any]) -> bool:
    """Say whether there are keys under `key`."""
    return any(leaf.startswith(f"{key}.") for leaf in leaves)


def no_section(section: str, value: Any, leaves: Mapping[str, Any]) -> str:
    """Write the message for a section that has a value."""
    first = next(leaf for leaf in leaves if leaf.startswith(f"{section}."))
    return f"{section}: expected keys under it, e.g. {first}, found {value!r}"


def unknown_keys(strangers: list[str], known: list[str]) -> str:
    """Write the message for keys that do not exist."""
    lines = []
    for key in strangers:
        near = nearest(key, known)
        lines.append(f"unknown key {key}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return "\n".join(lines) + ("\n(--cfg job prints all keys)" if not all("?" in line for line in lines) else "")


def validate(values: Mapping[str, Any], schema: type[SchemaT], faults: Sequence[str] = ()) -> SchemaT:
    """Check types and ranges. Raises ConfigError with `faults` and a line for each wrong value."""
    lines = list(faults)
    try:
        config = schema.model_validate(nested(values))
    except ValidationError as error:
        lines += explain(error, schema)
    if lines:
        raise ConfigError("\n".join(lines))
    return config


def explain(error: ValidationError, schema: type[Section]) -> list[str]:
    """Write a line for each key with a wrong value, and one for all that are missing."""
    leaves = leaf_keys(schema)
    expected: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    missing = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        if item["type"] == "missing" and ".".join(parts) in leaves:
            missing.append(".".join(parts))
            continue
        key = next((".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in leaves), "")
        expected.setdefault(key or ".".join(parts), []).append(
            item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        )
        found.setdefault(key or ".".join(parts), item["input"])
    lines = []
    for key, texts in expected.items():
        description = leaves[key].description if key in leaves else None
        line = f"{key}: expected {' or '.join(dict.fromkeys(texts))}, found {found[key]!r}"
        lines.append(line + (f". {' '.join(description.split())}" if description else ""))
    if missing:
        lines.append(f"{', '.join(sorted(missing))} must be given, e.g. {sorted(missing)[0]}=...")
    return lines
