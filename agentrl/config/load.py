"""From the command line and the YAML files to a checked config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
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
from agentrl.config.files import find_files
from agentrl.config.keys import MISSING, defaults, flatten, leaf_keys, nearest
from agentrl.config.section import Section
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import SFTConfig
from agentrl.config.sections.training import Config
from agentrl.config.verl_keys import translate
from agentrl.errors import ConfigError
from agentrl.system.config_files import configs_dir
from agentrl.system.publish import published

logger = logging.getLogger(__name__)

SchemaT = TypeVar("SchemaT", Config, SFTConfig, GenerateConfig, EvaluateConfig)

RECIPES = {"recipe/data": "data.train_files", "recipe/policy": "actor_rollout_ref.model.path"}
"""Config groups that hold only while their key says `quickstart`: what suits the tiny policy suits no other."""


def load_config(
    argv: Sequence[str],
    config_name: str = "train",
    schema: type[SchemaT] = Config,  # type: ignore[assignment]
) -> SchemaT:
    """The config of `configs/<config_name>.yaml` with the overrides and flags of a command line.

    `--help` and `--cfg job` print and raise SystemExit(0). Raises ConfigError for whatever is wrong with a key.
    """
    command = parse_command_line(argv, config_name, schema)
    try:
        tree = compose_tree(command, schema)
        values = resolve(tree, schema)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error).partition("Config search path")[0].strip()
        raise ConfigError(f"the config cannot be put together: {reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"a config file is not valid YAML: {error}") from error
    config = validate(values, schema)
    check(config, set_by_user(config, schema))
    config = validate(find_files(values), schema)
    if command.show_config:
        sys.stdout.write(OmegaConf.to_yaml(config_to_dict(config)))
        raise SystemExit(0)
    return config


def config_to_dict(config: Section) -> dict[str, Any]:
    """Plain values, ready for YAML and JSON."""
    return config.model_dump(mode="json")


def write_config(config: Section, path: Path) -> None:
    """Write the config as YAML, whole or not at all; `--config-path <its folder> --config-name config` loads it."""
    with published(path) as temporary:
        temporary.write_text(OmegaConf.to_yaml(config_to_dict(config)), encoding="utf-8")


def compose_tree(command: CommandLine, schema: type[Section]) -> DictConfig:
    """What the YAML files and the overrides say. The quickstart's recipes are left out where they do not apply."""
    folder = command.config_path.expanduser().resolve() if command.config_path is not None else configs_dir()
    if not (folder / f"{command.config_name.removesuffix('.yaml')}.yaml").is_file():
        known = sorted({path.stem for place in {folder, configs_dir()} for path in place.glob("*.yaml")})
        raise ConfigError(f"--config-name {command.config_name}: no such file in {folder}; known: {', '.join(known)}")
    overrides = [normalise(text, folder, schema) for text in command.overrides]
    tree = hydra_compose(folder, command.config_name, overrides)
    chosen = tree.hydra.runtime.choices
    dropped = [
        f"~{group}"
        for group, key in RECIPES.items()
        if chosen.get(group) == "quickstart"
        and OmegaConf.select(tree, key) != "quickstart"
        and not any(text.startswith(f"{group}=") for text in overrides)
    ]
    return hydra_compose(folder, command.config_name, overrides + dropped) if dropped else tree


def hydra_compose(folder: Path, name: str, overrides: list[str]) -> DictConfig:
    with initialize_config_dir(str(folder), version_base="1.3"):
        ours = f"hydra.searchpath=[file://{configs_dir()}]"
        return compose(name, overrides=[ours, *overrides], return_hydra_config=True)


