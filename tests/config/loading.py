"""A config from overrides, fast."""

from __future__ import annotations

from omegaconf import OmegaConf

from agentrl.config import Config
from agentrl.config.keys import flatten, leaf_keys
from agentrl.config.load import Keys, checked

OWN = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=some/model")


def load(*overrides: str) -> Config:
    """As load_config with data and a model of one's own, without Hydra's half second."""
    tree = OmegaConf.to_container(OmegaConf.from_dotlist([*OWN, *overrides]))
    values = flatten(tree, leaf_keys(Config))  # type: ignore[arg-type]
    return checked(Keys(values, values.keys()), Config)
