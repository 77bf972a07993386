"""What a config chooses by name: that it is there, and takes the options that it is given.

A user's files are loaded here; of ours nothing is imported that has no options.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.registries import CALL_FORMATS
from agentrl.config.section import Section
from agentrl.config.sections.sft import SFTConfig
from agentrl.config.sections.training import Config
from agentrl.errors import ConfigError
from agentrl.system.targets import is_target


def check_choices(config: Section) -> Iterator[str]:
    """Yield a message for each choice that does not exist, or does not take its options."""
    if isinstance(config, Config):
        yield from check_format(config.actor_rollout_ref.rollout.multi_turn.format, CALL_FORMATS.key)
    if isinstance(config, SFTConfig):
        yield from check_format(config.format, "format")


def check_format(name: str, key: str) -> Iterator[str]:
    """Check targets only: families are judged where the tokenizer is loaded, as their package imports it."""
    name = name.removeprefix("template:")
    if is_target(name):
        try:
            CALL_FORMATS.get(name, key)
        except ConfigError as error:
            yield str(error)
