"""A model's config, with values of the run's in it."""

from __future__ import annotations

from collections.abc import Mapping

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON

OVERRIDE_KEY = "actor_rollout_ref.model.override_config"


def read_config(path: str, override: Mapping[str, JSON], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read the config of the model at `path`; values of `override` replace the file's values, sections merged.

    Raises ConfigError for a name that both the file and the config's class lack, since it would change nothing. Errors
    of transformers pass.
    """
    config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if not override:
        return config
    written, _ = PretrainedConfig.get_config_dict(path, trust_remote_code=trust_remote_code)
    known = config.to_dict().keys() | written.keys() | {"rope_scaling"}
    if unknown := sorted(override.keys() - known):
        raise ConfigError(f"{OVERRIDE_KEY}: the config of {path} ({type(config).__name__}) has no {', '.join(unknown)}")
    try:
        found = type(config).from_dict(merged(written, override))
    except (TypeError, ValueError, KeyError, StrictDataclassError) as error:
        raise ConfigError(f"{OVERRIDE_KEY}: {type(config).__name__} does not take it: {error}") from error
    found.name_or_path = config.name_or_path
    return found


def merged(old: Mapping[str, JSON], new: Mapping[str, JSON]) -> dict[str, JSON]:
    """Replace values of `old` by values of `new`; sections that both have are merged."""
    result = dict(old)
    for name, value in new.items():
        section = result.get(name)
        both = isinstance(value, dict) and isinstance(section, dict)
        result[name] = merged(section, value) if both else value  # type: ignore[arg-type]
    return result
