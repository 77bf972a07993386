"""The keys that name a file, and the files that they name."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from agentrl.system.config_files import find_file

FILE_KEYS = (
    "actor_rollout_ref.model.chat_template",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "custom_reward_function.path",
    "reward_model.judge.prompt",
)
"""Keys that name one file."""


def find_files(values: dict[str, Any]) -> dict[str, Any]:
    """The config's tree of values with the names under `FILE_KEYS` replaced by the paths of the files."""
    tree = OmegaConf.create(values)
    for key in FILE_KEYS:
        name = OmegaConf.select(tree, key)
        if name is not None:
            OmegaConf.update(tree, key, find_file(key, name))
    return OmegaConf.to_container(tree)  # type: ignore[return-value]
