"""The contract of an interaction: the other side of a dialogue, which answers the policy with user turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from agentrl.errors import ConfigError, DataError
from agentrl.plugin import Entry, describe, read_entries
from agentrl.trajectory import Message


@dataclass(frozen=True, slots=True)
class InteractionResponse:
    """The interaction's answer to one assistant turn."""

    should_end: bool
    """True: the dialogue is over and `text` is not shown to the policy."""
    text: str
    score: float = 0.0
    """Turn score: a reward for the assistant turn just judged, beside that of the row's scorer. So 0 where that scorer
    judges the same."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Its finite numbers become metrics of the trajectory, `score/<name>`; a later turn's replace an earlier one's."""
    history: list[Message] | None = None
    """The dialogue rewritten or compacted, `text` not included: the policy goes on from it, in a new context window."""


class Interaction(ABC):
    """Subclass it, name the class in an interaction YAML (`class_name`, `config`, `name`), and name it in a row's
    `interaction_kwargs: {name: ...}`. One object serves all trajectories; state is kept by `instance_id`.

    An exception fails the trajectory as an infrastructure fault. Each method is awaited with the call deadline.
    """

    config_model: ClassVar[type[pydantic.BaseModel] | None] = None
    """Checks the config, where the interaction has any, and gives `options`."""

    row_model: ClassVar[type[pydantic.BaseModel] | None] = None
    """Checks every row's `interaction_kwargs`, without `name`, before the first step."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        """Raises pydantic.ValidationError when `config_model` refuses the config."""
        self.config = config
        self.name = name
        self.options: Any = self.config_model.model_validate(config) if self.config_model else None

    def check_row(self, kwargs: dict[str, Any]) -> None:
        """Raises DataError for `interaction_kwargs` (without `name`) that `row_model` refuses."""
        try:
            if self.row_model is not None:
                self.row_model.model_validate(kwargs)
        except pydantic.ValidationError as error:
            faults = describe(error, self.row_model.model_fields if self.row_model else ())
            raise DataError(f"interaction_kwargs of {self.name}: {faults}") from error

    async def start(self, run: str) -> None:
        """The run named `run` begins, in its event loop: reach what the interaction needs.

        Raises ConfigError when that cannot be.
        """
        return None

    def take_metrics(self) -> dict[str, float]:
        """Its own numbers since they were last taken; the trainer logs them as `interaction/<name>/...`."""
        return {}

    async def close(self) -> None:
        """The run is over: free what the interaction itself opened."""
        return None

    @abstractmethod
    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Called once a trajectory with the row's `interaction_kwargs` (without `name`)."""

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str | None:
        """What the user says before the policy's first turn, or None; asked once, after `start_interaction`.

        `messages` is the row's prompt. Where that ends with a user message, the text is added to it.
        """
        return None

    @abstractmethod
    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        """Judge the last assistant message and answer it.

        `messages` is the dialogue as the policy sees it (since a rewrite: the rewritten one) and must not be changed.
        """

    async def calculate_score(self, instance_id: str) -> float | None:
        """A score for the whole dialogue, that of its turns included, or None. Asked once, before
        `finalize_interaction`.
        """
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
        model = interaction_class.config_model
        raise entry.error(f"config: {describe(error, model.model_fields if model else ())}") from error
    except ConfigError as error:
        raise entry.error(str(error)) from error
    except Exception as error:
        raise entry.error(f"cannot be made: {type(error).__name__}: {error}") from error
    assert isinstance(interaction, Interaction)
    return interaction
