"""A config from overrides, fast."""

from __future__ import annotations

from omegaconf import OmegaConf

from agentrl.config import Config
from agentrl.config.checks import check
from agentrl.config.keys import defaults
from agentrl.config.load import set_by_user, validate

OWN = ("data.train_files=train.parquet", "actor_rollout_ref.model.path=some/model")


def load(*overrides: str) -> Config:
    """As load_config with data and a model of one's own, without Hydra's half second."""
    tree = OmegaConf.merge(OmegaConf.create(defaults(Config)), OmegaConf.from_dotlist([*OWN, *overrides]))
    config = validate(OmegaConf.to_container(tree, resolve=True), Config)  # type: ignore[arg-type]
    check(config, set_by_user(config, Config))
    return config
