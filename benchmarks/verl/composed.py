"""verl's own composed configs, read from a clone of verl: the reference for its keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from agentrl.system.json_value import JSON, as_object

TRAINERS = Path("verl", "trainer", "config")
"""The folder of a clone with the YAML that all trainers build on."""


def composed(clone: Path, folder: Path, name: str, overrides: Sequence[str] = ()) -> dict[str, JSON]:
    """Compose the YAML file `name` of `folder` as verl's Hydra does; return its leaves by dotted path.

    Raises Hydra's and OmegaConf's errors for what verl would refuse, too.
    """
    tree = _tree(clone, folder, name, overrides)
    values = as_object(cast(JSON, OmegaConf.to_container(tree, resolve=False)))
    _resolve(tree, values, "")
    return dict(leaves(values))


def written(clone: Path, folder: Path, name: str) -> dict[str, JSON]:
    """Compose the YAML file likewise; its interpolations stay as they are written."""
    return dict(leaves(as_object(cast(JSON, OmegaConf.to_container(_tree(clone, folder, name, ()), resolve=False)))))


def _tree(clone: Path, folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    searched = f"hydra.searchpath=[file://{(clone / TRAINERS).resolve()}]"
    with initialize_config_dir(str(folder.resolve()), version_base=None):
        return compose(name, overrides=[searched, *overrides])


def _resolve(tree: object, values: dict[str, JSON], path: str) -> None:
    """Put in what interpolations stand for; one that says nothing (`???`, a key that is not there) stays as written."""
    for name, value in values.items():
        at = f"{path}.{name}" if path else name
        if isinstance(value, dict):
            _resolve(tree, value, at)
        elif isinstance(value, str) and "${" in value:
            try:
                values[name] = OmegaConf.to_container(OmegaConf.create([OmegaConf.select(tree, at)]))[0]  # type: ignore
            except Exception:
                continue


def leaves(values: Mapping[str, JSON], prefix: str = "") -> Iterator[tuple[str, JSON]]:
    """List the leaves by dotted path; an empty mapping is one."""
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
