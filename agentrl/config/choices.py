"""What a config chooses by name: that it is there, and takes the options that it is given.

A user's files are loaded here; of ours nothing is imported that has no options.
"""

from __future__ import annotations

from agentrl.config.registries import CALL_FORMATS
from agentrl.config.section import Section
from agentrl.config.sections.sft import SFTConfig
from agentrl.config.sections.training import Config
from agentrl.system.targets import is_target


def check_choices(config: Section) -> None:
    """Raises ConfigError for the first choice that does not exist, or does not take its options."""
    if isinstance(config, Config):
        check_format(config.actor_rollout_ref.rollout.multi_turn.format, CALL_FORMATS.key)
    if isinstance(config, SFTConfig):
        check_format(config.format, "format")


def check_format(name: str, key: str) -> None:
    """Families are judged where the tokenizer is loaded, as their package imports it."""
    name = name.removeprefix("template:")
    if is_target(name):
        CALL_FORMATS.get(name, key)
