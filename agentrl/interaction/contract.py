"""The contract of an interaction: the other side of a dialogue, which answers the policy with user turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from agentrl.errors import ConfigError, DataError
from agentrl.system.numbers import finite
from agentrl.system.plugin import Entry, describe, read_entries
from agentrl.system.user_code import answer_of, wrong
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

    Each method is awaited with the call deadline. A fault of what it asks (a server, a time-out: see
    `agentrl.system.user_code`) has the trajectory tried again; any other exception is an error of its code, which
    ends the run.
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


async def ask(interaction: Interaction, method: str, /, *arguments: Any, **kwargs: Any) -> Any:
    """Await a method of an interaction, and check what it gives.

    Raises what it raises for a fault, and CodeError for an error of its code or an answer that it must not give.
    """
    what, code = f"interaction {interaction.name}", getattr(interaction, method)
    answer = await answer_of(what, code, partial(code, *arguments, **kwargs))
    problem = _PROBLEMS[method](answer) if method in _PROBLEMS else None
    if problem is not None:
        raise wrong(what, code, problem)
    return answer


def _opening_problem(text: Any) -> str | None:
    return None if text is None or isinstance(text, str) else f"it must return a text or None, found {text!r:.100}"


def _score_problem(score: Any) -> str | None:
    if score is None or finite(score) is not None:
        return None
    return f"it must return a finite number or None, found {score!r:.100}"


def _answer_problem(answer: Any) -> str | None:
    if not isinstance(answer, InteractionResponse):
        return f"it must return an InteractionResponse, found {type(answer).__name__} {answer!r:.100}"
    expected = {
        "should_end": (
            "true or false",
            not isinstance(answer.should_end, str) and hasattr(answer.should_end, "__bool__"),
        ),
        "text": ("a text", isinstance(answer.text, str)),
        "score": ("a finite number", finite(answer.score) is not None),
        "extra": ("a mapping", isinstance(answer.extra, Mapping)),
        "history": ("a list of messages or None", answer.history is None or _are_messages(answer.history)),
    }
    for name, (kind, fits) in expected.items():
        if not fits:
            return f"the {name} of its InteractionResponse must be {kind}, found {getattr(answer, name)!r:.100}"
    history = answer.history
    ends = history is not None and (not history or history[-1]["role"] == "assistant")
    if ends and not answer.text and not answer.should_end:
        return (
            "a rewritten history must end with a message that the policy answers: end `history` with one, or give "
            "`text`"
        )
    return None


def _are_messages(history: Any) -> bool:
    return isinstance(history, (list, tuple)) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in history
    )


_PROBLEMS: dict[str, Callable[[Any], str | None]] = {
    "open_dialogue": _opening_problem,
    "generate_response": _answer_problem,
    "calculate_score": _score_problem,
}
"""By method: what is wrong with an answer."""


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
