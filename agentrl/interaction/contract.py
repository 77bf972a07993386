"""Contract of an interaction: the other side of a dialogue, which answers the policy with user turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, ParamSpec, TypeVar

import pydantic

from agentrl.errors import DataError
from agentrl.system.call_journal import OnResume
from agentrl.system.numbers import finite
from agentrl.system.plugin import describe
from agentrl.system.user_code import await_user_code, contract_error
from agentrl.trajectory import Message

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InteractionResponse:
    """Answer of an interaction to one assistant turn."""

    should_end: bool
    """True: the dialogue is over and `text` is not shown to the policy."""
    text: str
    """Text of the user turn."""
    score: float = 0.0
    """Turn score: a reward for the assistant turn just judged, in addition to the row's scorer. So 0 where that scorer
    judges the same."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Values whose finite numbers become metrics of the trajectory, `score/<name>`; a later turn's replace an earlier
    one's."""
    history: list[Message] | None = None
    """Rewritten or compacted dialogue, `text` not included: the policy continues from it, in a new context window."""
    state: str | None = None
    """Name of the state that the policy is in now, for estimators that compare turns taken in the same state; None:
    `text` stands for it."""


class Interaction(ABC):
    """Base class of an interaction. One object serves all trajectories; state is kept by `instance_id`.

    Name the class in an interaction YAML (`class_name`, `config`, `name`), and the interaction in a row's
    `interaction_kwargs: {name: ...}`.

    Each method is awaited with the call deadline. A fault of what it asks (a server, a time-out: see
    `agentrl.system.user_code`) has the trajectory tried again; any other exception is an error of its code, which ends
    the run.
    """

    config_model: ClassVar[type[pydantic.BaseModel] | None] = None
    """Model that checks the config, where the interaction has any, and becomes `options`."""

    row_model: ClassVar[type[pydantic.BaseModel] | None] = None
    """Model that checks every row's `interaction_kwargs`, without `name`, before the first step."""

    on_resume: OnResume = "none"
    """How a trajectory's dialogue comes back when the run was killed; see `OnResume`.

    A class of yours may set it, and the YAML's `on_resume` comes first."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        """Take the YAML's config and name. Raises pydantic.ValidationError when `config_model` refuses the config."""
        self.config = config
        self.name = name
        self.options: pydantic.BaseModel | None = (
            self.config_model.model_validate(config) if self.config_model else None
        )

    @property
    def remembers(self) -> bool:
        """True when answers or score depend on earlier calls that only this process knows.

        The YAML's `on_resume: answers` is refused then. By itself it is so where `calculate_score` is overridden.
        """
        return type(self).calculate_score is not Interaction.calculate_score

    def check_row(self, kwargs: dict[str, Any]) -> None:
        """Raise DataError for `interaction_kwargs` (without `name`) that `row_model` refuses."""
        try:
            if self.row_model is not None:
                self.row_model.model_validate(kwargs)
        except pydantic.ValidationError as error:
            faults = describe(error, self.row_model.model_fields if self.row_model else ())
            raise DataError(f"interaction_kwargs of {self.name}: {faults}") from error

    async def start(self, run: str) -> None:
        """Connect to the interaction's resources, as the run named `run` begins in this event loop.

        Raises ConfigError when a resource cannot be reached.
        """
        return None

    def take_metrics(self) -> Mapping[str, float]:
        """Return and reset its own numbers; the trainer logs them as `interaction/<name>/...`.

        Numbers of several rollout workers are averaged; counts and peaks are kept as such by returning
        `agentrl.interaction.Metrics`.
        """
        return {}

    async def close(self) -> None:
        """Free the interaction's resources at the end of the run."""
        return None

    @abstractmethod
    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a trajectory with the row's `interaction_kwargs` (without `name`)."""

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str | None:
        """Return the user's message before the policy's first turn, or None; asked once, after `start_interaction`.

        `messages` is the row's prompt. Where that ends with a user message, the text is added to it.
        """
        return None

    @abstractmethod
    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        """Judge the last assistant message and answer it.

        `messages` is the dialogue as the policy sees it (since a rewrite: the rewritten one) and must not be changed.
        """

    async def calculate_score(self, instance_id: str) -> float | None:
        """Return a score for the whole dialogue, its turns' scores included, or None.

        Asked once, before `finalize_interaction`. Scorers find it in `score_extra`: by itself it adds nothing to the
        reward, so that one right answer is paid once.
        """
        return None

    async def finalize_interaction(self, instance_id: str) -> None:
        """End the instance. Called exactly once for every started one, however the trajectory ended."""
        return None


async def ask(
    interaction: Interaction, method: Callable[P, Awaitable[T]], /, *arguments: P.args, **kwargs: P.kwargs
) -> T:
    """Await a method of an interaction, and check its answer.

    Raises what it raises for a fault, and CodeError for an error of its code or an answer that its contract forbids.
    """
    what = f"interaction {interaction.name}"
    answer = await await_user_code(what, method, partial(method, *arguments, **kwargs))
    for name, problem_of in _PROBLEMS.items():
        if method == getattr(interaction, name) and (problem := problem_of(answer)) is not None:
            raise contract_error(what, method, problem)
    return answer


def _score_problem(score: object) -> str | None:
    if score is None or finite(score) is not None:
        return None
    return f"it must return a finite number or None, found {score!r:.100}"


def _answer_problem(answer: object) -> str | None:
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
        "history": (
            "a list of messages or None",
            answer.history is None
            or (
                isinstance(answer.history, list | tuple)
                and all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in answer.history)
            ),
        ),
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


_PROBLEMS: dict[str, Callable[[object], str | None]] = {
    "open_dialogue": lambda text: (
        None if text is None or isinstance(text, str) else f"it must return a text or None, found {text!r:.100}"
    ),
    "generate_response": _answer_problem,
    "calculate_score": _score_problem,
}
"""Checks by method: each returns the error of an answer, or None."""
