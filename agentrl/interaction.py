"""The contract of an interaction: the other side of a dialogue, which answers the policy with user turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from agentrl.errors import ConfigError
from agentrl.plugin import Entry, describe, read_entries
from agentrl.trajectory import Message


@dataclass(frozen=True, slots=True)
class InteractionResponse:
    """The interaction's answer to one assistant turn."""

    should_end: bool
    """True: the dialogue is over and `text` is not shown to the policy."""
    text: str
    score: float
    """Turn score: it belongs to the assistant turn just judged."""
    extra: dict[str, Any] = field(default_factory=dict)


class Interaction(ABC):
    """Subclass it, name the class in an interaction YAML (`class_name`, `config`, `name`), and name it in a row's
    `interaction_kwargs: {name: ...}`. One object serves all trajectories; state is kept by `instance_id`.

    An exception fails the trajectory as an infrastructure fault. Each method is awaited with the call deadline.
    """

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config = config
        self.name = name

    @abstractmethod
    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Called once a trajectory with the row's `interaction_kwargs` (without `name`)."""

    @abstractmethod
    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        """Judge the last assistant message and answer it. `messages` is the whole dialogue and must not be changed."""

    async def calculate_score(self, instance_id: str) -> float | None:
        """A score for the whole dialogue, or None. Asked once, before `finalize_interaction`."""
        return None

    async def finalize_interaction(self, instance_id: str) -> None:
        """Called exactly once for every started instance, however the trajectory ended."""
        return None


def load_interactions(path: str | Path | None) -> dict[str, Interaction]:
    """By name, from a YAML file (None: none). Its path is relative to the working directory, else to `configs/`.

        interaction:
          - name: gsm8k
            class_name: interactions.gsm8k.Gsm8kInteraction
            config: {}

    Raises ConfigError naming the file and the entry.
    """
    loaded: dict[str, Interaction] = {}
    for entry in read_entries(path, "interaction") if path is not None else []:
        interaction = _of_entry(entry)
        if interaction.name in loaded:
            raise entry.error(f"two interactions are called {interaction.name!r}: give one of them another name")
        loaded[interaction.name] = interaction
    return loaded


def _of_entry(entry: Entry) -> Interaction:
    entry.check_keys(("name", "class_name", "config"))
    name = entry.text("name")
    interaction_class = entry.load(entry.text("class_name"), Interaction)
    try:
        interaction = interaction_class(entry.mapping("config"), name)
    except pydantic.ValidationError as error:
        raise entry.error(f"config: {describe(error)}") from error
    except ConfigError as error:
        raise entry.error(str(error)) from error
    except Exception as error:
        raise entry.error(f"cannot be made: {type(error).__name__}: {error}") from error
    assert isinstance(interaction, Interaction)
    return interaction