def normalise(text: str, folder: Path, schema: type[Section]) -> str:
    """One override, so that Hydra takes it whether or not a YAML file holds its key; the schema judges keys later."""
    text = long_key(text, schema)
    override = OverridesParser.create().parse_override(text)
    if override.is_sweep_override():
        raise ConfigError(f"{text}: one value is expected; a list is written {override.key_or_group}=[a,b]")
    key = override.key_or_group
    is_group = any((place / key).is_dir() for place in (folder, configs_dir()))
    if is_group and not override.is_delete() and not isinstance(override.value(), str | list):
        raise ConfigError(f"{text}: {key} is a section; set the keys under it, or leave it out")
    if is_group or "/" in key:
        return text
    if override.is_delete():
        if key not in (leaves := leaf_keys(schema)):
            raise ConfigError(unknown_keys([key], list(leaves)))
        return text
    return "++" + text.lstrip("+")


def long_key(text: str, schema: type[Section]) -> str:
    """The override with its key in full, where the schema takes a short one for it."""
    key = text.lstrip("+~")
    for short, long in schema.short_keys.items():
        if key.startswith(short):
            return text.removesuffix(key) + long + key.removeprefix(short)
    return text


def resolve(tree: DictConfig, schema: type[Section]) -> dict[str, Any]:
    """The schema's defaults with the tree's values over them, interpolations resolved and keys checked."""
    given = OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])
    leaves = leaf_keys(schema)
    flat = flatten(OmegaConf.to_container(given, resolve=False), leaves)  # type: ignore[arg-type]
    for key, value in flat.items():
        if is_section(key, leaves) and value != {}:
            raise ConfigError(f"{key}: expected keys under it, e.g. {key}.{first_key(key, leaves)}, found {value!r}")
    unknown = {key: value for key, value in flat.items() if key not in leaves and value != {}}
    strangers, notes = translate(unknown)
    if strangers:
        raise ConfigError(unknown_keys(strangers, list(leaves)))
    for note in notes:
        logger.warning("note: %s", note)
    merged = OmegaConf.create(defaults(schema))
    for key, value in flat.items():
        if key in leaves:
            OmegaConf.update(merged, key, value, merge=False)
    missing = sorted(OmegaConf.missing_keys(merged))
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given, e.g. {missing[0]}=...")
    return OmegaConf.to_container(merged, resolve=True)  # type: ignore[return-value]


def is_section(key: str, leaves: dict[str, Any]) -> bool:
    return any(leaf.startswith(f"{key}.") for leaf in leaves)


def first_key(section: str, leaves: dict[str, Any]) -> str:
    return next(leaf for leaf in leaves if leaf.startswith(f"{section}.")).removeprefix(f"{section}.")


def unknown_keys(strangers: list[str], known: list[str]) -> str:
    """The message for keys that do not exist."""
    lines = []
    for key in strangers:
        near = nearest(key, known)
        lines.append(f"unknown key {key}" + (f"; did you mean {' or '.join(near)}?" if near else ""))
    return "\n".join(lines) + ("\n(--cfg job prints all keys)" if not all("?" in line for line in lines) else "")


def validate(values: dict[str, Any], schema: type[SchemaT]) -> SchemaT:
    """Types and ranges. Raises ConfigError that names key, expectation and what was found."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, schema))) from error


def explain(error: ValidationError, schema: type[Section]) -> list[str]:
    """One line a key that has a wrong value."""
    leaves = leaf_keys(schema)
    expected: dict[str, list[str]] = {}
    found: dict[str, Any] = {}
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
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
    return lines


def set_by_user(config: Section, schema: type[Section]) -> dict[str, Any]:
    """Keys whose value is neither the schema's default nor that of one of our recipes."""
    leaves = leaf_keys(schema)
    ours = [flatten(defaults(schema), leaves)]
    for path in sorted((configs_dir() / "recipe").rglob("*.yaml")):
        recipe = OmegaConf.to_container(OmegaConf.load(path))
        assert isinstance(recipe, dict)
        ours.append(flatten({str(key): value for key, value in recipe.items()}, leaves))
    final = flatten(config_to_dict(config), leaves)
    return {
        key: value
        for key, value in final.items()
        if all(key not in known or known[key] != value for known in ours) and "${" not in str(ours[0].get(key, MISSING))
    }
