"""Lookup of files that config keys name, and of the YAML files that come with the package."""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import ConfigError
from agentrl.system.texts import is_there

PACKAGE = Path(__file__).resolve().parent.parent


def configs_dir() -> Path:
    """Return the package's `configs/`: inside the installed package, or at the root of the checkout."""
    installed = PACKAGE / "_configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def our_folders() -> list[Path]:
    """List the folders of our own YAML files, the annexes' after the core's."""
    return [configs_dir(), *sorted(PACKAGE.glob("*/configs"))]


def find_file(key: str, name: str) -> str:
    """Find a file in the working directory, else in our folders. Raises ConfigError where all lack it."""
    for folder in (Path(), *our_folders()):
        if is_there(folder / Path(name).expanduser()):
            return str(folder / Path(name).expanduser())
    raise ConfigError(f"{key}: there is no file {name} in the working directory {Path.cwd()} or in {configs_dir()}")
