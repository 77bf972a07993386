"""Where our YAML files lie, and where files that keys name are looked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from agentrl.errors import ConfigError

PACKAGE = Path(__file__).resolve().parent.parent

FILE_KEYS = (
    "actor_rollout_ref.model.chat_template",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "custom_reward_function.path",
    "reward_model.judge.prompt",
)
"""Keys that name one file."""


def configs_dir() -> Path:
    """Our `configs/`: inside the installed package, or at the root of the checkout it is installed from."""
    installed = PACKAGE / "_configs"
    return installed if installed.is_dir() else PACKAGE.parent / "configs"


def find_file(key: str, name: str) -> str:
    """The file, relative to the working directory or else to `configs/`. Raises ConfigError where it is in neither."""
    for folder in (Path(), configs_dir()):
        if (folder / Path(name).expanduser()).is_file():
            return str(folder / Path(name).expanduser())
    raise ConfigError(f"{key}: there is no file {name} in the working directory {Path.cwd()} or in {configs_dir()}")


def find_files(values: dict[str, Any]) -> dict[str, Any]:
    """The config's tree of values with the names under `FILE_KEYS` replaced by the paths of the files."""
    tree = OmegaConf.create(values)
    for key in FILE_KEYS:
        name = OmegaConf.select(tree, key)
        if name is not None:
            OmegaConf.update(tree, key, find_file(key, name))
    return OmegaConf.to_container(tree)  # type: ignore[return-value]
