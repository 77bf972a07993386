"""The date that chat templates write: fixed when a run begins, so that it resumes with the same prompts."""

from __future__ import annotations

from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agentrl.config.read_back import WRITTEN
from agentrl.config.sections.model import PlainModelConfig, written_date
from agentrl.config.sections.sft import TuningConfig
from agentrl.config.sections.trainer import RunConfig
from agentrl.config.sections.training import Config
from agentrl.system.bounded_yaml import UNREADABLE, check_aliases

ConfigT = TypeVar("ConfigT", bound=Config | TuningConfig)


def dated(config: ConfigT) -> ConfigT:
    """Fill model.chat_template_date where it is left open: the date of the run that is resumed, else today's."""
    if isinstance(config, TuningConfig):
        return config.model_copy(update={"model": _dated(config.model, config.trainer, "model")})
    roles = config.actor_rollout_ref
    model = _dated(roles.model, config.trainer, "actor_rollout_ref.model")
    return config.model_copy(update={"actor_rollout_ref": roles.model_copy(update={"model": model})})


def _dated(model: PlainModelConfig, trainer: RunConfig, key: str) -> PlainModelConfig:
    if model.chat_template_date is not None:
        return model
    file, begun = Path(trainer.default_local_dir) / WRITTEN, None
    if trainer.resume_mode != "disable" and file.is_file():
        with suppress(OSError, *UNREADABLE, YAMLError, OmegaConfBaseException):  # the run writes the file again
            check_aliases(file.read_bytes())
            begun = written_date(OmegaConf.select(OmegaConf.load(file), f"{key}.chat_template_date") or "")
    return model.model_copy(update={"chat_template_date": begun or date.today().isoformat()})
