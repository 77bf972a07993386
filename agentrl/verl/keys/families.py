"""Families: trainers of verl's releases, recipes and forks, each a YAML file of ours that builds on `ppo_trainer`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from agentrl.config.keys import flatten, leaf_keys
from agentrl.config.sections.training import Config
from agentrl.system.json_value import JSON, as_object

FAMILY = "family"
"""The key by which the YAML file of a family names itself, for the files that build on it, too."""
BASE = "ppo_trainer"
CONFIGS = Path(__file__).parent.parent / "configs"
LENT = Path(__file__).with_name("lent.txt")
"""The defaults of verl 0.9.1 that `ppo_trainer` leaves out, as nothing here reads them."""


@functools.cache
def base_defaults() -> Mapping[str, JSON]:
    """Return the values of `ppo_trainer` by dotted path, interpolations as they are written."""
    return _written(BASE)


def lent_defaults() -> dict[str, JSON]:
    """Return verl's defaults that `ppo_trainer` leaves out, interpolations as written: a user's may name them."""
    lines = (line.split(" ", 1) for line in LENT.read_text(encoding="utf-8").splitlines())
    return {key: json.loads(value) for key, value in lines}


@functools.cache
def own_defaults(family: JSON) -> Mapping[str, JSON]:
    """Return the values by which a family differs from `ppo_trainer`; empty for a name that no file has."""
    if not isinstance(family, str) or family not in {path.stem for path in CONFIGS.glob("*.yaml")}:
        return {}
    base = base_defaults()
    return {key: value for key, value in _written(family).items() if key not in base or base[key] != value}


def _written(name: str) -> dict[str, JSON]:
    """Return the values of a file and of the files that it builds on; `ppo_trainer` lends its values to no other."""
    tree = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    found: dict[str, JSON] = {}
    for below in tree.pop("defaults", []):
        if isinstance(below, str) and below not in (BASE, "_self_"):
            found |= _written(below)
    return found | flatten(as_object(tree), leaf_keys(Config))


def held(values: Mapping[str, JSON]) -> set[str]:
    """Find the keys of a config whose values are the defaults of its family."""
    return {key for key, value in own_defaults(values.get(FAMILY)).items() if key in values and values[key] == value}


def in_the_base(values: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the values of a config with the defaults of `ppo_trainer` in place of its family's."""
    own, base = held(values), base_defaults()
    found = {key: value for key, value in values.items() if key not in own}
    return found | {key: base[key] for key in own if key in base}


def given(values: Mapping[str, JSON]) -> set[str]:
    """Find the keys of a config that are at no default of verl's or of its family; interpolations are defaults."""
    ours = {key for key, value in base_defaults().items() if value == values.get(key) or "${" in str(value)}
    ours |= {key for key, value in lent_defaults().items() if value == values.get(key)}
    return values.keys() - ours - held(values)
