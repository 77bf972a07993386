"""verl's contract of an interaction, and the interaction of ours that a class of it becomes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from agentrl.interaction import Interaction, InteractionResponse
from agentrl.system.json_value import JSON
from agentrl.system.numbers import finite
from agentrl.system.user_code import contract_error
from agentrl.trajectory import Message
from agentrl.verl.calling import call, stand_in


class BaseInteraction:
    """Base class of an interaction, as verl's. Methods may be coroutine functions or plain ones."""

    def __init__(self, config: dict[str, JSON]) -> None:
        """Take the YAML's config, in which `name` is the interaction's name."""
        self.config = config
        self.name = str(config.get("name", "interaction_agent"))

    @classmethod
    def adapted_class(cls) -> type[Interaction]:
        """Return the interaction that replaces this class."""
        return stand_in(AdaptedInteraction, cls)

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a trajectory, with the row's interaction_kwargs."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, object]], **kwargs: Any
    ) -> tuple[bool, str, float, Mapping[str, object]]:
        """Answer the last assistant message: whether the dialogue ends, the text, the turn's score, further values."""
        raise NotImplementedError(f"{type(self).__name__}.generate_response")

    async def calculate_score(self, *args: Any, **kwargs: Any) -> float:
        """Score the dialogue."""
        return 0.0

    async def finalize_interaction(self, *args: Any, **kwargs: Any) -> None:
        """End the trajectory."""


class AdaptedInteraction(Interaction):
    """An interaction of ours around one of verl's contract."""

    wrapped: ClassVar[type[BaseInteraction]]

    def __init__(self, config: dict[str, JSON], name: str) -> None:
        super().__init__(config, name)
        self.inner = self.wrapped({**config, "name": name})
        self._kwargs: dict[str, dict[str, JSON]] = {}

    @property
    def remembers(self) -> bool:
        return type(self.inner).calculate_score is not BaseInteraction.calculate_score

    async def start_interaction(self, instance_id: str, **kwargs: JSON) -> None:
        self._kwargs[instance_id] = {"name": self.name, **kwargs}
        await call(self.inner.start_interaction, instance_id, **self._kwargs[instance_id])

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        shown = [dict(message) for message in messages]
        answer = await call(self.inner.generate_response, instance_id, shown, **self._kwargs[instance_id])
        if not (isinstance(answer, tuple) and len(answer) == 4):
            problem = f"it must return (should end, text, score, further values), found {answer!r:.100}"
            raise contract_error(f"interaction {self.name}", self.inner.generate_response, problem)
        should_end, text, score, extra = answer
        if (fault := _problem(should_end, text, score, extra)) is not None:
            raise contract_error(f"interaction {self.name}", self.inner.generate_response, fault)
        return InteractionResponse(bool(should_end), text or "", 0.0 if score is None else float(score), extra or {})

    async def calculate_score(self, instance_id: str) -> float | None:
        if type(self.inner).calculate_score is BaseInteraction.calculate_score:
            return None
        # `agentrl.interaction.ask` refuses anything else.
        return cast("float | None", await call(self.inner.calculate_score, instance_id=instance_id))

    async def finalize_interaction(self, instance_id: str) -> None:
        self._kwargs.pop(instance_id, None)
        await call(self.inner.finalize_interaction, instance_id=instance_id)


def _problem(should_end: object, text: object, score: object, extra: object) -> str | None:
    """Describe the fault of an answer; None where nothing is."""
    if not hasattr(should_end, "__bool__"):
        return f"whether the dialogue ends must be true or false, found {should_end!r:.100}"
    if not isinstance(text, str | None):
        return f"its text must be a text, found {text!r:.100}"
    if score is not None and finite(score) is None:
        return f"its score must be a finite number or None, found {score!r:.100}"
    if not isinstance(extra, dict | None):
        return f"its further values must be a dict, found {extra!r:.100}"
    return None
